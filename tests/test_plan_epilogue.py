"""Launch plans of kernels with an epilogue: its operands, gates and results."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.plans import LARGE, PAIR, decode, epilogue_case, tensor_maps

from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph, Node, Operand, Result
from jax_hopper_gemm.gemm.grid import num_inputs, result_shapes
from jax_hopper_gemm.gemm.problem import GemmProblem, MatrixLayout
from jax_hopper_gemm.gemm.raster import RasterOrder, make_raster
from jax_hopper_gemm.launch.plan import Int32, Pointer, TensorMap, make_plan

pytestmark = pytest.mark.pure

KINDS = EpilogueGraph(  # an operand of every kind; a mask
    operands=(
        Operand("scalar", "float32"), Operand("row", "bfloat16"), Operand("column", "float32"),
        Operand("matrix", "float32"), Operand("matrix", "bool"),
    ),
    nodes=(
        Node("mul", (0, 1)), Node("add", (6, 2)), Node("mul", (7, 3)), Node("add", (8, 4)),
        Node("select", (5, 9, 0)),
    ),
    results=(Result("matrix", 10, "bfloat16"), Result("matrix", 0), Result("max", 10)),
)  # fmt: skip


def test_operands_of_every_kind_follow_the_results():
    problem, spec = epilogue_case(
        KINDS, MatrixLayout("n", 0, 5), MatrixLayout("n", 0, 520), MatrixLayout("m", 0, 0),
        MatrixLayout("n", 528, 528 * 400), MatrixLayout("n", 512, 0),
    )  # fmt: skip
    plan = make_plan(problem, spec, RasterOrder(), 132)
    a, b, d, raw, largest, scalar, step, row, column, matrix, mask = plan.params[:11]
    assert [x.buffer for x in (a, b) if isinstance(x, TensorMap)] == [0, 1]
    # Buffers: A, B, the five operands, then the three results.
    assert num_inputs(problem) == 7
    assert d == TensorMap(
        7, "bfloat16", (512, 328, 3), (1024, 1024 * 328), (32, 64, 1), 64
    )  # fmt: skip
    assert raw == TensorMap(8, "float32", (512, 328, 3), (2048, 2048 * 328), (32, 64, 1), 128)
    assert largest == Pointer(9)
    assert (scalar, step) == (Pointer(2), Int32(5))
    assert row == TensorMap(3, "bfloat16", (512, 3), (1040,), (32, 1), 0)
    assert column == TensorMap(4, "float32", (328, 3), (0,), (64, 1), 0)
    assert matrix == TensorMap(
        5, "float32", (512, 328, 3), (528 * 4, 528 * 400 * 4), (32, 64, 1), 128
    )
    assert mask == TensorMap(6, "bool", (512, 328, 3), (512, 0), (32, 64, 1), 32)
    raster = make_raster(3, 4, 3, along_m=True, swizzle=8)
    assert plan.params[11:] == (*map(Int32, raster), Int32(1), Int32(328), Int32(512))


def test_a_vector_shared_by_a_single_matrix_has_a_legal_stride():
    graph = EpilogueGraph(
        operands=(Operand("column", "bfloat16"),), nodes=(Node("add", (0, 1)),),
        results=(Result("matrix", 2, "bfloat16"),),
    )  # fmt: skip
    problem, spec = epilogue_case(graph, MatrixLayout("m", 0, 3), m=7, batches=1)
    assert tensor_maps(problem, spec)[-1] == TensorMap(2, "bfloat16", (7, 1), (16,), (64, 1), 0)


@pytest.mark.parametrize("graph", [None, PAIR, KINDS])
def test_the_extents_are_passed_only_where_elements_are_counted(graph):
    layouts = (MatrixLayout("n", 512, 0),) * (len(graph.operands) if graph else 0)
    problem, spec = epilogue_case(graph or EpilogueGraph(results=PAIR.results), *layouts) \
        if graph else (GemmProblem.dense(328, 512, 64, 3), LARGE)  # fmt: skip
    trailing = make_plan(problem, spec, RasterOrder(), 132).params[-2:]
    assert (trailing == (Int32(328), Int32(512))) == (graph is KINDS)


def test_gate_and_up_in_two_arrays_are_two_inputs():
    problem, spec = epilogue_case(PAIR)
    gate, up, d = tensor_maps(problem, spec)[1:]
    assert (gate.buffer, up.buffer, d.buffer) == (1, 2, 3)
    assert replace(up, buffer=1) == gate
    assert gate.box == (64, 64, 1)  # half a tile of 128 columns
    assert d.dims == (512, 328, 3)
    plan = make_plan(problem, spec, RasterOrder(), 132)
    assert plan.grid == (3 * 8 * 3, 1, 1)


def test_gate_and_up_in_one_array_are_one_input_at_two_offsets():
    # weights (K, 2, N): lines of gate and up take turns
    layout = MatrixLayout("n", 2 * 512, 0)
    problem, spec = epilogue_case(PAIR, up_offset=512)
    problem = replace(problem, b=layout)
    _, gate, up, d = tensor_maps(problem, spec)
    assert (gate.buffer, up.buffer, d.buffer) == (1, 1, 2)
    assert (gate.offset, up.offset) == (0, 1024)
    assert gate.strides == up.strides == (2048, 0)
    decoded = decode(make_plan(problem, spec, RasterOrder(), 132).encode())
    assert [param[1:3] for param in decoded["params"][:4]] == [(0, 0), (1, 0), (1, 1024), (2, 0)]


def test_planes_lie_side_by_side_in_one_result():
    planes = tuple(Result("matrix", i, "float32", plane=i, planes=2) for i in (0, 1))
    graph = EpilogueGraph(2, results=(*planes, Result("matrix", 0, "bfloat16"), Result("max", 0)))
    problem, spec = epilogue_case(graph, d_dtype="float32")
    problem = replace(problem, d_dtype="float32")
    _, _, _, gate, up, half = tensor_maps(problem, spec)
    assert result_shapes(problem, spec)[:2] == [
        ((3, 328, 2, 512), "float32"), ((3, 328, 512), "bfloat16")
    ]  # fmt: skip
    assert (gate.buffer, up.buffer, half.buffer) == (3, 3, 4)
    assert (gate.offset, up.offset, half.offset) == (0, 2048, 0)
    assert gate.dims == up.dims == (512, 328, 3)
    assert gate.strides == up.strides == (4096, 4096 * 328)
    assert half.strides == (1024, 1024 * 328)
    pointers = [
        p for p in make_plan(problem, spec, RasterOrder(), 132).params if type(p) is Pointer
    ]
    assert pointers == [Pointer(5)]


def test_reductions_are_partial_by_tile_and_the_counter_follows_them():
    kinds = ("column_sum", "row_sum", "row_max", "row_sumexp", "max")
    top = (Result("top_k_values", 0, k=4), Result("top_k_indices", 0, k=4))
    graph = EpilogueGraph(results=(*(Result(kind, 0) for kind in kinds), *top))
    problem, spec = epilogue_case(
        graph, m=100, n=200, tile_n=96, epi_tile_n=32, tile_scheduler="dynamic"
    )
    assert result_shapes(problem, spec) == [
        ((3, 2, 200), "float32"), ((3, 3, 100), "float32"), ((3, 3, 100), "float32"),
        ((3, 3, 2, 100), "float32"), ((3, 7, 3), "float32"), ((3, 100, 4), "float32"),
        ((3, 100, 4), "int32"),
    ]  # fmt: skip
    plan = make_plan(problem, spec, RasterOrder(), 132)
    assert plan.params[2:9] == tuple(map(Pointer, range(2, 9)))
    assert plan.params[-1] == Pointer(9)
    assert plan.workspaces == (16,)
