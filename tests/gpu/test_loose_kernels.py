"""Kernels whose threads store D, rows of which begin and end anywhere, on memory with guards."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, outcome
from support.loose import LOOSE_PRODUCTS
from support.policies import loose_specs

import jax_hopper_gemm as jhg

SPECS = loose_specs()
FEW_SMS = 16  # so that a persistent grid wraps around on problems that are quickly checked
RANDOM_PROBLEMS = 100


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_rows_that_end_anywhere_are_right_and_nothing_else_is_written(spec, gpu, checked):
    problems = cases.edge_problems(spec, FEW_SMS)
    problems += cases.split_problems(spec, FEW_SMS)[1:3] if spec.split_k else []
    for seed, (problem, raster_order) in enumerate(problems):
        outcome.check(gpu, spec, problem, raster_order, seed, FEW_SMS)
    checked(spec)


@pytest.mark.parametrize("spec", SPECS[::4], ids=lambda spec: spec.name)
def test_rows_that_end_anywhere_have_the_same_bits_in_20_repeats(spec, gpu):
    problem, raster_order = cases.edge_problems(spec, FEW_SMS)[1]
    outcome.check(gpu, spec, problem, raster_order, 0, FEW_SMS, repeats=20)


@pytest.mark.parametrize("seed", range(RANDOM_PROBLEMS))
def test_random_rows_are_right(seed, gpu):
    rng = random.Random(seed)
    spec = rng.choice(SPECS)
    problem, raster_order = cases.random_problem(rng, spec, max_extent=3000)
    outcome.check(gpu, spec, problem, raster_order, seed)


@pytest.mark.parametrize(("subscripts", "lhs", "rhs"), LOOSE_PRODUCTS)
def test_products_of_padded_operands_are_exact(subscripts, lhs, rhs):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-1, 2, shape).astype(np.float32) for shape in (lhs, rhs))

    @jax.jit
    def product(a, b):
        return jhg.einsum(subscripts, a, b, implementation="hopper")

    found = product(jnp.asarray(a, jnp.bfloat16), jnp.asarray(b, jnp.bfloat16))
    expected = np.einsum(subscripts, a, b)
    assert np.abs(expected).max() <= 256, "bfloat16 holds these integers"
    np.testing.assert_array_equal(np.asarray(found, np.float32), expected)
