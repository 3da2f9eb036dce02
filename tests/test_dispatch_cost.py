"""What the model of cost expects of kernels, and the order of their tiles."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from support.dense_problems import BASE, random_problem

from jax_hopper_gemm.dispatch import (
    H200,
    choose,
    problem_violations,
    table_specs,
)
from jax_hopper_gemm.dispatch.candidates import filled_spec, model_specs
from jax_hopper_gemm.dispatch.configs import DENSE_CONFIGS, RASTER_ORDERS, Config
from jax_hopper_gemm.dispatch.cost import estimate, roofline_ns
from jax_hopper_gemm.dispatch.memory_traffic import (
    SPLIT_SECTOR_BYTES,
    best_raster_order,
    memory_bytes,
)
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.problem_type import ProblemType
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec

SQUARE = GemmProblem.dense(4096, 4096, 4096)
pytestmark = [pytest.mark.pure, pytest.mark.usefixtures("no_tables")]


def test_no_estimate_is_under_the_roofline():
    random = Random(3)
    for _ in range(200):
        problem = random_problem(random)
        if problem_violations(problem):
            continue
        for spec in model_specs(ProblemType.of(problem)):
            cost = estimate(problem, spec, RasterOrder(), H200)
            assert cost.ns >= roofline_ns(problem)
            assert 0 < cost.occupancy <= 1


def test_memory_moves_at_least_each_matrix_once():
    random = Random(4)
    for _ in range(300):
        problem = random_problem(random)
        spec = random.choice(DENSE_CONFIGS)
        spec = filled_spec(spec, ProblemType.of(problem))
        assert spec is not None
        for raster_order in RASTER_ORDERS:
            assert memory_bytes(problem, spec, [raster_order], H200) >= problem.bytes


def test_best_raster_order_moves_the_fewest_bytes():
    problem = GemmProblem.dense(512, 65536, 8192)
    spec = filled_spec(DENSE_CONFIGS[0], ProblemType.of(problem))
    assert spec is not None
    best = memory_bytes(problem, spec, [best_raster_order(problem, spec, H200)], H200)
    others = [memory_bytes(problem, spec, [raster_order], H200) for raster_order in RASTER_ORDERS]
    assert best == min(others) < max(others)


def compare(problem: GemmProblem, better: GemmSpec, worse: GemmSpec) -> None:
    fast, slow = (estimate(problem, s, RasterOrder(), H200).ns for s in (better, worse))
    assert fast < slow


SHORT = GemmProblem.dense(8192, 8192, 256)


def test_pingpong_hides_the_epilogue_of_short_products():
    compare(SHORT, replace(BASE, warp_schedule="pingpong"), BASE)


def test_persistent_kernels_hide_a_part_of_their_epilogues():
    compare(SHORT, BASE, replace(BASE, tile_scheduler="single"))
    one_wave = GemmProblem.dense(1024, 1024, 256)
    times = [
        estimate(one_wave, replace(BASE, tile_scheduler=scheduler), RasterOrder(), H200).ns
        for scheduler in ("static", "single")
    ]
    assert times[0] == times[1]


def test_more_buffers_shorten_an_epilogue():
    compare(SHORT, replace(BASE, epi_stages=4), BASE)


@pytest.mark.parametrize("operand", ["a", "b"])
def test_rows_that_are_no_multiple_of_a_line_slow_loads_unless_shared(operand):
    layout = getattr(SQUARE, operand)
    unaligned = replace(SQUARE, **{operand: replace(layout, leading_stride=4096 + 8)})
    spec = replace(BASE, warp_schedule="pingpong")
    aligned_ns, unaligned_ns = (
        estimate(problem, spec, RasterOrder(), H200).ns for problem in (SQUARE, unaligned)
    )
    assert unaligned_ns > 1.2 * aligned_ns
    compare(unaligned, replace(spec, cluster_m=2, cluster_n=2), spec)


def test_narrow_rows_of_a_box_ask_for_more_lines():
    k_major = replace(BASE, tile_m=256, tile_n=160, num_stages=4, b_major="k")
    n_major = replace(k_major, b_major="n")
    assert (k_major.b_box.swizzle, n_major.b_box.swizzle) == (128, 64)
    times = [
        estimate(GemmProblem.dense(4096, 4096, 4096, b_major=s.b_major), s, RasterOrder(), H200).ns
        for s in (k_major, n_major)
    ]
    assert times[0] < times[1]


def test_sharing_the_larger_operand_is_preferred():
    wide, tall = GemmProblem.dense(128, 4096, 4096), GemmProblem.dense(4096, 128, 4096)
    share_b = replace(BASE, tile_m=64, tile_n=64, cluster_m=2, num_stages=12)
    share_a = replace(share_b, cluster_m=1, cluster_n=2)
    compare(wide, share_b, share_a)
    compare(tall, share_a, share_b)


def test_tiles_that_lie_outside_the_result_cost_loads():
    problem = GemmProblem.dense(64, 8192, 8192)
    fitting = replace(BASE, tile_m=64, tile_n=64)
    compare(problem, fitting, replace(fitting, tile_m=128))
    compare(problem, fitting, replace(fitting, cluster_m=2))


def test_clusters_of_four_that_cannot_all_be_resident_cost_a_second_round():
    spec = replace(BASE, cluster_m=2, cluster_n=2)
    fits, spills = (GemmProblem.dense(256 * c, 256, 4096) for c in (30, 32))
    times = [estimate(problem, spec, RasterOrder(), H200).ns for problem in (fits, spills)]
    assert times[1] > 1.8 * times[0]


@pytest.mark.parametrize(
    ("changes", "along"),
    [
        (dict(cluster_m=2), "n"),
        (dict(cluster_n=2), "m"),
        (dict(tile_m=256, cluster_n=2), "m"),
        (dict(tile_n=256, cluster_m=2), "n"),
        (dict(tile_m=64, cluster_n=2, tile_scheduler="single"), "n"),
        (dict(tile_n=64, cluster_m=2, tile_scheduler="single"), "m"),
    ],
)
def test_neighbours_in_time_lie_along_the_edge_that_measurements_preferred(changes, along):
    assert best_raster_order(SQUARE, replace(BASE, **changes), H200).along == along


def test_tiles_follow_lines_of_d_where_storing_it_takes_longest():
    short = GemmProblem.dense(20000, 3424, 128, b_major="k")
    for problem in (short, replace(short, l=3)):
        for spec in (BASE, replace(BASE, cluster_n=2), replace(BASE, d_major="m")):
            order = best_raster_order(problem, spec, H200)
            assert (order.along, order.swizzle) == (spec.d_major, 1)
    for other in (GemmProblem.dense(20000, 3424, 1024), GemmProblem.dense(2000, 3424, 128)):
        assert best_raster_order(other, replace(BASE, cluster_n=2), H200).along == "m"


@pytest.mark.parametrize(("n", "columns"), [(25000, 64), (24992, 32)])
def test_boxes_are_wide_where_lines_of_d_begin_within_a_sector(n, columns):
    problem = GemmProblem.dense(8192, n, 256)
    assert problem.splits_sectors == problem.transposed.splits_sectors == (columns == 64)
    spec = choose(problem, H200, kernel_only=True).spec
    assert spec and spec.epi_tile_n == columns
    assert spec in table_specs(H200)
    narrow, wide = (
        filled_spec(Config(128, 256, epi_tile_n=x), ProblemType.of(problem)) for x in (32, 64)
    )
    assert narrow and wide
    moved = [memory_bytes(problem, s, [RasterOrder()], H200) for s in (narrow, wide)]
    assert moved[0] - moved[1] == pytest.approx(
        8192 * n / 64 * SPLIT_SECTOR_BYTES if columns == 64 else 0
    )


@pytest.mark.parametrize(
    ("d_dtype", "n", "splits"),
    [("bfloat16", 1000, True), ("bfloat16", 1008, False), ("float32", 1004, True),
     ("float32", 1008, False), ("bfloat16", 1001, False)],
)  # fmt: skip
def test_lines_of_d_split_sectors_at_odd_multiples_of_16_bytes(d_dtype, n, splits):
    """Those that are no multiples of 16 bytes TMA does not store."""
    assert GemmProblem.dense(256, n, 64, d_dtype=d_dtype).splits_sectors == splits
