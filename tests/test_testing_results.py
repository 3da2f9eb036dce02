"""Rows of benchmarks: as text, as JSON and in summary."""

from __future__ import annotations

import json

import pytest

from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.testing import results, timing

pytestmark = pytest.mark.pure


def row(problem, hopper, xla, regime="burst"):
    timings = {"hopper": timing.Timing((hopper,)), "xla": timing.Timing((xla,))}
    return results.Row(problem, regime, "kernel", "XLA", timings)


def test_summary_gives_geometric_mean_and_the_worst_case():
    small, large = GemmProblem.dense(64, 64, 64), GemmProblem.dense(128, 64, 64, b_major="k")
    total = results.summary([row(small, 1.0, 2.0), row(large, 2.0, 1.0)])["hopper, burst"]
    assert total["geometric_mean"] == pytest.approx(1.0)
    assert (total["minimum"], total["minimum_at"]) == (0.5, "128x64x64 MK,NK")


def test_a_row_shows_times_rates_and_what_ran():
    line = results.format_row(row(GemmProblem.dense(1000, 1000, 1000), 4.0, 5.0))
    assert line.split()[:5] == ["1000x1000x1000", "MK,KN", "burst", "4.0", "4.0-4.0"]
    assert "500" in line and "1.250" in line and line.endswith("kernel (auto: XLA)")


def test_rows_survive_json():
    line = json.loads(json.dumps(row(GemmProblem.dense(8, 8, 8), 4.0, 5.0).to_dict()))
    assert line["ratios"] == {"hopper": 1.25, "auto": None}
    assert line["timings"]["xla"]["median_us"] == 5.0
