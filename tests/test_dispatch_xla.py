"""Which products are left to XLA: the fit of its time, and the rules where that says nothing."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from itertools import chain
from pathlib import Path

import fit_xla
import layouts
import pytest

from jax_hopper_gemm.dispatch import H200, choose
from jax_hopper_gemm.dispatch.config_sets import has_short_k, is_narrow
from jax_hopper_gemm.dispatch.device import MEMORY_BYTES_PER_NS
from jax_hopper_gemm.dispatch.model import (
    LOOSE_ALONG_K,
    LOOSE_LATENCY_NS,
    LOOSE_LEAD,
    LOOSE_LINES,
    LOOSE_STORES,
    best_kernel,
    xla_is_faster,
    xla_lead,
    xla_time,
)
from jax_hopper_gemm.dispatch.xla import RATIOS, Trees, features, fit_for, read_fit
from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph, Node, Result
from jax_hopper_gemm.gemm.problem import GemmProblem, Major, MatrixLayout
from jax_hopper_gemm.testing import shapes

SQUARE = GemmProblem.dense(4096, 4096, 4096)


def of_one_b(m: int, n: int, k: int, a_major: Major = "k") -> GemmProblem:
    """Returns the problem of two products by one B, which was not surveyed."""
    two = GemmProblem.dense(m, n, k, 2, a_major=a_major)
    return replace(two, b=replace(two.b, batch_stride=0))


SOME_SURVEYS = fit_xla.SURVEYS[::3]  # a third of them, of both GPUs
pytestmark = [pytest.mark.pure, pytest.mark.usefixtures("no_tables")]


def test_trees_add_up_to_the_logarithm_of_a_ratio():
    trees = Trees(0.5, ([0, 2.0, -0.25, [1, 0.0, 0.125, 1.0]], 0.25))
    assert trees.ratio((2.0, 9.0)) == math.exp(0.5)
    assert trees.ratio((2.5, 0.0)) == math.exp(0.875)
    assert trees.ratio((2.5, 0.5)) == math.exp(1.75)


@pytest.mark.parametrize(
    "problem",
    [
        of_one_b(4096, 4096, 4096),
        replace(
            GemmProblem.dense(512, 512, 512, 8), a=MatrixLayout("k", 512, 512**2, copied_line=509)
        ),
        GemmProblem.dense(512, 8, 512, 8),
        GemmProblem.dense(4096, 4096, 4096, b_major="k", dtype="int8", d_dtype="int32"),
        GemmProblem.grouped("m", 4096, 4096, 4096, 8),
    ],
)
def test_products_that_were_not_surveyed_have_no_fit(problem):
    assert fit_for(problem, H200) is None


def test_other_gpus_and_limited_ones_have_no_fit():
    assert fit_for(SQUARE, H200) is not None
    assert fit_for(SQUARE, H200.limited_to(64)) is None
    assert fit_for(SQUARE, replace(H200, num_sms=114)) is None


def test_the_fit_knows_the_products_that_it_was_made_of():
    """Features that code and file disagree about would make it a guess."""
    errors, faster = [], []
    for problem, cost, measured, _ in chain.from_iterable(map(fit_xla.surveyed, SOME_SURVEYS)):
        fit = fit_for(problem, H200)
        assert fit
        ratio = fit.expected.ratio(features(problem, cost))
        shortest, longest = RATIOS["half"]
        within = min(max(measured, shortest), longest)
        errors.append(abs(ratio / within - 1))
        faster.append(measured if ratio >= xla_lead(problem, cost) else 1.0)
    assert len(errors) >= 500
    assert sorted(errors)[len(errors) // 2] <= 0.05
    assert math.exp(sum(map(math.log, faster)) / len(faster)) >= 1.09
    assert sum(speed < 0.97 for speed in faster) <= 0.01 * len(faster)


def test_the_fit_of_tf32_knows_the_products_that_it_was_made_of():
    errors = []
    for problem, cost, ratio, _ in fit_xla.in_tf32(fit_xla.TF32):
        fit = fit_for(problem, H200)
        assert fit and fit is read_fit("tf32", H200.num_sms)
        shortest, longest = RATIOS["tf32"]
        within = min(max(ratio, shortest), longest)
        errors.append(abs(fit.expected.ratio(features(problem, cost)) / within - 1))
    assert len(errors) >= 500
    assert sorted(errors)[len(errors) // 2] <= 0.03


def test_a_survey_of_any_name_is_read_with_streams_that_l2_keeps(tmp_path):
    """Of what dispatch ran alone, as some of these are, which have another policy for L2.

    Narrow products have other kernels since, and some of few rows or short K.
    """
    (survey,) = (path for path in fit_xla.SURVEYS if path.stem == "h100_survey_13")
    copy = tmp_path / "survey.json"
    copy.write_text(survey.read_text())
    measured = list(fit_xla.surveyed(copy))
    document = json.loads(copy.read_text())
    for found, row in zip(measured, document["rows"], strict=True):
        (timed,) = (document["names"][i] for i in row["kernels"])
        assert timed in (found.spec.name, replace(found.spec, evict_first=None).name)
    usual = [
        each for each in measured if not (is_narrow(each.problem) or has_short_k(each.problem))
    ]
    assert len(usual) > 190 and sum(each.runs for each in usual) > 0.9 * len(usual)
    assert any(each.runs and each.spec.evict_first for each in usual)


def test_no_product_that_is_held_out_was_surveyed():
    held_out = {(p.m, p.n, p.k, p.a.major, p.b.major) for p in shapes.suite("heldout")}
    for path in fit_xla.SURVEYS:
        rows = json.loads(path.read_text())["rows"]
        surveyed = {tuple(row[x] for x in ("m", "n", "k", "a_major", "b_major")) for row in rows}
        assert surveyed and not surveyed & held_out


def test_a_kernel_runs_where_it_is_expected_to_lead_and_the_reason_gives_the_error():
    chosen = set()
    fit = read_fit("half", H200.num_sms)
    assert fit
    for problem in shapes.suite("heldout")[:40]:
        best, _ = best_kernel(problem, H200)
        assert best
        leads = fit.expected.ratio(features(problem, best.cost)) >= xla_lead(problem, best.cost)
        reason = xla_is_faster(problem, best.cost, H200)
        assert (reason is None) == leads
        assert leads or f"errs by {fit.error:.0%}" in str(reason)
        chosen.add(leads)
    assert chosen == {True, False}


def _slower(ns: float, times: float) -> float:
    return LOOSE_LATENCY_NS + times * (ns - LOOSE_LATENCY_NS)


def test_xla_is_expected_to_be_slower_where_lines_are_no_multiples_of_16_bytes():
    loose, whole = (GemmProblem.dense(4096, n, 1024, b_major="k") for n in (30522, 30528))
    expected, of_whole = xla_time(loose, H200), xla_time(whole, H200)
    assert expected and of_whole
    stores = LOOSE_STORES * 2 * 4096 * 30522 / MEMORY_BYTES_PER_NS
    assert expected.ns == pytest.approx(of_whole.ns + stores)
    assert choose(loose, H200).spec is not None
    lines: list[tuple[Major, int, tuple[float, float]]] = [
        ("k", 1025, LOOSE_ALONG_K), ("n", 1025, LOOSE_LINES[1]), ("n", 1026, LOOSE_LINES[2]),
        ("n", 1028, LOOSE_LINES[4]),
    ]  # fmt: skip
    for b_major, line, (times, least) in lines:
        whole = GemmProblem.dense(4096, 30528, 1024, b_major=b_major)
        copied = replace(whole, a=replace(whole.a, copied_line=line))
        found, of_whole = xla_time(copied, H200), xla_time(whole, H200)
        assert found and of_whole
        assert found.ns == pytest.approx(_slower(of_whole.ns, times))
        assert found.least_ns == pytest.approx(_slower(of_whole.ns / LOOSE_LEAD, least))
        assert found.limit_ns == pytest.approx(found.ns / LOOSE_LEAD)


def test_the_default_is_as_fast_with_loose_lines_as_the_faster_of_kernel_and_xla():
    """By measured times; kernels with the copies that they read."""
    times = []
    for row in json.loads((fit_xla.DATA / "h200_loose.json").read_text())["rows"]:
        found = layouts.decision_of((row["subscripts"], row["extents"]), kernel_only=False)
        taken = row["hopper_us"] if found.spec else row["xla_us"]
        times.append((taken / min(row["hopper_us"], row["xla_us"]), taken / row["xla_us"]))
    over_faster, over_xla = zip(*times, strict=True)
    assert len(times) > 90
    assert math.exp(statistics.fmean(map(math.log, over_faster))) < 1.02
    assert sum(x > 1 / 0.97 for x in over_xla) <= 1


def test_of_measured_batches_the_default_takes_kernels_that_are_faster():
    measured = [x for path in fit_xla.BATCHES for x in fit_xla.surveyed(path) if x.runs]
    speeds = [x.ratio if choose(x.problem, H200).spec else 1.0 for x in measured]
    assert len(speeds) > 500 and math.exp(statistics.fmean(map(math.log, speeds))) > 1.09
    assert sum(x < 0.97 for x in speeds) < 0.02 * len(speeds)


@pytest.mark.parametrize(
    ("paths", "count"),
    [
        (fit_xla.BATCHES, 900),
        ([fit_xla.DATA / f"h200_survey_{number}.json" for number in (15, 16, 17)], 820),
    ],
    ids=["batches", "medium"],
)
def test_kernels_chosen_for_measured_products_are_near_the_fastest_of_those_timed(
    paths: list[Path], count: int
):
    """Of batches, and of products of about one wave of tiles."""
    losses = []
    for document in (json.loads(path.read_text()) for path in paths):
        for row in document["rows"]:
            problem = fit_xla.problem_of(row)
            us = fit_xla.timed_specs(document["names"], row, problem)
            best, _ = best_kernel(problem, H200, us)
            if best:
                losses.append(us[best.spec] / min(row["us"]))
    assert len(losses) == count and math.exp(statistics.fmean(map(math.log, losses))) < 1.05


def test_an_epilogue_is_weighed_against_the_time_that_xla_is_expected_to_take():
    """XLA's product of these extents is the faster, but its pass over D is not free."""
    problem = GemmProblem.dense(8192, 2048, 32128, b_major="k")
    assert choose(problem, H200).spec is None
    tanh = EpilogueGraph(nodes=(Node("tanh", (0,)),), results=(Result("matrix", 1, "bfloat16"),))
    short = replace(problem, k=2048, a=replace(problem.a, leading_stride=2048), epilogue=tanh)
    assert choose(short, H200).spec is not None


