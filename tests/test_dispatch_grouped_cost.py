"""How dispatch reckons the cost of grouped products."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from support.graphs import EIGHT_BIT
from support.grouped_problems import CONTRACTION, DECODE, ROWS, random_problem

from jax_hopper_gemm.dispatch import (
    H200,
    choose,
)
from jax_hopper_gemm.dispatch.candidates import model_specs
from jax_hopper_gemm.dispatch.cost import estimate, roofline_ns, tile_cycles
from jax_hopper_gemm.dispatch.expected_tiles import (
    equal_groups,
    expected_largest,
    expected_pieces,
)
from jax_hopper_gemm.dispatch.memory_traffic import best_raster_order, memory_bytes
from jax_hopper_gemm.gemm.problem import GemmProblem, MatrixLayout
from jax_hopper_gemm.gemm.problem_type import ProblemType
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec

pytestmark = [pytest.mark.pure, pytest.mark.usefixtures("no_tables")]


@pytest.mark.parametrize("mean", [3.0, 64.0, 150.0, 512.0, 5000.0])
@pytest.mark.parametrize("piece", [64, 128, 256])
def test_expected_pieces_are_those_of_gamma_distributed_sizes(mean, piece):
    sizes = np.random.default_rng(0).gamma(2.0, mean / 2, 400_000)
    counted = np.ceil(sizes / piece).mean()
    assert expected_pieces(mean, piece) == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("groups", [1, 8, 128])
def test_the_expected_largest_group_is_that_of_gamma_distributed_sizes(groups):
    sizes = np.random.default_rng(0).gamma(2.0, 1 / 2, (40_000, groups))
    assert expected_largest(groups) == pytest.approx(sizes.max(axis=1).mean(), rel=0.01)


def test_estimates_of_grouped_products_are_over_the_roofline():
    random = Random(31)
    for _ in range(150):
        problem = random_problem(random)
        if problem.groups is None or problem.groups.total > problem.m:
            continue  # of weights that no row needs the roofline counts the bytes
        for spec in model_specs(ProblemType.of(problem)):
            cost = estimate(problem, spec, best_raster_order(problem, spec, H200), H200)
            assert cost.ns >= roofline_ns(problem) and 0 < cost.occupancy <= 1
            assert cost.tiles > 0
            assert tile_cycles(problem, spec, H200).k_tiles > 0


def test_equal_groups_are_a_batch():
    rows, contraction = equal_groups(ROWS), equal_groups(CONTRACTION)
    assert (rows.m, rows.l, rows.groups) == (512, 128, None)
    assert (contraction.k, contraction.l, contraction.groups) == (512, 128, None)
    assert rows.flops == ROWS.flops and contraction.flops == CONTRACTION.flops
    assert rows.bytes == ROWS.bytes and contraction.bytes == CONTRACTION.bytes
    dense = GemmProblem.dense(64, 64, 64)
    assert equal_groups(dense) is dense


def test_weights_are_read_once_for_each_group_that_has_rows():
    spec = model_specs(ProblemType.of(DECODE))[0]
    moved = memory_bytes(DECODE, spec, [RasterOrder()], H200)
    weights = 64 * 2048 * 1536 * 2
    assert weights < moved < 1.02 * weights
    half = GemmProblem.grouped("m", 32, 1536, 2048, 64)
    assert memory_bytes(half, spec, [RasterOrder()], H200) < 0.51 * moved


def cost(problem: GemmProblem, **changes) -> float:
    types = ProblemType.of(problem)
    base = GemmSpec(
        types.a_dtype, types.b_dtype, types.d_dtype, types.a_major, types.b_major, 128, 128,
        num_stages=5, grouped=types.grouped,
    )  # fmt: skip
    return estimate(problem, replace(base, **changes), RasterOrder(), H200).ns


def test_the_better_kernel_for_the_size_of_groups_is_expected_to_be_faster():
    large = GemmProblem.grouped("m", 65536, 4096, 4096, 4)
    assert cost(large, tile_n=256, num_stages=4, cluster_n=2) < cost(large, tile_m=64)
    # 40 rows a group: blocks of 64 rows that hold none are loaded in vain.
    small = GemmProblem.grouped("m", 40 * 256, 1024, 4096, 256)
    assert cost(small, tile_m=64) < cost(small, tile_m=256)
    # A store hides behind the other warpgroup's few k-tiles.
    assert cost(CONTRACTION, warp_schedule="pingpong") < cost(CONTRACTION)


@pytest.mark.parametrize(
    ("m", "n", "k", "groups", "columns"),
    [(2048, 1536, 81792, 128, 192), (7168, 4096, 36736, 32, 256)],
)
def test_gradients_of_weights_take_the_tile_that_was_fastest(m, n, k, groups, columns):
    """With scales of tensors, of 8 bits; where N is a multiple of 192, and not."""
    plain = GemmProblem.grouped("k", m, n, k, groups, b_major="k")
    problem = replace(
        plain, a_dtype="float8_e4m3fn", b_dtype="float8_e5m2", a=MatrixLayout("k", k),
        b=MatrixLayout("k", k), promoted=True, epilogue=EIGHT_BIT["scaled"],
        operands=(MatrixLayout("n", 1),) * 2,
    )  # fmt: skip
    spec = choose(problem, H200, kernel_only=True).spec
    assert spec and (spec.tile_m, spec.tile_n, spec.epi_tile_n) == (128, columns, 64)


def test_a_pair_along_grouped_rows_pads_no_group_to_two_tiles():
    small = GemmProblem.grouped("m", 40 * 256, 1024, 4096, 256)
    alone = GemmSpec("bfloat16", "bfloat16", "bfloat16", "k", "n", 128, 128, grouped="m")
    pair = replace(alone, cluster_m=2)
    tiles = [estimate(small, spec, RasterOrder(), H200).tiles for spec in (alone, pair)]
    assert tiles[0] == tiles[1] > 0


def test_tiles_are_no_taller_than_most_groups():
    for rows, tall in ((4, False), (32, False), (512, True)):
        spec = choose(GemmProblem.grouped("m", rows * 16, 1024, 1024, 16), H200).spec
        assert spec is not None and (spec.tile_m > 64) == tall


def test_decoding_is_bound_by_its_weights():
    decision = choose(DECODE, H200)
    assert "bound by device memory" in decision.reason
    assert decision.spec is not None and decision.spec.tile_m == 64
