"""Kernels of 8-bit operands compile without a spill, to the instructions of their dtypes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.compiling import code_of, skip_without_compiler
from support.covering import ALL, covering_subset
from support.eight_bit import chosen_specs
from support.graphs import EIGHT_BIT
from support.policies import pairs_of
from support.traits import traits_of

from jax_hopper_gemm.gemm.dtypes import DTYPES
from jax_hopper_gemm.gemm.spec import GemmSpec

skip_without_compiler()

pytestmark = pytest.mark.compile

E4M3, E5M2, INT8 = "float8_e4m3fn", "float8_e5m2", "int8"
NAMES = {E4M3: "E4M3", E5M2: "E5M2", INT8: "S8"}


def spec_of(a: str, b: str, d: str, tile_m: int = 128, tile_n: int = 256, **given: Any) -> GemmSpec:
    fields: dict[str, Any] = {"tile_k": 128, "cluster_m": 2, "num_stages": 3, "epi_stages": 2}
    fields |= given
    if name := fields.get("epilogue"):
        fields["epilogue"] = EIGHT_BIT[name]
        fields["epi_load_stages"] = 2 if EIGHT_BIT[name].loaded else 0
    return GemmSpec(a, b, d, "k", "k", tile_m, tile_n, **fields)


LISTED = [
    spec_of(E4M3, E4M3, "bfloat16", num_stages=4),
    spec_of(E4M3, E5M2, "float32", tile_scheduler="dynamic"),
    spec_of(E5M2, E4M3, "float16", tile_n=128, tile_k=256, cluster_m=1),
    spec_of(E4M3, E4M3, E4M3, tile_m=256, tile_n=128, cluster_m=1, cluster_n=2),
    spec_of(E4M3, E4M3, "bfloat16", tile_n=192, promoted=True, num_stages=4),
    spec_of(E5M2, E5M2, "float32", tile_n=96, promoted=True, warp_schedule="pingpong"),
    spec_of(E4M3, E4M3, "bfloat16", tile_n=96, promoted=True, grouped="m"),
    spec_of(E4M3, E4M3, "bfloat16", tile_n=192, promoted=True, a_block=1, b_block=128),
    spec_of(E4M3, E5M2, "float32", tile_n=128, promoted=True, a_block=1, b_block=1),
    spec_of(E4M3, E4M3, "bfloat16", promoted=True, a_block=1, b_block=1, num_stages=4),
    spec_of(INT8, INT8, "bfloat16", tile_n=192, promoted=True, a_block=1, b_block=1),
    spec_of(E4M3, E4M3, "bfloat16", tile_n=192, promoted=True, a_block=1, b_block=1, grouped="k"),
    spec_of(
        E4M3, E4M3, "bfloat16", tile_n=192, promoted=True, a_block=1, b_block=1,
        tile_scheduler="dynamic",
    ),
    spec_of(INT8, INT8, "bfloat16", tile_n=160, promoted=True, a_block=128, b_block=128),
    spec_of(
        E4M3, E4M3, "bfloat16", tile_n=128, promoted=True, a_block=1, b_block=128, grouped="m",
        tile_scheduler="dynamic",
    ),
    spec_of(E4M3, E5M2, "bfloat16", tile_n=192, promoted=True, grouped="k"),
    spec_of(E4M3, E4M3, "bfloat16", grouped="k", tile_scheduler="dynamic"),
    spec_of(
        E4M3, E4M3, "bfloat16", promoted=True, a_block=1, b_block=1, grouped="k",
        tile_scheduler="dynamic",
    ),
    *(spec for spec in chosen_specs() if spec.tile_m == 192 or spec.epilogue),
    spec_of(INT8, INT8, "int32"),
    spec_of(INT8, INT8, "bfloat16", tile_n=192, warp_schedule="pingpong"),
    spec_of(INT8, INT8, "bfloat16", epilogue="scaled_rows_columns"),
    spec_of(INT8, INT8, INT8, epilogue="scaled_int8"),
    spec_of(E4M3, E4M3, E5M2, epilogue="scaled_e5m2", tile_n=128),
    spec_of(E4M3, E4M3, E4M3, epilogue="quantized_e4m3", tile_n=192),
    spec_of(E4M3, E4M3, "float32", epilogue="through_int8", tile_n=128),
]  # fmt: skip
PAIRED = (
    "a_dtype", "grouped", "promoted", "a_block", "b_block", "tile_scheduler", "warp_schedule",
    "tile_m", "tile_n",
)  # fmt: skip


def shown(spec: GemmSpec) -> set:
    """Returns each trait and operation, and each pair of what a kernel's sums depend on."""
    operations = (node.op for node in spec.graph.nodes)
    pairs = pairs_of({field: getattr(spec, field) for field in PAIRED})
    return {*traits_of(spec), *operations, *pairs}


SPECS = LISTED if ALL else covering_subset(LISTED, shown)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_kernel_compiles_to_the_instructions_of_its_dtypes(spec, built):
    _, facts, text = code_of(spec, built)

    integer = DTYPES[spec.a_dtype].mma == "i8"
    kind = "IGMMA" if integer else "QGMMA"
    dtypes = f"{NAMES[spec.a_dtype]}.{NAMES[spec.b_dtype]}"
    columns = spec.sum_columns if spec.promoted else spec.tile_n
    shape = f"64x{columns}x32" + ("" if integer else ".F32")
    found = set(re.findall(r"\b([A-Z]GMMA\.[\w.]+)", text))
    assert found == {f"{kind}.{shape}.{dtypes}" + (".SAT" if integer else "")}
    k_steps = spec.tile_k // 32 * (spec.rows_per_warpgroup // 64)
    assert facts.wgmma >= k_steps * (1 if spec.promoted else 2)  # the first k-tile is another loop

    sums = spec.rows_per_warpgroup * spec.tile_n // 128
    added = len(re.findall(r"\bFFMA\b" if spec.a_block else r"\bFADD\b", text))
    assert (added >= sums) == spec.promoted
    staged = len(re.findall(r"\bUBLKCP\b", text))  # of rows' and of columns' scales
    assert staged == (2 if spec.a_block else 0)
    casts = {E4M3: "F2FP.SATFINITE.E4M3", E5M2: "F2FP.SATFINITE.E5M2", INT8: "F2I"}
    if spec.d_dtype in casts:
        assert casts[spec.d_dtype] in text
