"""Random epilogues and their gradients on a GPU, within bounds derived for each operation."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jax_hopper_gemm.testing import random_products
from jax_hopper_gemm.testing.lowered import specs_of


@pytest.mark.parametrize("seed", range(random_products.COUNT))
def test_random_epilogues(seed: int, checked):
    case = random_products.case(seed)
    program = jax.jit(case.run)
    results = program(*case.arguments)
    case.check(results)
    for first, again in zip(results, program(*case.arguments), strict=True):
        assert np.array_equal(first, again), f"other bits: {case.description}"
    for spec in specs_of(case.run, *case.arguments):
        checked(spec)


@pytest.mark.parametrize("seed", range(random_products.COUNT))
def test_gradients_of_random_epilogues_as_epilogues(seed: int, checked):
    case = random_products.gradient_case(seed).pullback
    case.check(jax.jit(case.run)(*case.arguments))
    for spec in specs_of(case.run, *case.arguments):
        checked(spec)


@pytest.mark.parametrize("seed", range(random_products.COUNT))
def test_gradients_of_products_with_random_epilogues(seed: int, checked, request):
    case = random_products.gradient_case(seed)
    if "float16" in case.pullback.description.replace("bfloat16", ""):
        # NOTE: the reference rounds float16 arithmetic in another order than the derivative that
        # JAX takes here. JAX alone, on a CPU and without kernels, misses it in the same elements.
        request.applymarker(pytest.mark.xfail(raises=AssertionError, strict=False))
    case.check(*jax.jit(case.run)(*case.arguments))
    for spec in specs_of(case.run, *case.arguments):
        checked(spec)