# By the fit, or by rules where there is none.


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (of_one_b(8, 8192, 8192, a_major="m"), "D is 8x8192"),
        (of_one_b(8192, 8, 8192), "D is 8192x8"),
        (of_one_b(512, 512, 16384), "K=16384 over 32 tiles"),
        (of_one_b(1152, 2304, 4480), "most SMs would wait for the last of 3 waves"),
        (GemmProblem.dense(2560, 5120, 5120), "of others that ratio errs by"),
    ],
)
def test_xla_is_preferred_with_a_reason_unless_a_kernel_is_asked_for(problem, words):
    decision = choose(problem, H200)
    assert decision.spec is None and decision.raster_order is None
    assert words in decision.reason and decision.source == "model"
    assert choose(problem, H200, kernel_only=True).spec is not None


@pytest.mark.parametrize("m", [8, 16])
def test_up_to_16_rows_that_do_not_lie_along_k_go_to_xla(m):
    """Of batches with one right operand, whose time on XLA is not fitted."""
    of_columns = of_one_b(m, 28672, 8192, a_major="m")
    assert choose(of_columns, H200).spec is None
    assert choose(replace(of_columns, m=24), H200).spec is not None
    assert best_kernel(GemmProblem.dense(m, 28672, 8192), H200)[0] is not None


def test_the_model_leaves_few_products_of_few_rows_to_xla():
    """On an H200 kernels took from 0.64 to 1.002 of XLA's time on all of the suite."""
    problems = shapes.suite("few_rows")
    assert sum(choose(p, H200).spec is not None for p in problems) >= 0.75 * len(problems)


@pytest.mark.parametrize(("m", "n", "k"), [(256, 1536, 7168), (496, 1000, 4096)])
def test_shared_tiles_of_short_k_are_not_left_to_xla(m, n, k):
    assert choose(GemmProblem.dense(m, n, k, 2), H200).spec is not None
