"""Traits of kernels, of which tests that look at code or memory take few kernels with all."""

from __future__ import annotations

import itertools

from support.covering import ALL

from jax_hopper_gemm.gemm.spec import GemmSpec

EXTENTS_AND_DTYPES: tuple[str, ...] = () if ALL else (
    "tile_m", "tile_n", "tile_k", "epi_tile_n", "cluster", "a_dtype", "b_dtype", "d_dtype",
)  # fmt: skip
# And parts of epilogues, which `test_compile_functions.py` compiles in many ways.
_ALONE = () if ALL else (*EXTENTS_AND_DTYPES, "operand", "result")


def shown_by_code(spec: GemmSpec, alone: tuple[str, ...] = _ALONE) -> set[frozenset]:
    """Returns each trait of a kernel, and each pair, without those traits that count alone."""
    traits = traits_of(spec)
    paired = [x for x in traits if x[0] not in alone]
    single = {frozenset((trait,)) for trait in traits}
    return single | {frozenset(pair) for pair in itertools.combinations(paired, 2)}


def traits_of(spec: GemmSpec) -> list[tuple[str, object]]:
    """Returns what a kernel's code depends on: policies, layouts, dtypes, parts of its epilogue."""
    fields = (
        "a_dtype", "b_dtype", "d_dtype", "tile_m", "tile_n", "tile_k", "warp_schedule",
        "tile_scheduler", "epi_tile_n", "indexed", "nested", "short_boxes", "evict_first",
        "split_k", "d_major", "loose_d",
    )  # fmt: skip
    return [
        *((field, getattr(spec, field)) for field in fields),
        ("majors", (spec.a_major, spec.b_major)),
        ("cluster", (spec.cluster_m, spec.cluster_n, spec.cluster_k)),
        ("groups", (spec.grouped, spec.gathered)),
        ("accumulators", spec.graph.accumulators),
        ("k_group", spec.k_group),
        *(("operand", kind) for kind in sorted({o.kind for o in spec.graph.operands})),
        *(("result", kind) for kind in sorted({r.kind for r in spec.graph.results})),
    ]
