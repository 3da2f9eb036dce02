"""Launch plans of grouped products: maps of rows, sizes and grids."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from random import Random

import pytest
from support.plans import PAIR, decode, grouped_case, scalars, tensor_maps

from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph, Node, Operand, Result
from jax_hopper_gemm.gemm.grid import WRAP_BYTES, group_raster, num_inputs, result_shapes
from jax_hopper_gemm.gemm.group_search import SPAN_EXTENT, GroupRaster
from jax_hopper_gemm.gemm.groups import GroupedAxis, Groups
from jax_hopper_gemm.gemm.problem import MatrixLayout
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.launch.plan import Int32, Pointer, TensorMap, make_plan
from jax_hopper_gemm.testing.lanes import group_tiles

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("axis", ["m", "k"])
def test_maps_of_grouped_rows_reach_the_rows_of_a_span_and_end_with_it(axis):
    """Addresses are those of row `end - size + r`, modulo 2**64; r >= size is outside."""
    random = Random(f"spans {axis}")
    length = 70_000
    problem, spec = grouped_case(axis, **{axis: length})
    maps = tensor_maps(problem, spec)
    spans = [m for m in maps if len(m.dims) == 4]
    assert [m.buffer for m in spans] == ([3] if axis == "m" else [0, 1])
    for tensor_map in spans:
        row_bytes = tensor_map.strides[0]
        assert row_bytes == tensor_map.dims[0] * 2
        assert all(0 < stride < 2**40 and stride % 16 == 0 for stride in tensor_map.strides)
        assert all(0 < dim <= 2**32 for dim in tensor_map.dims)
        for _ in range(200):
            end = random.choice([0, length, random.randint(0, length)])
            size = random.choice([0, end, random.randint(0, end)])
            row = random.choice([0, size, max(0, size - 1), random.randint(0, size + 256)])
            at = (SPAN_EXTENT - size + row, end, SPAN_EXTENT)
            assert all(0 <= i < 2**31 for i in at)
            inside = [i < dim for i, dim in zip(at, tensor_map.dims[1:], strict=True)]
            assert inside == [row < size, True, True]
            reached = sum(i * s for i, s in zip(at, tensor_map.strides, strict=True)) % 2**64
            assert row >= size or reached == row_bytes * (end - size + row)


@pytest.mark.parametrize("row_bytes", [16, 4096, WRAP_BYTES - 16])
def test_rows_of_any_legal_length_wrap_around_to_themselves(row_bytes):
    problem, spec = grouped_case("m")
    d = MatrixLayout("n", row_bytes // 2)
    tensor_map = tensor_maps(replace(problem, n=8, d=d), spec)[2]
    assert tensor_map.dims == (8, SPAN_EXTENT, 321, SPAN_EXTENT + 1)
    assert all(0 < stride < 2**40 for stride in tensor_map.strides)
    at = (SPAN_EXTENT - 100 + 7, 250, SPAN_EXTENT)
    reached = sum(i * s for i, s in zip(at, tensor_map.strides, strict=True))
    assert reached % 2**64 == row_bytes * (250 - 100 + 7)


def test_other_maps_of_a_grouped_product_are_of_its_matrices():
    problem, spec = grouped_case("m")
    a, b, d = tensor_maps(problem, spec)
    assert (a.dims, b.dims) == ((200, 320, 1), (512, 200, 5))
    assert b.strides == (1024, 512 * 200 * 2)
    assert (len(d.dims), d.box, d.swizzle) == (4, (32, 64, 1, 1), 64)
    problem, spec = grouped_case("k")
    a, b, d = tensor_maps(problem, spec)
    assert (a.box, b.box) == ((64, 64, 1, 1), (64, 64, 1, 1))
    assert (d.dims, d.strides) == ((512, 320, 5), (1024, 1024 * 320))


def test_boxes_of_span_maps_are_shared_by_a_cluster():
    problem, spec = grouped_case("k", cluster_m=2, cluster_n=2)
    a, b, _ = tensor_maps(problem, spec)
    assert a.box == (64, 32, 1, 1) == b.box


@pytest.mark.parametrize("scheduler", ["static", "dynamic"])
@pytest.mark.parametrize("axis", ["m", "k"])
def test_sizes_and_their_walk_follow_the_results(axis, scheduler):
    problem, spec = grouped_case(axis, tile_scheduler=scheduler)
    groups = GroupedAxis(axis, 11, Groups(6, 4, first=1, step=4))
    problem = replace(problem, groups=groups, l=8)
    plan = make_plan(problem, spec, RasterOrder("n", 3), 132)
    a, b, d, *rest = plan.params
    # Buffers: A, B, the sizes, then D.
    assert num_inputs(problem) == 3
    assert [x.buffer for x in (a, b, d) if isinstance(x, TensorMap)] == [0, 1, 3]
    length = 320 if axis == "m" else 200
    tiles = 4 if axis == "m" else 3  # of N, of M
    raster = GroupRaster(11, 6, 1, 4, 4, length, tiles, 4, 0, 3)
    counter = [Pointer(4)] if scheduler == "dynamic" else []
    vectors = 320 * 512 // 8  # of 16 bytes
    zeros = [Pointer(3), *map(Int32, (1, vectors, 0, vectors))] if axis == "k" else []
    assert rest == [Pointer(2), *map(Int32, raster), Int32(4), *zeros, *counter]


def test_rows_of_zeros_leave_the_gaps_between_rows_alone():
    problem, spec = grouped_case("k")
    assert spec.zero_fill_warp
    problem = replace(problem, d=MatrixLayout("n", 512 + 24, 320 * (512 + 24) + 64))
    *_, rows, vectors, row_stride, matrix_stride = make_plan(
        problem, spec, RasterOrder(), 132
    ).params
    assert (rows, vectors) == (Int32(320), Int32(64))
    assert (row_stride, matrix_stride) == (Int32(67), Int32(320 * 67 + 8))


def test_a_pair_of_ctas_walks_two_tiles_of_columns_at_a_time():
    problem, spec = grouped_case("m", n=3 * 128 - 8, cluster_m=2)
    plan = make_plan(problem, spec, RasterOrder("n", 3), 132)
    assert plan.cluster == (2, 1, 1)
    raster = group_raster(problem, spec, RasterOrder("n", 3))
    assert (raster.tiles, raster.clusters_n) == (3, 2)
    alone = tensor_maps(problem, replace(spec, cluster_m=1))[1]
    assert 2 * math.prod(tensor_maps(problem, spec)[1].box) == math.prod(alone.box), "halves of B"


def test_sizes_follow_the_epilogues_operands():
    graph = EpilogueGraph(
        operands=(Operand("scalar", "float32"), Operand("row", "bfloat16"),
                  Operand("column", "float32"), Operand("matrix", "bfloat16")),
        nodes=(Node("mul", (0, 1)), Node("add", (5, 2)), Node("mul", (6, 3)), Node("add", (7, 4))),
        results=(Result("matrix", 8, "bfloat16"), Result("row_sum", 8)),
    )  # fmt: skip
    layouts = (
        MatrixLayout("n", 0, 1), MatrixLayout("n", 0, 512), MatrixLayout("m", 0, 0),
        MatrixLayout("n", 512, 0),
    )  # fmt: skip
    problem, spec = grouped_case("m", graph=graph, operands=layouts)
    params = make_plan(problem, spec, RasterOrder(), 132).params
    assert num_inputs(problem) == 7
    results = result_shapes(problem, spec)
    assert results == [((1, 320, 512), "bfloat16"), ((1, 4, 320), "float32")]
    d, row_sum, scalar, step, row, column, matrix, sizes = params[2:10]
    assert isinstance(d, TensorMap) and d.buffer == 7 and len(d.dims) == 4
    assert (row_sum, scalar, step, sizes) == (Pointer(8), Pointer(2), Int32(1), Pointer(6))
    # A row for each group; a column and a matrix along the rows of D. Copies of a column begin at
    # multiples of 16 bytes and bring the 64 rows of a tile that begins between two.
    assert row == TensorMap(3, "bfloat16", (512, 5), (1024,), (32, 1), 0)
    assert column == TensorMap(4, "float32", (320, 1), (16,), (68, 1), 0)
    assert isinstance(matrix, TensorMap) and matrix.dims == (512, 320, 1)


def test_gathered_operands_are_pointers_with_an_array_of_indices():
    problem, spec = grouped_case("m")
    assert problem.groups
    problem = replace(problem, groups=replace(problem.groups, gathered="a", source_rows=64))
    params = make_plan(problem, replace(spec, gathered="a"), RasterOrder(), 132).params
    assert params[0] == Pointer(0)
    # Buffers: A, B, the sizes, the indices, then D.
    assert isinstance(params[2], TensorMap) and params[2].buffer == 4
    assert params[3:5] == (Pointer(2), Pointer(3))


def test_gated_grouped_products_have_two_arrays_of_matrices():
    problem, spec = grouped_case("m", graph=PAIR)
    a, gate, up, d = tensor_maps(problem, spec)
    assert [m.buffer for m in (a, gate, up, d)] == [0, 1, 2, 4]
    assert gate.dims == up.dims == (512, 200, 5)


def test_a_grouped_grid_is_all_that_is_resident():
    """Not the smallest with as few waves: how many tiles there are depends on the sizes."""
    for axis in ("m", "k"):
        problem, spec = grouped_case(axis, m=4096, n=1536, k=4096, groups=8, cluster_n=2)
        plan = make_plan(problem, spec, RasterOrder(), 132)
        assert plan.grid == (66, 2, 1)


def test_no_sizes_give_more_tiles_than_the_grid_allows_for():
    random = Random(8)
    for _ in range(200):
        length, number = random.randint(1, 900), random.randint(1, 40)
        problem, spec = grouped_case("m", m=length, groups=number, tile_m=random.choice([64, 128]))
        plan = make_plan(problem, spec, RasterOrder(), 10**6)
        sizes = [random.choice([0, 1, 63, 64, 65, random.randint(0, 300)]) for _ in range(number)]
        raster = GroupRaster(*scalars(plan)[:-1])
        tiles = list(group_tiles(raster, sizes, spec.tile_m, itertools.count()))
        assert len(tiles) <= plan.grid[0]
    one = grouped_case("m", m=1, n=8, groups=1)
    assert make_plan(*one, RasterOrder(), 132).grid == (1, 1, 1)


def test_encoding_of_span_maps_decodes_and_fits_int64():
    problem, spec = grouped_case("m")
    plan = make_plan(problem, spec, RasterOrder(), 132)
    words = plan.encode()
    assert all(-(2**63) <= word < 2**63 for word in words)
    d = decode(words)["params"][2]
    assert d[5:] == (
        (512, SPAN_EXTENT, 321, SPAN_EXTENT + 1), (1024, 1024, WRAP_BYTES - 1024), (32, 64, 1, 1)
    )  # fmt: skip
