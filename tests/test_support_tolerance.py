"""The bounds admit what the tensor cores compute, and nothing wrong."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest
from support import bounds, reference, tolerance
from support.matrices import normal

pytestmark = pytest.mark.pure


def wgmma_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b as the tensor cores compute it: 16 products at a time, aligned and cut off."""

    def cut(x, exponent):
        scale = np.ldexp(1.0, exponent)
        return np.trunc(x / scale) * scale

    exponent_of = lambda x: np.where(x == 0, -1000, np.frexp(x)[1] - 1)  # noqa: E731
    accumulator = np.zeros((a.shape[0], b.shape[1]))
    for k in range(0, a.shape[1], 16):
        x, y = (m.astype(np.float64) for m in (a[:, k : k + 16, None], b[None, k : k + 16]))
        exponents = np.where((x == 0) | (y == 0), -1000, exponent_of(x) + exponent_of(y))
        largest = np.maximum(exponents.max(axis=1), exponent_of(accumulator))
        aligned = cut(x * y, (largest - 25)[:, None, :]).sum(axis=1)
        total = aligned + cut(accumulator, largest - 25)
        accumulator = cut(total, exponent_of(total) - 23)
    return accumulator.astype(np.float32)


def operands(kind: str, k: int):
    a, b = normal((24, k), seed=k), normal((k, 40), seed=k + 1)
    if kind == "positive":  # no cancellation: the truncation is a bias
        return np.abs(a), np.abs(b)
    if kind == "wide":  # most terms lie far below the largest
        exponents = np.random.default_rng(k).integers(-12, 13, (24, k))
        return (a.astype(np.float32) * 2.0**exponents).astype(jnp.bfloat16), b
    if kind == "descending":  # the sum is largest from the start: the worst case of the bound
        decay = np.exp2(-np.arange(k) / 16)
        return (np.abs(a).astype(np.float32) * decay).astype(jnp.bfloat16), np.abs(b)
    return a, b


@pytest.mark.parametrize("kind", ["normal", "positive", "wide", "descending"])
def test_a_truncating_accumulator_is_within_the_bound(kind):
    for k in (1, 15, 16, 200, 4096):
        a, b = operands(kind, k)
        product = wgmma_product(a, b) * 2.0**-6  # float16: keep in range
        exact, magnitude = (f(a, b) * 2.0**-6 for f in (reference.product, reference.magnitude))
        for dtype in ("bfloat16", "float16", "float32"):
            result = product.astype(jnp.dtype(dtype))
            bounds.assert_within_bound(result, exact, magnitude, k, f"k={k}, {dtype}")


def test_the_bound_is_of_the_order_of_the_error():
    a, b = operands("positive", 4096)
    exact, magnitude = reference.product(a, b), reference.magnitude(a, b)
    assert tolerance.worst(wgmma_product(a, b), exact, magnitude, 4096).ratio > 0.05


@pytest.mark.parametrize("k", [64, 200, 4096])
def test_wrong_results_are_outside_the_bound(k):
    a, b = operands("normal", k)
    exact, magnitude = reference.product(a, b), reference.magnitude(a, b)
    without_a_tile, swapped_rows, unwritten = exact.copy(), exact.copy(), exact.copy()
    without_a_tile -= reference.product(a[:, :16], b[:16])
    swapped_rows[[0, 1]] = swapped_rows[[1, 0]]
    unwritten[3, 4] = np.nan
    for dtype in (jnp.bfloat16, jnp.float32):
        without_a_tile_ratio, swapped_ratio, unwritten_ratio = (
            tolerance.worst(wrong.astype(dtype), exact, magnitude, k).ratio
            for wrong in (without_a_tile, swapped_rows, unwritten)
        )
        assert without_a_tile_ratio > 1 and swapped_ratio > 1, dtype
        assert unwritten_ratio == math.inf, dtype


def test_sums_rounded_to_16_bits_are_outside_the_bound():
    a, b = operands("positive", 512)
    rounded = np.zeros((24, 40), np.float32)
    for k in range(0, 512, 16):
        rounded = (rounded + reference.product(a[:, k : k + 16], b[k : k + 16])).astype(
            jnp.bfloat16
        )
    exact, magnitude = reference.product(a, b), reference.magnitude(a, b)
    with pytest.raises(AssertionError, match=r"result: element \(\d+, \d+\) is .* times the bound"):
        bounds.assert_within_bound(rounded, exact, magnitude, 512)


def test_float32_sums_have_the_wider_bound():
    for k in (1, 100, 8192):
        ours, any_order = (tolerance.accumulation_error(k, s) for s in ("wgmma", "float32"))
        assert any_order >= ours
        assert any_order >= k * 2.0**-24
