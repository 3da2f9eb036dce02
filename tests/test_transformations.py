"""What JAX makes of each public function is what it makes of its twin in jnp, and launches kernels.

docs/transformations.md has a table of these tests.
"""

from __future__ import annotations

import itertools

import pytest

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
