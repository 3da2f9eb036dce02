"""Products have chosen accumulators, and each form of an operation has a kernel."""

from __future__ import annotations

import numpy as np
import pytest
from support.operations import OPERATIONS, factors_of, operation_specs

from jax_hopper_gemm.gemm.legality import violations

pytestmark = pytest.mark.pure


def test_factors_have_chosen_numbers_for_a_product():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 1000, np.uint32).view(np.float32)  # of all magnitudes
    special = np.array([0.0, 2.5, np.inf, -np.inf], np.float32)
    x = np.concatenate([bits, rng.standard_normal(2000, np.float32), special])
    x = x[(np.abs(x) > 1e-25) & (np.abs(x) < 1e30) | np.isinf(x) | (x == 0)]
    exponents = np.arange(-24, 8)
    a, b = factors_of(x, exponents)
    with np.errstate(invalid="ignore"):
        product = a[:, :3].astype(np.float64) @ b[:3].astype(np.float64)
    np.testing.assert_array_equal(product, x[:, None] * np.exp2(exponents))


def test_every_form_of_an_operation_has_a_legal_kernel():
    specs = operation_specs()
    assert {name.split("-")[0] for name in specs} == set(OPERATIONS)
    for name, spec in specs.items():
        assert violations(spec) == [], name
    assert {"tanh-approx", "tanh-fast", "tanh-accurate", "exp-fast"} <= set(specs)
