"""What JAX makes of each public function is what it makes of its twin in jnp, and launches kernels.

docs/transformations.md has a table of these tests.
"""

from __future__ import annotations

import itertools
from functools import partial

import jax.numpy as jnp
import pytest

from jax_hopper_gemm.testing.transformations import (
    FUNCTIONS,
    LEFT_TO_XLA,
    TRANSFORMATIONS,
    assert_equal,
    implementation,
)

pytestmark = pytest.mark.usefixtures("quick_compiles")

COMBINATIONS = list(itertools.product(TRANSFORMATIONS, FUNCTIONS))
LAUNCHES = "custom_call @jax_hopper_gemm.v1."


@pytest.mark.parametrize("name, function", COMBINATIONS)
def test_results_are_those_of_jnp(name, function):
    transformation, known = TRANSFORMATIONS[name], FUNCTIONS[function]
    program = transformation.of(known.ours, known)
    assert_equal(transformation.run(program, known.arguments(jnp.bfloat16), known), name, function)


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize("name, function", [x for x in COMBINATIONS if TRANSFORMATIONS[x[0]].lower])
def test_every_product_launches_a_kernel(name, function):
    transformation, known = TRANSFORMATIONS[name], FUNCTIONS[function]
    assert transformation.lower
    ours = partial(known.ours, implementation="hopper")
    args = known.arguments(jnp.bfloat16)
    around = (lambda f, _: f) if name == "export" else transformation.around
    program = transformation.program(around(ours, known), known)
    if implementation(name, function) is None:
        with pytest.raises(NotImplementedError, match="no kernel runs"):
            transformation.lower(program, args, known)
        return
    text = transformation.lower(program, args, known)
    assert LAUNCHES in text and "stablehlo.dot_general" not in text
