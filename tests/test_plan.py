"""Launch plans: grids, tensor maps and the words that the launcher decodes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest

from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph, Node, Operand, Result
from jax_hopper_gemm.gemm.grid import (
    WRAP_BYTES,
    ceil_div,
    group_raster,
    k_split,
    max_clusters,
    num_cluster_tiles,
    num_inputs,
    persistent_clusters,
    result_shapes,
)
from jax_hopper_gemm.gemm.group_search import SPAN_EXTENT, GroupRaster
from jax_hopper_gemm.gemm.groups import GroupedAxis, Groups
from jax_hopper_gemm.gemm.kernel_params import param_list
from jax_hopper_gemm.gemm.legality import violations
from jax_hopper_gemm.gemm.problem import GemmProblem, MatrixLayout
from jax_hopper_gemm.gemm.raster import make_raster
from jax_hopper_gemm.gemm.spec import GemmSpec, RasterOrder
from jax_hopper_gemm.launch.plan import Int32, LaunchPlan, Pointer, TensorMap, make_plan
from jax_hopper_gemm.testing.lanes import group_tiles

pytestmark = pytest.mark.pure

LARGE = GemmSpec("bfloat16", "bfloat16", "bfloat16", "k", "n", 128, 256)
MAJORS = list(product(("k", "m"), ("n", "k")))
CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2))


def tensor_maps(problem: GemmProblem, spec: GemmSpec) -> list[TensorMap]:
    params = make_plan(problem, spec, RasterOrder(), 132).params
    return [param for param in params if isinstance(param, TensorMap)]


def scalars(plan: LaunchPlan) -> list[int]:
    return [param.value for param in plan.params if isinstance(param, Int32)]


def decode(words: tuple[int, ...]) -> dict:
    """Reads the encoding as `LaunchPlan.encode` documents it, for this test alone."""
    stream = iter(words)

    def take(count: int) -> tuple[int, ...]:
        return tuple(next(stream) for _ in range(count))

    plan: dict = {"version": next(stream), "grid": take(3), "cluster": take(3)}
    plan |= {"threads": next(stream), "smem": next(stream)}
    plan["cleared"] = [take(2) for _ in range(next(stream))]
    plan["params"] = []
    for _ in range(next(stream)):
        kind = next(stream)
        if kind == 0:
            buffer, offset, dtype, swizzle, rank = take(5)
            shape = (take(rank), take(rank - 1), take(rank))
            plan["params"].append(("map", buffer, offset, dtype, swizzle, *shape))
        else:
            plan["params"].append(({1: "int32", 2: "pointer"}[kind], next(stream)))
    assert next(stream, None) is None, "words left over"
    return plan


def test_persistent_grid_is_the_smallest_with_the_same_waves():
    for limit in (1, 2, 33, 66, 132):
        for clusters in range(1, 700):
            grid = persistent_clusters(clusters, limit, even=True)
            waves = ceil_div(clusters, limit)
            assert grid <= limit
            assert ceil_div(clusters, grid) == waves
            assert grid == 1 or ceil_div(clusters, grid - 1) > waves
            assert persistent_clusters(clusters, limit, even=False) == min(clusters, limit)


def test_cluster_tiles_of_groups_are_no_more_than_counted():
    random = Random(7)
    for _ in range(300):
        sizes = [random.choice([0, 1, random.randint(0, 300)]) for _ in range(random.randint(1, 9))]
        spec = replace(LARGE, grouped="m", tile_m=random.choice([64, 128]))
        problem = GemmProblem.grouped("m", max(1, sum(sizes)), 300, 64, len(sizes))
        tiles = sum(ceil_div(size, spec.tile_m) for size in sizes) * 2
        assert tiles <= num_cluster_tiles(problem, spec)
    one_each = GemmProblem.grouped("m", 9, 300, 64, 9)
    assert num_cluster_tiles(one_each, replace(LARGE, grouped="m")) == 9 * 2


def test_grid_of_8192_cubed_leaves_four_sms_idle_unless_tiles_are_dynamic():
    problem = GemmProblem.dense(8192, 8192, 8192)
    assert make_plan(problem, LARGE, RasterOrder(), 132).grid == (128, 1, 1)
    dynamic = replace(LARGE, tile_scheduler="dynamic")
    assert make_plan(problem, dynamic, RasterOrder(), 132).grid == (132, 1, 1)


def test_single_scheduler_launches_one_cluster_for_each_of_its_tiles():
    spec = replace(LARGE, tile_scheduler="single", cluster_m=2)
    plan = make_plan(GemmProblem.dense(1000, 1000, 64, 3), spec, RasterOrder(), 132)
    assert plan.grid == (2 * (4 * 4 * 3), 1, 1)
    assert plan.cluster == (2, 1, 1)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_grid_is_whole_clusters_that_fit_the_device(cluster):
    spec = replace(LARGE, cluster_m=cluster[0], cluster_n=cluster[1])
    plan = make_plan(GemmProblem.dense(8192, 8192, 512), spec, RasterOrder(), 132)
    assert plan.cluster == (*cluster, 1)
    assert plan.grid[0] % cluster[0] == 0 and plan.grid[1] == cluster[1]
    assert plan.grid[0] * plan.grid[1] <= 132
    assert max_clusters(spec, 132) * spec.cluster_size <= 132


def test_scalars_follow_the_kernels_order():
    problem = GemmProblem.dense(1000, 5000, 136, 3)
    spec = replace(LARGE, cluster_n=2)
    plan = make_plan(problem, spec, RasterOrder("n", 4), 132)
    for along in ("n", "m"):
        plan = make_plan(problem, spec, RasterOrder(along, 4), 132)
        raster = make_raster(8, 10, 3, along_m=along == "m", swizzle=4)
        assert scalars(plan) == [*raster, 3]


def test_only_the_dynamic_scheduler_has_a_counter():
    problem = GemmProblem.dense(1024, 1024, 1024)
    static = make_plan(problem, LARGE, RasterOrder(), 132)
    assert static.workspaces == () and decode(static.encode())["cleared"] == []
    dynamic = make_plan(problem, replace(LARGE, tile_scheduler="dynamic"), RasterOrder(), 132)
    assert dynamic.params[-1] == Pointer(buffer=3)
    assert decode(dynamic.encode())["cleared"] == [(3, 4)]


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("warp_schedule", ["cooperative", "pingpong"])
def test_workspaces_hold_a_slot_for_each_range_and_a_flag_for_each_warp(cluster, warp_schedule):
    spec = replace(
        LARGE, tile_n=128, cluster_m=cluster[0], cluster_n=cluster[1], split_k=True,
        warp_schedule=warp_schedule,
    )  # fmt: skip
    for problem in (GemmProblem.dense(300, 200, 8192), GemmProblem.dense(3000, 5000, 4104)):
        plan = make_plan(problem, spec, RasterOrder(), 132)
        tape = k_split(problem, spec, 132)
        assert plan.grid[0] * plan.grid[1] == spec.cluster_size * min(
            tape.items, max_clusters(spec, 132)
        )
        partials, flags = plan.workspaces
        blocks = max(1, tape.ranges) * spec.cluster_size
        assert (partials.nbytes, partials.cleared) == (blocks * 128 * 128 * 4, False)
        warps = 8 if warp_schedule == "cooperative" else 4
        assert (flags.nbytes, flags.cleared) == (blocks * warps * 8, False)
        assert plan.params[-2:] == (Pointer(buffer=3), Pointer(buffer=4))
        assert decode(plan.encode())["cleared"] == []
        assert scalars(plan)[-len(tape) :] == [*tape]


def test_a_kernel_that_could_split_k_but_does_not_has_small_workspaces():
    problem, spec = GemmProblem.dense(128 * 132, 256, 4096), replace(LARGE, split_k=True)
    assert k_split(problem, spec, 132).ranges == 0
    plan = make_plan(problem, spec, RasterOrder(), 132)
    assert [workspace.nbytes for workspace in plan.workspaces] == [128 * 256 * 4, 64]


@pytest.mark.parametrize(("a_major", "b_major"), MAJORS)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_tensor_maps_address_each_element_where_the_layout_puts_it(a_major, b_major, cluster):
    m, n, k, batches = 136, 264, 72, 3
    problem = GemmProblem(
        m, n, k, batches, "bfloat16", "bfloat16", "float32",
        a=MatrixLayout(a_major, 144, 144 * 200),
        b=MatrixLayout(b_major, 272, 0),
        d=MatrixLayout("n", 268, 268 * m),
    )  # fmt: skip
    spec = replace(
        LARGE, d_dtype="float32", a_major=a_major, b_major=b_major, tile_n=128,
        cluster_m=cluster[0], cluster_n=cluster[1],
    )  # fmt: skip
    random = Random(0)
    extents = {"m": m, "n": n, "k": k}
    for tensor_map, names, layout, itemsize in zip(
        tensor_maps(problem, spec), ("mk", "nk", "mn"), (problem.a, problem.b, problem.d),
        (2, 2, 4), strict=True,
    ):  # fmt: skip
        other = names.replace(layout.major, "")
        assert tensor_map.dims == (extents[layout.major], extents[other], batches)
        for _ in range(20):
            index = tuple(random.randrange(extent) for extent in tensor_map.dims)
            steps = (itemsize, *tensor_map.strides)
            elements = (1, layout.leading_stride, layout.batch_stride)
            expected = itemsize * sum(i * s for i, s in zip(index, elements, strict=True))
            assert sum(i * s for i, s in zip(index, steps, strict=True)) == expected


def test_maps_of_a_nested_batch_count_each_of_its_axes():
    b, t, h, g, d, s = 2, 40, 3, 5, 64, 48  # "bthgd,bshd->bhgts"
    problem = GemmProblem(
        t, s, d, b * h * g, "bfloat16", "bfloat16", "bfloat16",
        a=MatrixLayout("k", h * g * d, d, (t * h * g * d, g * d)),
        b=MatrixLayout("k", h * d, 0, (s * h * d, d)),
        d=MatrixLayout("n", s, t * s, (h * g * t * s, g * t * s)),
        outer=(b, h),
    )  # fmt: skip
    spec = replace(LARGE, b_major="k", nested=True)
    plan = make_plan(problem, spec, RasterOrder(), 132)
    maps = tensor_maps(problem, spec)
    arrays = [np.arange(math.prod(x)).reshape(x) for x in ((b, t, h, g, d), (b, s, h, d))]
    arrays.append(np.arange(b * h * g * t * s).reshape(b, h, g, t, s))
    of_heads, of_values, of_scores = maps
    for _ in range(50):
        at = {x: Random(_).randrange(e) for x, e in zip("bthgds", (b, t, h, g, d, s), strict=True)}
        matrix = [at["g"], at["h"], at["b"]]

        def address(tensor_map, *index):
            steps = (2, *tensor_map.strides)
            assert all(i < e for i, e in zip(index, tensor_map.dims, strict=True))
            return sum(i * step for i, step in zip(index, steps, strict=True))

        places = [(at[x] for x in letters) for letters in ("bthgd", "bshd", "bhgts")]
        first, second, third = (x[tuple(p)] for x, p in zip(arrays, places, strict=True))
        assert address(of_heads, at["d"], at["t"], *matrix) == 2 * first
        assert address(of_values, at["d"], at["s"], *matrix) == 2 * second
        assert address(of_scores, at["s"], at["t"], *matrix) == 2 * third
    names = [param.name for param in param_list(spec)]
    nest = {n: p for n, p in zip(names, plan.params, strict=True) if n.startswith("nest")}
    assert nest == {"nest_inner": Int32(g), "nest_middle": Int32(h)}
    assert all(len(x.dims) == 5 for x in maps)


@pytest.mark.parametrize(("a_major", "b_major"), MAJORS)
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("tile", [(64, 32, 128), (128, 192, 64), (128, 128, 128), (256, 96, 64)])
def test_boxes_tile_the_share_that_each_cta_loads(a_major, b_major, cluster, tile):
    spec = replace(
        LARGE, a_major=a_major, b_major=b_major, tile_m=tile[0], tile_n=tile[1], tile_k=tile[2],
        cluster_m=cluster[0], cluster_n=cluster[1], num_stages=2, epi_stages=2,
    )  # fmt: skip
    assert violations(spec) == []
    problem = GemmProblem.dense(512, 512, 512, a_major=a_major, b_major=b_major)
    a, b, d = tensor_maps(problem, spec)
    tiles = dict(zip("mnk", tile, strict=True))
    for tensor_map, names, major, shares in (
        (a, "mk", a_major, cluster[1]),
        (b, "nk", b_major, cluster[0]),
    ):
        wide, long = tiles[major], tiles[names.replace(major, "")]
        assert wide % tensor_map.box[0] == 0
        assert tensor_map.box[1:] == (long // shares, 1)
        assert tensor_map.box[0] * 2 == tensor_map.swizzle <= 128
        assert max(tensor_map.box) <= 256
    assert d.box == (32, 64, 1) and d.swizzle == 64


@pytest.mark.parametrize(("a_major", "b_major"), MAJORS)
@pytest.mark.parametrize(("m", "n"), [(1, 512), (17, 512), (512, 8), (24, 40), (512, 512)])
def test_short_boxes_end_with_matrices_whose_rows_lie_along_k(a_major, b_major, m, n):
    spec = replace(LARGE, tile_m=64, tile_n=128, a_major=a_major, b_major=b_major, short_boxes=True)
    problem = GemmProblem.dense(m, n, 512, a_major=a_major, b_major=b_major)
    a, b, _ = tensor_maps(problem, spec)
    whole_a, whole_b, _ = tensor_maps(problem, replace(spec, short_boxes=False))
    rows_a = min(m, 64) if a_major == "k" else 64
    rows_b = min(n, 128) if b_major == "k" else 128
    assert a == (replace(whole_a, box=(64, rows_a, 1)) if a_major == "k" else whole_a)
    assert b == (replace(whole_b, box=(64, rows_b, 1)) if b_major == "k" else whole_b)
    plan = make_plan(problem, spec, RasterOrder(), 132)
    # A stage is full when this many bytes have come: all boxes of a k-tile.
    boxes_of_a = math.prod(a.box) * (1 if a_major == "k" else 64 // a.box[0])
    boxes_of_b = math.prod(b.box) * (1 if b_major == "k" else 128 // b.box[0])
    assert scalars(plan)[-1] == 2 * (boxes_of_a + boxes_of_b)


def test_gated_stages_count_both_right_operands():
    graph = EpilogueGraph(accumulators=2, results=(Result("matrix", 0, "bfloat16"),))
    spec = replace(LARGE, tile_m=64, tile_n=128, b_major="k", epilogue=graph, short_boxes=True)
    problem = replace(GemmProblem.dense(3, 24, 512, b_major="k"), epilogue=graph)
    assert [x.box[1] for x in tensor_maps(problem, spec)[:3]] == [3, 24, 24]
    assert scalars(make_plan(problem, spec, RasterOrder(), 132))[-1] == (3 + 24 + 24) * 64 * 2


def test_a_float32_result_takes_half_as_wide_boxes():
    spec = replace(LARGE, d_dtype="float32", epi_tile_n=64, num_stages=3, epi_stages=2)
    assert violations(spec) == []
    d = tensor_maps(GemmProblem.dense(512, 512, 512, d_dtype="float32"), spec)[2]
    assert d.box == (32, 64, 1) and d.swizzle == 128


def test_strides_of_extents_of_one_are_legal_whatever_the_layout():
    problem = GemmProblem.dense(1, 8, 13, 1)
    a = tensor_maps(problem, LARGE)[0]
    assert a.dims == (13, 1, 1) and a.strides == (16, 16)


def test_encoding_decodes_to_the_plan():
    problem = GemmProblem.dense(1000, 5000, 136, 3, a_major="m", dtype="float16")
    spec = replace(
        LARGE, a_dtype="float16", b_dtype="float16", d_dtype="float16", a_major="m",
        tile_scheduler="dynamic",
    )  # fmt: skip
    plan = make_plan(problem, spec, RasterOrder("n", 16), 132)
    decoded = decode(plan.encode())
    assert decoded["version"] == 2
    assert decoded["grid"] == plan.grid and decoded["cluster"] == plan.cluster
    assert decoded["threads"] == 384 and decoded["smem"] == spec.smem_bytes
    float16, swizzle_64, swizzle_128 = 6, 2, 3
    assert decoded["params"] == [
        ("map", 0, 0, float16, swizzle_128, (1000, 136, 3), (2000, 272000), (64, 64, 1)),
        ("map", 1, 0, float16, swizzle_128, (5000, 136, 3), (10000, 1360000), (64, 64, 1)),
        ("map", 2, 0, float16, swizzle_64, (5000, 1000, 3), (10000, 10000000), (32, 64, 1)),
        *(("int32", value) for value in make_raster(8, 20, 3, along_m=False, swizzle=16)),
        ("int32", 3),
        ("pointer", 3),
    ]


def test_encoding_is_golden():
    plan = make_plan(GemmProblem.dense(256, 512, 128), LARGE, RasterOrder("m", 8), 132)
    assert plan.encode() == (
        2,  4, 1, 1,  1, 1, 1,  384, 229888,  0,  20,
        0, 0, 0, 9, 3, 3,  128, 256, 1,  256, 16,  64, 128, 1,
        0, 1, 0, 9, 3, 3,  512, 128, 1,  1024, 16,  64, 64, 1,
        0, 2, 0, 9, 2, 3,  512, 256, 1,  1024, 16,  32, 64, 1,
        1, 4,  1, 2,  1, 1,
        1, 4,  1, 2**30,  1, 32,
        1, 4,  1, 2**30,  1, 32,  1, 1,
        1, 2,  1, 2**30,  1, 31,
        1, 1,  1, 2**30,  1, 30,
        1, 2,
    )  # fmt: skip


def test_words_fit_int64():
    side = 2**31 - 8
    maps = (
        TensorMap(0, "bfloat16", (side, side, side), (2**40 - 16, 2**40 - 16), (64, 256, 1), 128),
    )
    plan = LaunchPlan((1, 1, 1), (1, 1, 1), 384, 1024, maps)
    assert all(-(2**63) <= word < 2**63 for word in plan.encode())


# Epilogues

PAIR = EpilogueGraph(2, nodes=(Node("mul", (0, 1)),), results=(Result("matrix", 2, "bfloat16"),))
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


def epilogue_case(graph, *layouts, up_offset=None, m=328, n=512, k=64, batches=3, **changes):
    """Returns a problem of compact A, B and D with an epilogue, and a kernel for it."""
    problem = replace(
        GemmProblem.dense(m, n, k, batches), epilogue=graph, operands=layouts, up_offset=up_offset
    )
    changes = {"tile_n": 128, "epi_stages": 2, "num_stages": 3} | changes
    spec = replace(LARGE, epilogue=graph, epi_load_stages=2 if graph.loaded else 0, **changes)
    assert violations(spec) == []
    return problem, spec


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
    assert plan.first_workspace == 9 and plan.params[-1] == Pointer(9)
    assert decode(plan.encode())["cleared"] == [(9, 4)]


# Groups


def grouped_case(axis, m=320, n=512, k=200, groups=5, graph=None, operands=(), **changes):
    """Returns a problem whose axis `axis` is cut into groups, and a kernel for it."""
    problem = GemmProblem.grouped(axis, m, n, k, groups, d_dtype="bfloat16")
    problem = replace(problem, epilogue=graph, operands=operands)
    changes = {"tile_n": 128, "epi_stages": 2, "num_stages": 3} | changes
    spec = replace(
        LARGE, a_major=problem.a.major, epilogue=graph, grouped=axis,
        epi_load_stages=2 if graph and graph.loaded else 0, **changes,
    )  # fmt: skip
    assert violations(spec) == []
    return problem, spec


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
    assert plan.first_workspace == 4


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
