"""Kernels with epilogues compile without a GPU, and their machine code does what it should."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from support.compiling import code_of, skip_without_compiler
from support.policies import compiled_specs

from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph, Node, Operand, Result
from jax_hopper_gemm.gemm.kernel_params import PARAM_BYTES
from jax_hopper_gemm.gemm.legality import violations
from jax_hopper_gemm.gemm.problem import GemmProblem, MatrixLayout
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.launch.plan import Int32, make_plan

skip_without_compiler()

pytestmark = pytest.mark.compile

BF16, F16, F32 = "bfloat16", "float16", "float32"


def matrix(value: int, dtype: str = BF16, plane: int = 0, planes: int = 1) -> Result:
    return Result("matrix", value, dtype, plane=plane, planes=planes)


RESIDUAL = EpilogueGraph(
    operands=(Operand("matrix", BF16), Operand("column", F32)),
    nodes=(Node("mul", (0, 2)), Node("add", (3, 1))),
    results=(matrix(4),),
)
ACCUMULATE = EpilogueGraph(
    operands=(Operand("matrix", F32), Operand("scalar", F32)),
    nodes=(Node("mul", (0, 2)), Node("add", (3, 1))),
    results=(matrix(4, F32),),
)
DROPOUT = EpilogueGraph(
    operands=(Operand("matrix", "bool"), Operand("column", F16)),
    nodes=(Node("mul", (0, 2)), Node("constant", (), (0.0,)), Node("select", (1, 3, 4))),
    results=(matrix(5, F16),),
)
GATED = EpilogueGraph(2, (), (Node("tanh", (0,)), Node("mul", (2, 1))), (matrix(3),))
GATED_SAVED = replace(GATED, results=(matrix(3), matrix(0, BF16, 0, 2), matrix(1, BF16, 1, 2)))
BIAS_GRADIENT = EpilogueGraph(
    operands=(Operand("matrix", BF16),),
    nodes=(Node("mul", (0, 1)), Node("abs", (2,))),
    results=(matrix(2), Result("column_sum", 2), Result("max", 3)),
)
LOGSUMEXP = EpilogueGraph(results=(Result("row_sumexp", 0),))


def spec_of(graph: EpilogueGraph, tile_m: int, tile_n: int, **fields) -> GemmSpec:
    d_dtype = graph.matrices[0].dtype if graph.matrices else BF16
    loads = 2 if graph.loaded else 0
    defaults: dict[str, Any] = {
        "a_major": "k", "b_major": "n", "num_stages": 3, "epi_stages": 2, "epi_load_stages": loads,
    }  # fmt: skip
    return GemmSpec(
        BF16, BF16, d_dtype, tile_m=tile_m, tile_n=tile_n, epilogue=graph, **defaults | fields
    )


SPECS = [
    spec_of(ACCUMULATE, 128, 256, cluster_m=2, num_stages=2),
    spec_of(RESIDUAL, 128, 128, epi_load_stages=4, epi_tile_n=16, warp_schedule="pingpong"),
    spec_of(DROPOUT, 128, 128, tile_scheduler="single"),
    spec_of(GATED, 128, 256, cluster_m=2),
    spec_of(GATED_SAVED, 192, 128, a_major="m"),
    spec_of(BIAS_GRADIENT, 128, 256, cluster_m=2, tile_scheduler="dynamic"),
    spec_of(LOGSUMEXP, 128, 256, cluster_m=2),
    *(
        spec
        for spec in compiled_specs()
        if spec.epilogue and spec.d_major == "n"
        and not (spec.grouped or spec.split_k or spec.nested or spec.loose_d)
    ),
]  # fmt: skip


def problem_of(spec: GemmSpec) -> GemmProblem:
    problem = GemmProblem.dense(
        512, 768, 640, 2, a_major=spec.a_major, b_major=spec.b_major, d_dtype=spec.d_dtype
    )
    layouts = {
        "matrix": problem.d,
        "row": MatrixLayout("n", 768, 768),
        "column": MatrixLayout("m", 512, 512),
        "scalar": MatrixLayout("n", 1, 1),
    }
    operands = tuple(layouts[operand.kind] for operand in spec.graph.operands)
    return replace(problem, epilogue=spec.epilogue, operands=operands)


def loads_of(code: str, rank: int) -> int:
    return len(re.findall(rf"UTMALDG\.{rank}D", code))


@pytest.fixture(params=SPECS, ids=lambda spec: spec.name)
def kernel(request, built):
    spec = request.param
    return spec, *code_of(spec, built)


def test_epilogue_keeps_to_its_registers(kernel):
    *_, facts, _ = kernel
    _, math = facts.register_budgets
    assert facts.highest_register < math


def test_wgmma_stays_asynchronous(kernel):
    """One group a k-tile: the first tile's, and that of the loop over the others."""
    *_, code = kernel
    assert len(re.findall(r"HGMMA.*gsb0", code)) == 2


def test_parameters_are_those_of_the_plan(kernel):
    spec, manifest, *_ = kernel
    plan = make_plan(problem_of(spec), spec, RasterOrder(), num_sms=132)
    planned = [PARAM_BYTES[parameter.kind] for parameter in plan.params]
    assert [parameter.size for parameter in manifest.parameters] == planned
    if spec.graph.needs_extents:
        names = [parameter.name for parameter in manifest.parameters]
        assert [plan.params[names.index(name)] for name in "mn"] == [Int32(512), Int32(768)]


def test_each_matrix_is_stored_once_a_subtile(kernel):
    spec, _, facts, _ = kernel
    subtiles = spec.rows_per_warpgroup // 64 * (spec.of_slice.d_tile_n // spec.epi_tile_n)
    boxes = sum(
        spec.epi_tile_n // spec.epi_box(result.dtype).contiguous for result in spec.graph.matrices
    )
    assert facts.tma_stores == subtiles * boxes


def test_operands_are_loaded_by_tma(kernel):
    spec, _, _, code = kernel
    kinds = [operand.kind for operand in spec.graph.loaded]
    assert loads_of(code, rank=2) == kinds.count("row") + kinds.count("column")
    factors = [(spec.a_box, spec.tile_m, spec.a_major == "k")]
    factors += [(spec.b_box, spec.d_tile_n, spec.b_major == "k")] * spec.graph.accumulators
    copies = sum(
        (spec.tile_k if k_major else rows) // box.contiguous for box, rows, k_major in factors
    )
    matrices = [operand for operand in spec.graph.loaded if operand.kind == "matrix"]
    copies += sum(spec.epi_tile_n // spec.epi_box(o.dtype).contiguous for o in matrices)
    assert loads_of(code, rank=3) == copies
    assert ("LDSM" in code) == any(operand.dtype in (BF16, F16) for operand in matrices)


def test_subtiles_are_stored_while_later_ones_are_computed(built):
    *_, code = code_of(spec_of(GATED, 128, 256, cluster_m=2), {})
    instructions = re.findall(r"\b(MUFU\.TANH|UTMASTG)\b", code)
    stores = [i for i, name in enumerate(instructions) if name == "UTMASTG"]
    before = [instructions[:i].count("MUFU.TANH") for i in stores]
    assert before == [16, 32, 48, 64]


def test_operands_of_three_warpgroups_are_refused():
    reasons = violations(spec_of(RESIDUAL, 192, 128))
    assert any("take another tile_m than 192" in reason for reason in reasons)
