"""The training runs of `benchmarks/train_recipes.py`, a few steps of a small model."""

from __future__ import annotations

import numpy as np
import pytest
import train_recipes as runs

SMALL = runs.Setting(64, 2, 2, 64, 8, steps=50, rate=4e-3, averaged=10)
pytestmark = pytest.mark.pure


@pytest.fixture(scope="module")
def plain() -> runs.Outcome:
    return runs.trained(SMALL, None)


@pytest.mark.parametrize("name", ["blocks"])  # notebook 05 trains by all of them
def test_a_recipe_learns_as_bfloat16_does(name, plain):
    outcome = runs.trained(SMALL, runs.RECIPES[name])
    assert plain.losses[0] > 4.5 and plain.training < 3.2, "nothing was learnt"
    assert outcome.losses != plain.losses, "nothing was quantized"
    np.testing.assert_allclose(outcome.training, plain.training, rtol=0.01)
    np.testing.assert_allclose(outcome.held_out, plain.held_out, rtol=0.02)
    assert set(runs.differences({runs.PLAIN: plain, name: outcome})) == {name}


def test_kernels_are_those_of_the_recipes():
    setting = runs.Setting(layers=1)
    plain = set(runs.specs(setting, [runs.PLAIN]))
    assert {spec.a_dtype for spec in plain} == {"bfloat16"}
    for name, dtype in (("blocks", "float8_e4m3fn"), ("delayed", "float8_e5m2"), ("int8", "int8")):
        found = [spec for spec in runs.specs(setting, [name]) if spec not in plain]
        assert dtype in {dtype for spec in found for dtype in (spec.a_dtype, spec.b_dtype)}


def test_the_text_is_characters():
    text = runs.text()
    assert 50_000 < len(text) and 0 <= text.min() and text.max() < runs.BYTES
