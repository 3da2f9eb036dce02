"""Launch plans: grids, scalars, tensor maps and the words that the launcher decodes."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest
from support.plans import LARGE, decode, scalars, tensor_maps

from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph, Result
from jax_hopper_gemm.gemm.grid import (
    ceil_div,
    k_split,
    max_clusters,
    num_cluster_tiles,
    persistent_clusters,
)
from jax_hopper_gemm.gemm.kernel_params import param_list
from jax_hopper_gemm.gemm.legality import violations
from jax_hopper_gemm.gemm.problem import GemmProblem, MatrixLayout
from jax_hopper_gemm.gemm.raster import RasterOrder, make_raster
from jax_hopper_gemm.launch.plan import Int32, LaunchPlan, Pointer, TensorMap, make_plan

pytestmark = pytest.mark.pure

MAJORS = list(product(("k", "m"), ("n", "k")))
CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (2, 4))


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
    assert static.workspaces == ()
    dynamic = make_plan(problem, replace(LARGE, tile_scheduler="dynamic"), RasterOrder(), 132)
    assert dynamic.params[-1] == Pointer(buffer=3)
    assert dynamic.workspaces == (16,) and decode(dynamic.encode())["cleared"] == []


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
        assert partials == blocks * 128 * 128 * 4
        warps = 8 if warp_schedule == "cooperative" else 4
        assert flags == blocks * warps * 8
        assert plan.params[-2:] == (Pointer(buffer=3), Pointer(buffer=4))
        assert scalars(plan)[-len(tape) :] == [*tape]


def test_a_kernel_that_could_split_k_but_does_not_has_small_workspaces():
    problem, spec = GemmProblem.dense(128 * 132, 256, 4096), replace(LARGE, split_k=True)
    assert k_split(problem, spec, 132).ranges == 0
    plan = make_plan(problem, spec, RasterOrder(), 132)
    assert plan.workspaces == (128 * 256 * 4, 64)


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
