"""When dispatch schedules tiles dynamically, beside transfers, and when it splits K."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import pytest
from support.buildable import epilogue_specs
from support.dense_problems import BASE, random_problem

from jax_hopper_gemm.dispatch import (
    H200,
    candidates,
    choice,
    choose,
    legal_specs,
    table_specs,
)
from jax_hopper_gemm.dispatch.candidates import filled_spec
from jax_hopper_gemm.dispatch.configs import DENSE_CONFIGS
from jax_hopper_gemm.dispatch.cost import estimate
from jax_hopper_gemm.dispatch.legality import split_violations
from jax_hopper_gemm.dispatch.model import best_kernel
from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph, Node, Result
from jax_hopper_gemm.gemm.k_split import is_worth_splitting
from jax_hopper_gemm.gemm.legality import violations
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.problem_type import ProblemType

pytestmark = [pytest.mark.pure, pytest.mark.usefixtures("no_tables")]

# Beside transfers.

SEVERAL = replace(H200, comm_overlap=True)


def test_large_tiles_are_dynamic_where_transfers_may_hold_sms():
    random, buildable = Random(21), set(table_specs(SEVERAL))
    dynamic = 0
    for _ in range(1500):
        problem = random_problem(random)
        alone, beside = (choose(problem, x, kernel_only=True) for x in (H200, SEVERAL))
        if beside == alone:
            spec = alone.spec
            if spec and not spec.split_k and spec.tile_scheduler == "static":
                assert spec.tile_m * spec.tile_n < candidates.LARGE_TILE
            continue
        assert alone.spec and beside.spec
        assert beside.spec in buildable or beside.spec.loose_d
        if same := candidates.dynamic_spec(alone.spec):  # tiles of 256x208 have no registers
            assert beside.spec == same == replace(alone.spec, tile_scheduler="dynamic")
            assert beside.raster_order == alone.raster_order
        assert (
            beside.spec.dynamic
            and alone.spec.tile_scheduler == "static"
            and violations(beside.spec) == []
        )
        assert "transfers" in beside.reason
        dynamic += 1
    assert dynamic > 100


def test_another_kernel_is_dynamic_where_the_best_has_no_registers_for_it():
    negated = EpilogueGraph(1, (), (Node("neg", (0,)),), (Result("matrix", 1, "bfloat16"),))
    problem = replace(GemmProblem.dense(6144, 10240, 8192), epilogue=negated)
    alone, beside = choose(problem, H200), choose(problem, SEVERAL)
    assert alone.spec and candidates.dynamic_spec(alone.spec) is None
    plain = replace(alone.spec, epilogue=None)
    assert candidates.dynamic_spec(plain) == replace(plain, tile_scheduler="dynamic")
    assert beside.spec and beside.raster_order and beside.spec.tile_scheduler == "dynamic"
    assert beside.spec in epilogue_specs(SEVERAL, [negated], ["bfloat16"])
    costs = [
        estimate(problem, found.spec, found.raster_order, H200).ns
        for found in (alone, beside)
        if found.spec and found.raster_order
    ]
    assert costs[1] <= choice.MAX_DYNAMIC_COST * costs[0]


# Where K is split.


def test_few_tiles_of_long_k_are_shared_and_the_reason_says_by_how_many():
    problem = GemmProblem.dense(1024, 1024, 65536, a_major="m")
    decision = choose(problem, H200, kernel_only=True)
    assert decision.spec and decision.spec.split_k and decision.source == "model"
    assert "32 tiles of 128x256 whose K 128 thread blocks share" in decision.reason


def test_a_last_wave_that_is_less_than_half_full_is_shared():
    problem = GemmProblem.dense(1152, 4352, 4864)
    decision = choose(problem, H200, kernel_only=True)
    assert decision.spec and decision.spec.split_k
    assert re.search(r"whose K 132 thread blocks share, but of \d+ tiles", decision.reason)


LOST = pytest.mark.xfail(strict=True, reason="clusters of 2x1 are expected to be 3 % faster")


@pytest.mark.parametrize(
    ("m", "n", "k", "a_major", "tile", "cluster", "splits"),
    [
        (512, 512, 16384, "k", (128, 64), (1, 2), True),
        (1024, 1024, 65536, "m", (128, 256), (2, 1), True),
        pytest.param(256, 1536, 7168, "k", (128, 64), (1, 1), True, marks=LOST),
        (256, 256, 32768, "m", (64, 64), (1, 1), True),
        (2048, 128, 8192, "m", (128, 64), (1, 2), True),
        (1000, 1000, 4096, "k", (128, 128), (2, 1), True),
        (2560, 5120, 5120, "k", (128, 256), (2, 1), True),
        (128, 4096, 16384, "k", (64, 64), (2, 1), False),
        (128, 7168, 18432, "k", (64, 128), (2, 1), False),
        (4096, 128, 8192, "k", (64, 64), (1, 2), False),
        (1024, 1536, 4096, "k", (128, 128), (2, 1), False),
    ],
)
def test_k_is_split_where_that_was_the_fastest(m, n, k, a_major, tile, cluster, splits):
    """Each expected kernel was the fastest of those that `benchmarks/split_k.py` timed, or 0.2 %
    slower.
    """
    problem = GemmProblem.dense(m, n, k, a_major=a_major)
    kinds = (filled_spec(config, ProblemType.of(problem)) for config in DENSE_CONFIGS)
    best, _ = best_kernel(problem, H200, [spec for spec in kinds if spec])
    assert best and best.spec.split_k == splits
    spec = best.spec
    assert (spec.tile_m, spec.tile_n) == tile
    assert (spec.cluster_m, spec.cluster_n, spec.warp_schedule) == (*cluster, "cooperative")


@pytest.mark.parametrize("clusters", [66, 132])
def test_k_is_split_only_where_most_clusters_would_wait(clusters):
    worth = [tiles for tiles in range(1, 4 * clusters) if is_worth_splitting(tiles, clusters)]
    assert worth == [t for t in range(1, 4 * clusters) if 1 <= t % clusters <= clusters // 2]
    spec = replace(BASE, tile_n=256, split_k=True, cluster_m=132 // clusters)
    for tiles in (clusters // 2, clusters // 2 + 1, clusters, clusters + 1):
        problem = GemmProblem.dense(128 * spec.cluster_m * tiles, 256, 8192)
        assert (split_violations(problem, spec, H200) == []) == (tiles in worth)


def test_the_tuner_may_split_what_the_model_does_not():
    three_quarters = GemmProblem.dense(128 * 99, 256, 4096)
    specs = {spec for spec, _ in legal_specs(three_quarters, H200)}
    assert any(spec.split_k and split_violations(three_quarters, spec, H200) for spec in specs)
    whole_waves = GemmProblem.dense(128 * 132, 256, 4096)
    specs = {spec for spec, _ in legal_specs(whole_waves, H200)}
    split = {spec for spec in specs if spec.split_k and (spec.tile_m, spec.tile_n) == (128, 256)}
    assert {spec.cluster_size for spec in split} == {4, 8}, "which do not fill 132 SMs"
