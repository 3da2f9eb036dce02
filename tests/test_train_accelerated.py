"""The training runs of `benchmarks/train_accelerated.py`, a few steps of a small model."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import train_accelerated as runs
from train_recipes import Setting

pytestmark = pytest.mark.pure
SMALL = ["--width=64", "--layers=1", "--heads=2", "--length=64", "--batch=8", "--steps=30"]


@pytest.mark.slow
def test_losses_of_an_accelerated_run_are_within_the_spread_of_seeds(all_fused, capsys):
    assert runs.main(SMALL) == 0
    said = capsys.readouterr().out
    assert "means of 20 steps differ by 0.0" in said and "accelerate  " in said


@pytest.mark.parametrize(("away", "status"), [(0.5, 0), (1.5, 1), (np.nan, 1)])
def test_a_run_farther_away_than_another_seed_fails(away, status, monkeypatch):
    def losses(setting, wrap=None):
        return np.full(setting.steps, away if wrap else float(setting.seed))

    monkeypatch.setattr(runs, "losses", losses)
    monkeypatch.setattr(runs, "specs", lambda setting: [])
    assert runs.main([]) == status


def test_differences_are_of_means():
    zeros = np.zeros(100)
    assert runs.distance(zeros, zeros) == 0
    assert runs.distance(zeros, zeros + np.arange(100) % 2) == pytest.approx(0.5)
    spike = zeros.copy()
    spike[50] = 1
    assert runs.distance(spike, zeros) == pytest.approx(1 / runs.WINDOW)


def test_kernels_are_those_of_the_step():
    found = runs.specs(Setting(layers=1))
    assert len(found) > 3 and {spec.a_dtype for spec in found} == {"bfloat16"}
    assert any(spec.epilogue for spec in found)
    assert jax.default_backend() == "cpu"
