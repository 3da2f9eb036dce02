"""Kernels that quantize in blocks, bit for bit."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from support.quantization import CASES, Case

LARGE = CASES[-1]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_scales_are_numpys(case, checked):
    arrays = case.arguments()
    got = jax.jit(case.run)(*arrays)
    for ours, exact in zip(got, case.expected(*arrays), strict=True):
        for x, y in zip(ours, exact, strict=True):
            np.testing.assert_array_equal(np.asarray(x, np.float32), y)
    again = jax.jit(case.run)(*arrays)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(again), strict=True):
        assert (np.asarray(x) == np.asarray(y)).all()
    for spec in case.specs():
        checked(spec)


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("case", [CASES[0], CASES[1], Case((256, 384), dtype="float32")], ids=str)
def test_a_block_with_no_number_is_nan(case, special):
    arrays = case.arguments(special)
    got = jax.jit(case.run)(*arrays)
    for (values, scale), (exact, scales), (_, block) in zip(
        got, case.expected(*arrays), case.asked, strict=True
    ):
        values, scale = (np.asarray(x, np.float32) for x in (values, scale))
        np.testing.assert_array_equal(scale, scales)
        wide = np.repeat(np.repeat(scales, block, -2), 128, -1)[: exact.shape[0]]
        harmed = ~np.isfinite(wide[:, : exact.shape[1]])
        assert harmed.any() and np.isnan(values * wide[:, : exact.shape[1]])[harmed].all()
        np.testing.assert_array_equal(values[~harmed], exact[~harmed])


def test_subnormal_and_tiny_blocks_have_no_subnormal_scale(checked):
    case = Case((16, 128), dtype="float32")
    x = np.zeros((16, 128), np.float32)
    x[0, :4], x[1, 5], x[2, 7] = 2.0**-125, 1e-42, 3e38
    (values, scale), _ = jax.jit(case.run)(x)
    exact, scales = case.expected(x)[0]
    np.testing.assert_array_equal(np.asarray(scale), scales)
    np.testing.assert_array_equal(np.asarray(values, np.float32)[[0, 2]], exact[[0, 2]])
    for spec in case.specs():
        checked(spec)
