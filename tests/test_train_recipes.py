"""The kernels and the text of `benchmarks/train_recipes.py`."""

from __future__ import annotations

import pytest
import train_recipes as runs

from jax_hopper_gemm.gemm.spec import GemmSpec

pytestmark = pytest.mark.pure  # notebook 05 trains by recipes


def test_kernels_are_those_of_the_recipes():
    setting = runs.Setting(layers=1)
    plain = set(runs.specs(setting, [runs.PLAIN]))
    assert {spec.a_dtype for spec in plain if isinstance(spec, GemmSpec)} == {"bfloat16"}
    for name, dtype in (("blocks", "float8_e4m3fn"), ("delayed", "float8_e5m2"), ("int8", "int8")):
        found = [spec for spec in runs.specs(setting, [name]) if isinstance(spec, GemmSpec)]
        assert dtype in {dtype for spec in found for dtype in (spec.a_dtype, spec.b_dtype)}


def test_the_text_is_characters():
    text = runs.text()
    assert 1_000_000 < len(text) and 0 <= text.min() and text.max() < runs.BYTES
