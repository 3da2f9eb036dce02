"""What JAX makes of each public function is what it makes of its twin in jnp, and launches kernels.

docs/transformations.md has a table of these tests.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jax_hopper_gemm.testing import running, transformation_table
from jax_hopper_gemm.testing.transformations import (
    FUNCTIONS,
    LEFT_TO_XLA,
    TRANSFORMATIONS,
    assert_equal,
    on_kernels,
)

pytestmark = pytest.mark.usefixtures("quick_compiles")

COMBINATIONS = list(itertools.product(TRANSFORMATIONS, FUNCTIONS))
LAUNCHES = "custom_call @jax_hopper_gemm.v1."


@pytest.mark.parametrize("name, function", COMBINATIONS)
def test_results_are_those_of_jnp(name, function):
    transformation, known = TRANSFORMATIONS[name], FUNCTIONS[function]
    program = transformation.of(known.ours, known)
    assert_equal(transformation.run(program, known.arguments(), known), name, function)


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize("name, function", [x for x in COMBINATIONS if TRANSFORMATIONS[x[0]].lower])
def test_every_product_launches_a_kernel(name, function):
    transformation, known = TRANSFORMATIONS[name], FUNCTIONS[function]
    assert transformation.lower
    program = transformation.to_lower(on_kernels(name, function), known)
    text = transformation.lower(program, known.arguments(), known)
    left = "stablehlo.dot_general" in text or "chlo.ragged_dot" in text
    assert left == ((name, function) in LEFT_TO_XLA)
    assert LAUNCHES in text or left


@pytest.mark.parametrize("function", [name for name, known in FUNCTIONS.items() if known.sizes])
def test_nans_that_belong_to_no_group_reach_nothing(function):
    known = FUNCTIONS[function]
    program = TRANSFORMATIONS["vjp"].of(known.ours, known)
    args = running.poisoned(known.arguments(), known)
    assert all(jnp.isnan(x).any() for x in args[: len(known.floats)])
    with jax.debug_nans(True):
        assert_equal(jax.jit(program)(*args), "vjp", function)


def test_the_documented_table_is_that_of_these_tests():
    text = (Path(__file__).parents[1] / "docs" / "transformations.md").read_text()
    assert transformation_table.with_table(text) == text
