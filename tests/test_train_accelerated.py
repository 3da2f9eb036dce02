"""The training runs of `benchmarks/train_accelerated.py`, a few steps of a small model."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import train_accelerated as runs
from train_recipes import Setting

from jax_hopper_gemm.interop import fuse_jaxpr

pytestmark = pytest.mark.pure
SMALL = ["--width=64", "--layers=2", "--heads=2", "--length=64", "--batch=8", "--steps=30"]


@pytest.mark.slow
def test_losses_of_an_accelerated_run_are_within_the_spread_of_seeds(monkeypatch, capsys):
    monkeypatch.setattr(fuse_jaxpr, "_refusal", lambda *_: None)  # every region is one kernel
    assert runs.main(SMALL) == 0
    said = capsys.readouterr().out
    assert "means of 20 steps differ by 0.0" in said and "accelerate  " in said
    monkeypatch.setattr(runs.jhg, "accelerate", lambda step: forgetting(step))
    assert runs.main(SMALL) == 1, "a run that learns nothing is found"


def forgetting(step):
    """A step that takes no part of the gradient."""
    return lambda source, state: ((*state[:3], state[3] + 1), step(source, state)[1])


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
