"""What JAX makes of each public function is what it makes of its twin in jnp, and launches kernels.

docs/transformations.md has a table of these tests. Which combinations run is said there.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import running, transformation_table
from support.covering import ALL
from support.transformations import (
    COMBINATIONS,
    FUNCTIONS,
    LEFT_TO_XLA,
    TRANSFORMATIONS,
    assert_equal,
    covering_combinations,
    on_kernels,
)

import jax_hopper_gemm as jhg

CASES = COMBINATIONS if ALL else covering_combinations()
LAUNCHES = "custom_call @jax_hopper_gemm.v1."


def all_of(cases):
    """Parametrises a test by pairs, each of which is one value: none stands for another."""
    return pytest.mark.parametrize("case", cases, ids="-".join)


@all_of(CASES)
def test_results_are_those_of_jnp(case):
    name, function = case
    transformation, known = TRANSFORMATIONS[name], FUNCTIONS[function]
    program = transformation.of(known.ours, known)
    assert_equal(transformation.run(program, known.arguments(), known), name, function)


@pytest.mark.usefixtures("launcher")
@all_of([x for x in CASES if TRANSFORMATIONS[x[0]].lower])
def test_every_product_launches_a_kernel(case):
    name, function = case
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


@pytest.mark.slow
def test_integers_have_derivatives_of_float0():
    lhs, rhs, sizes = FUNCTIONS["ragged_dot"].arguments()
    rows, offset = jnp.arange(16)[::-1], jnp.int32(0)

    def loss(lhs, rhs, sizes, rows, offset):
        gathered = jhg.ragged_dot(lhs, rhs, sizes, row_indices=rows)
        return (gathered + jhg.ragged_dot(lhs, rhs, sizes, group_offset=offset)).sum()

    gradients = jax.grad(loss, tuple(range(5)), allow_int=True)(lhs, rhs, sizes, rows, offset)
    dtypes = [x.dtype for x in gradients]
    assert dtypes == [lhs.dtype, rhs.dtype, *[jax.dtypes.float0] * 3]


@pytest.mark.parametrize("activation", [None, "tanh"])
def test_products_can_be_offloaded_instead_of_recomputed(activation):
    def gradient(matmul, policy=jax.checkpoint_policies.nothing_saveable):
        block = jax.checkpoint(lambda *x: jnp.sin(matmul(*x)).sum(), policy=policy)
        return jax.grad(block, (0, 1))

    def plain(a, b):
        return jnp.tanh(a @ b) if activation else a @ b

    offload = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    matmul = partial(jhg.matmul, activation=activation, save_preactivation=True)
    ours = gradient(matmul, offload)
    a, b = FUNCTIONS["matmul"].arguments("float32")
    for one, other in zip(jax.jit(ours)(a, b), jax.jit(gradient(plain))(a, b), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    program = str(jax.make_jaxpr(ours)(a, b))
    assert program.count("hopper_fused[" if activation else "hopper_dot[") == (
        1 if activation else 3
    )
    assert "Host" in program or "pinned_host" in program


def test_those_that_run_with_each_change_hold_every_transformation_and_function():
    few = covering_combinations()
    assert len(few) <= len(COMBINATIONS) / 3
    assert {name for name, _ in few} == set(TRANSFORMATIONS)
    assert {function for _, function in few} == set(FUNCTIONS)
    assert set(LEFT_TO_XLA) <= set(few)


def test_the_documented_table_is_that_of_these_tests():
    text = (Path(__file__).parents[1] / "docs" / "transformations.md").read_text()
    assert transformation_table.with_table(text) == text
