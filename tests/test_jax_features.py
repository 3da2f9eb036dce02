"""Rarer features of JAX around products: debugging, callbacks, Refs, symbolic shapes."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import jax_hopper_gemm as jhg
from jax_hopper_gemm import moe, recipes

A = jnp.ones((8, 16), jnp.bfloat16)
B = jnp.ones((16, 8), jnp.bfloat16)
SIZES = jnp.array([3, 5])
ROWS = jnp.arange(64).reshape(8, 8).astype(A.dtype) / 64


class Convertible:
    def __init__(self, array: jax.Array) -> None:
        self.__jax_array__ = lambda: array


@pytest.mark.parametrize("symmetric", [True, False])
def test_debug_nans_finds_none_in_quantization_of_finite_numbers(symmetric: bool):
    with jax.debug_nans(True):
        found = jhg.quantize(A, jnp.int8, symmetric=symmetric)
        with pytest.raises(FloatingPointError):
            jhg.quantize(A.at[0, 0].set(jnp.nan), jnp.int8, symmetric=symmetric)
    np.testing.assert_array_equal(found.dequantize(), A)


def test_gradients_of_grouped_weights_in_8_bits_broadcast_explicitly():
    rhs = jnp.ones((2, 16, 8), jnp.bfloat16)
    recipe = recipes.CurrentScaling(grouped_weights=True)

    def loss(rhs: jax.Array) -> jax.Array:
        return jnp.sum(jhg.ragged_dot(A, rhs, SIZES, recipe=recipe).astype(jnp.float32))

    with jax.numpy_rank_promotion("raise"):
        gradient = jax.jit(jax.grad(loss))(rhs)
    np.testing.assert_allclose(gradient[:, 0, 0], SIZES, rtol=1e-2)


def test_int8_forward_is_exported_with_symbolic_rows():
    (rows,) = export.symbolic_shape("m")
    product = jax.jit(partial(jhg.matmul, recipe=recipes.Int8Forward()))
    exported = export.export(product)(jax.ShapeDtypeStruct((rows, 16), A.dtype), B)
    for x in (A, A[:1]):
        np.testing.assert_array_equal(exported.call(x, B), product(x, B))


# Callbacks in functions that follow a product.


def printing(y: jax.Array, *, ordered: bool = False) -> jax.Array:
    jax.debug.print("{}", y[0, 0], ordered=ordered)
    return jnp.tanh(y)


PRODUCTS = {
    "dense": partial(jhg.matmul, b=B),
    "gated": partial(jhg.gated_linear_unit, weights=(B, B)),
    "grouped": partial(jhg.ragged_dot, rhs=jnp.stack((B, B)), group_sizes=SIZES),
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
@pytest.mark.parametrize("activation", [printing, jax.jit(printing)])
def test_a_callback_in_an_activation_runs_once_in_a_derivative(product, activation, capfd):
    def loss(a: jax.Array, activation: Any) -> jax.Array:
        return jnp.sum(product(a, activation=activation).astype(jnp.float32))

    value, gradient = jax.value_and_grad(loss)(A, activation)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("16.0") == 1
    want = jax.value_and_grad(loss)(A, jnp.tanh)
    np.testing.assert_array_equal(value, want[0])
    np.testing.assert_array_equal(gradient, want[1])


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_an_ordered_callback_in_an_activation_is_an_error_but_by_xla(product):
    activation = partial(printing, ordered=True)
    with pytest.raises(NotImplementedError, match="ordered=True"):
        product(A, activation=activation)
    product(A, activation=activation, implementation="xla")


# Refs, and objects that convert themselves.


def test_a_ref_in_place_of_an_array_is_named():
    ref: Any = jax.new_ref(SIZES)
    with pytest.raises(TypeError, match=r"group_sizes is a Ref, .*ref\[\.\.\.\]"):
        jhg.ragged_dot(A, jnp.stack((B, B)), ref)
    with pytest.raises(TypeError, match=r"epilogue_operands\[0\] is a Ref"):
        jhg.matmul(A, B, epilogue=jnp.add, epilogue_operands=(ref,))


def test_an_epilogue_that_closes_over_a_ref_is_an_error():
    ref = jax.new_ref(jnp.ones((8, 8)))
    with pytest.raises(TypeError, match="a Ref that it closes over"):
        jhg.matmul(A, B, epilogue=lambda y: y * ref[...])


def test_a_key_as_the_scale_of_a_router_is_named():
    with pytest.raises(ValueError, match="route: scale is"):
        moe.route(jnp.ones((4, 4)), 2, scale=jax.random.key(0))


def test_einsum_converts_objects_as_jax_does():
    operand: Any = Convertible(A)
    got = jhg.einsum("mk,kn->mn", operand, B)
    np.testing.assert_array_equal(got, lax.dot(A, B))


# Arrays that a program closes over as its equations hold them, as later versions of JAX will.


@pytest.fixture
def held_by_equations():
    jax.config.update("jax_use_simplified_jaxpr_constants", True)
    yield
    jax.config.update("jax_use_simplified_jaxpr_constants", False)


def test_accelerate_fuses_arrays_that_equations_hold(held_by_equations, all_fused):
    def function(a: jax.Array) -> Any:
        rows = jax.nn.silu(lax.ragged_dot(a, jnp.stack((B, B)), SIZES)) + ROWS
        gated = jax.nn.silu(a @ B) * (a @ (2 * B)) + ROWS
        called = jax.jit(lambda y: (ROWS, jnp.tanh(y)))(ROWS.T @ a @ (2 * B))
        return rows, gated, called, ROWS.at[SIZES].add(a[:2] @ B)

    ours = jax.jit(jhg.accelerate(function))(A)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-2), ours, jax.jit(function)(A))
    traced = jax.make_jaxpr(jhg.accelerate(function))(A)
    assert "hopper_fused" in str(traced)
