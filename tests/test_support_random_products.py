"""The bounds that random epilogues are held to on a GPU hold what float64 gives, and bite."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import random_products
from support.covering import ALL
from support.random_products import Case

pytestmark = pytest.mark.pure


def in_float64(case: Case) -> list[np.ndarray]:
    with jax.enable_x64(True), jax.disable_jit():
        outputs = case.function(jnp.asarray(case.exact_product), *case.operands)
    return [np.asarray(output, np.float64) for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12 if ALL else 4))
@pytest.mark.parametrize("gradient", [False, True])
def test_ranges_hold_what_float64_gives(seed: int, gradient: bool):
    case = random_products.case(seed)
    if gradient:
        case = random_products.gradient_case(seed).pullback
    for exact, (low, high) in zip(in_float64(case), case.ranges, strict=True):
        assert np.all((low <= exact) & (exact <= high)), case.description


def test_a_result_out_of_range_is_found():
    case = random_products.case(0)
    results = [
        jnp.asarray(x).astype(result.dtype)
        for x, result in zip(in_float64(case), case.results, strict=True)
    ]
    case.check(results)
    results[0] = results[0].at[3, 5].multiply(1 + 2.0**-5)
    with pytest.raises(AssertionError, match=r"1 elements .* \(3, 5\)"):
        case.check(results)


@pytest.mark.slow
def test_gradients_of_a_product_are_checked():
    case = random_products.gradient_case(0)
    dz, *others = in_float64(case.pullback)
    dz = dz.astype(jnp.bfloat16).astype(np.float64)
    a, b = (x.astype(np.float64) for x in (case.forward.a, case.forward.b))
    floats = [x for x in case.forward.operands if x.dtype != bool]
    others = [x.astype(like.dtype) for x, like in zip(others, floats, strict=True)]
    gradients = [(dz @ b.T).astype(jnp.bfloat16), (a.T @ dz).astype(jnp.bfloat16), *others]
    results = [
        jnp.asarray(x).astype(result.dtype)
        for x, result in zip(in_float64(case.forward), case.forward.results, strict=True)
    ]
    case.check(results, gradients)
    gradients[1] = gradients[1] * jnp.bfloat16(1.25)
    with pytest.raises(AssertionError, match="dB"):
        case.check(results, gradients)


def test_products_are_exact_in_bfloat16():
    for seed in range(5):
        product = random_products.case(seed).exact_product
        assert np.array_equal(product.astype(jnp.bfloat16).astype(np.float64), product)
