"""The families of kernels that dispatch can choose, and few kernels that show all of them.

A family is a pair of traits: an arithmetic with a kind of groups, a stack with split K, block
scales with a row of the epilogue. Kernels that lack one of them are no use to `problems.kernels`.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from functools import cache

from support.covering import covering_subset
from support.graphs import EIGHT_BIT, STANDARD

from jax_hopper_gemm.dispatch.candidates import A_MAJORS, AXES, B_MAJORS, all_model_specs
from jax_hopper_gemm.gemm.bf16_parts import PRESETS
from jax_hopper_gemm.gemm.dtypes import DTYPES, HALVES, OPERANDS, WEIGHTS, multiply, results_of
from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph
from jax_hopper_gemm.gemm.problem_type import ProblemType
from jax_hopper_gemm.gemm.spec import BLOCKS, K_GROUPS, GemmSpec
from jax_hopper_gemm.gemm.type_legality import GATHERABLE, type_violations

# Epilogues of every kind of operand and of result, each alone in one.
GRAPHS: tuple[EpilogueGraph, ...] = (
    *(STANDARD[name] for name in (
        "bias", "bias_gelu_saved", "residual", "alpha_beta", "scaled_rows", "masked", "planes",
        "gated_silu", "column_sum", "row_sum", "row_sumexp", "amax", "top_k", "everything",
    )),
    *EIGHT_BIT.values(),
)  # fmt: skip


def problem_types() -> Iterator[ProblemType]:
    """Yields types of problems for which there are kernels."""
    for plain in _plain_types():
        if not any(type_violations(plain)):
            for d_dtype in results_of(plain.a_dtype):
                yield from _legal(replace(plain, d_dtype=d_dtype))
            for graph in GRAPHS:
                if plain.nested and any(result.planes > 1 for result in graph.results):
                    continue  # such results are compact (`dispatch/canonical.py`)
                d_dtype = graph.matrices[0].dtype
                stored = graph.transposed if plain.d_major == "m" else graph
                yield from _legal(replace(plain, d_dtype=d_dtype, epilogue=stored))


def _legal(kind: ProblemType) -> Iterator[ProblemType]:
    if not any(type_violations(kind)):
        yield kind


def _plain_types() -> Iterator[ProblemType]:
    """Yields types without an epilogue, legal or not, whose D is float32."""
    pairs = [(a, b) for a in OPERANDS for b in OPERANDS if multiply(a, b)]
    pairs += itertools.product(HALVES, WEIGHTS)
    groups = [(axis, operand) for axis in AXES for operand in (None, *GATHERABLE[axis])]
    batches: list[dict] = [{"indexed": "a"}, {"indexed": "b"}, {"nested": True}, {"d_major": "m"}]
    batches += [{"d_major": "m", "nested": True}]
    batches += [{"grouped": axis, "gathered": operand} for axis, operand in groups]
    for (a, b), a_major, b_major in itertools.product(pairs, A_MAJORS, B_MAJORS):
        plain = ProblemType(a, b, "float32", a_major, b_major)
        for fields, batch in itertools.product(_arithmetics(a, b), batches):
            # Of operands with block scales lowering finds neither rows nor matrices of others.
            if not ("a_block" in fields and (batch.get("gathered") or "indexed" in batch)):
                yield replace(plain, **fields, **batch)


def _arithmetics(a: str, b: str) -> Iterator[dict]:
    """Yields the fields that say how operands of two dtypes are multiplied."""
    yield {}
    if a == b and a in ("float32", "bfloat16"):
        yield from ({"bf16_terms": terms} for terms in PRESETS)
    if a == "float32":
        yield from ({"simt_width": width} for width in (1, 4))
    if DTYPES[a].itemsize == 1:
        yield {"promoted": True}
        for blocks in itertools.product(BLOCKS, repeat=2):
            yield {"promoted": True, "a_block": blocks[0], "b_block": blocks[1]}
    if b in WEIGHTS and a in HALVES:
        yield from ({"k_group": group} for group in K_GROUPS)


def arithmetic_of(kind: ProblemType | GemmSpec) -> str:
    """Returns how a kernel multiplies, in words."""
    if kind.b_dtype in WEIGHTS and kind.a_dtype in HALVES:
        return f"weights of {kind.b_dtype}{', scaled' if kind.k_group else ''}"
    if kind.simt_width:
        return f"FMA units, {kind.simt_width}"
    if kind.bf16_terms:
        stored = ", in memory" if kind.a_dtype != "float32" else ""
        return f"{kind.bf16_terms} products of parts{stored}"
    if kind.a_block:
        return f"blocks of {kind.a_block} and {kind.b_block}"
    narrow = "8-bit floats" if kind.a_dtype.startswith("float8") else kind.a_dtype
    return narrow + (", promoted" if kind.promoted else "")


def traits_of_type(kind: ProblemType | GemmSpec) -> list[tuple[str, Hashable]]:
    """Returns what a type says of its kernels."""
    graph = kind.epilogue or EpilogueGraph()
    return [
        ("arithmetic", arithmetic_of(kind)),
        ("groups", (kind.grouped, kind.gathered)),
        ("majors", (kind.a_major, kind.b_major, kind.d_major)),
        *([("batch", "nested")] if kind.nested else []),
        *([("stack of", kind.indexed)] if kind.indexed else []),
        ("results", kind.d_dtype),
        ("accumulators", graph.accumulators),
        ("epilogue", kind.epilogue is not None),
        *(("operand", kind_of) for kind_of in sorted({o.kind for o in graph.operands})),
        *(("result", kind_of) for kind_of in sorted({r.kind for r in graph.results})),
    ]


def traits_of(spec: GemmSpec) -> list[tuple[str, Hashable]]:
    """Returns the traits of a kernel."""
    return [
        *traits_of_type(spec),
        ("rows", spec.tile_m),
        ("cluster", (spec.cluster_m, spec.cluster_n, spec.cluster_k)),
        ("warp schedule", spec.warp_schedule),
        ("tile scheduler", (spec.tile_scheduler, spec.split_k)),
        ("stream", (spec.short_boxes, spec.evict_first)),
    ]


def families_of(specs: Iterable[GemmSpec]) -> set[frozenset]:
    """Returns the families that kernels belong to."""
    return set().union(*map(_families, specs))


@cache
def _families(kind: ProblemType | GemmSpec) -> frozenset[frozenset]:
    traits = traits_of(kind) if isinstance(kind, GemmSpec) else traits_of_type(kind)
    return frozenset(map(frozenset, itertools.combinations(traits, 2)))


@cache
def pool() -> tuple[GemmSpec, ...]:
    """Returns what dispatch can choose for types that together have all traits, and their pairs."""
    types = dict.fromkeys(problem_types())
    missing = set().union(*map(_families, types))
    found: dict[GemmSpec, None] = {}

    def shows(kind: ProblemType) -> set[frozenset]:
        return missing.intersection(_families(kind))

    while few := covering_subset(types, shows):
        more = dict.fromkeys(spec for kind in few for spec in all_model_specs(kind))
        missing -= families_of(more)
        found |= more
        for kind in few:  # some have no kernel that is worth it
            del types[kind]
        types = {kind: None for kind in types if shows(kind)}
    return tuple(found)


def chosen_specs(others: Iterable[GemmSpec] = ()) -> list[GemmSpec]:
    """Returns few kernels that dispatch can choose; with `others` they are of every family."""
    there = families_of(others)
    return covering_subset(pool(), lambda spec: _families(spec) - there)
