"""`gated_linear_unit` is two products and the gate between them."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support.program_inspection import integers
from test_ops_epilogue import assert_close, assert_same

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.dtypes import RESULTS

X, GATE, UP = integers((6, 4)), integers((4, 5), seed=1), integers((4, 5), seed=2)
STACKED = jnp.stack((GATE, UP), 1)
BIASES = integers((2, 5), seed=3)


def reference(x, weights, *, activation=jax.nn.silu, bias=None, **ignored):
    gate, up = weights if isinstance(weights, tuple) else (weights[:, 0], weights[:, 1])
    dtype = (x[..., :1] * gate[0, 0]).dtype
    gate, up = (jnp.matmul(x, w, preferred_element_type=jnp.float32) for w in (gate, up))
    if bias is not None:
        gate, up = gate + bias[0], up + bias[1]
    return ((gate if activation is None else activation(gate)) * up).astype(dtype)


FORMS: dict[str, Any] = {"stacked": STACKED, "pair": (GATE, UP)}


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("dtype", RESULTS)
@pytest.mark.parametrize("x_shape", [(6, 4), (4,), (2, 3, 4), (1, 6, 4)])
@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_activated_gate_times_up(form, x_shape, dtype, implementation):
    x = integers(x_shape, dtype)
    weights = jax.tree.map(lambda w: w.astype(dtype), FORMS[form])
    ours = jax.jit(partial(jhg.gated_linear_unit, implementation=implementation))(x, weights)
    assert_close(ours, jax.jit(reference)(x, weights))


@pytest.mark.parametrize("bias", [None, BIASES, (BIASES[0], BIASES[1])])
@pytest.mark.parametrize("name, function", [
    ("gelu", jax.nn.gelu), (jax.nn.sigmoid, jax.nn.sigmoid), (None, None), ("relu", jax.nn.relu),
])  # fmt: skip
def test_activations_and_biases_follow_jnp(name, function, bias):
    ours = jhg.gated_linear_unit(X, STACKED, activation=name, bias=bias)
    assert_close(ours, reference(X, STACKED, activation=function, bias=bias))


def test_preferred_element_type_is_the_result_dtype():
    x, weights = X.astype(jnp.bfloat16), STACKED.astype(jnp.bfloat16)
    ours = jhg.gated_linear_unit(x, weights, activation=None, preferred_element_type=jnp.float32)
    assert_same(ours, (X @ GATE) * (X @ UP))


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("save_preactivation", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_follow_jnp(form, save_preactivation, implementation):
    unit = partial(
        jhg.gated_linear_unit, save_preactivation=save_preactivation, implementation=implementation
    )
    for x_shape in ((6, 4), (2, 3, 4)):
        assert_close(gradients(unit, form, x_shape), reference_gradients(form, x_shape))


def gradients(unit: Any, form: str, x_shape: tuple[int, ...]) -> Any:
    def loss(x, weights, bias):
        y = unit(x, weights, bias=bias)
        return (y * integers(y.shape, seed=4)).sum()

    return jax.jit(jax.grad(loss, (0, 1, 2)))(integers(x_shape) * 0.25, FORMS[form], BIASES)


@cache
def reference_gradients(form: str, x_shape: tuple[int, ...]) -> Any:
    return gradients(reference, form, x_shape)


def test_gradients_of_16_bit_operands_come_in_16_bits():
    def loss(unit, x, weights):
        y = unit(x, weights, activation=jax.nn.relu)
        return (y.astype(jnp.float32) * integers(y.shape, seed=4)).sum()

    x, weights = integers((6, 4), "bfloat16"), STACKED.astype(jnp.bfloat16)
    ours, theirs = (
        jax.jit(jax.grad(partial(loss, f), (0, 1)))(x, weights)
        for f in (jhg.gated_linear_unit, reference)
    )
    assert_same(ours, theirs)


TRANSFORMS = {
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (x + 1, jax.tree.map(jnp.sin, w))),
    "vmap of x": lambda f: lambda x, w: jax.vmap(f, (0, None))(jnp.stack([x, x + 1]), w),
    "vmap of weights": lambda f: lambda x, w: jax.vmap(f, (None, 0))(
        x, jax.tree.map(lambda w: jnp.stack([w, w - 1]), w)
    ),
    "vmap of both": lambda f: lambda x, w: jax.vmap(f, (1, 0), 2)(
        jnp.stack([x, x + 1], 1), jax.tree.map(lambda w: jnp.stack([w, w - 1]), w)
    ),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(lambda x, w: f(x, w).sum()), (0, 1)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("form", FORMS)
def test_transformations_follow_jnp(form, transform):
    ours, theirs = (
        jax.jit(TRANSFORMS[transform](f))(X * 0.25, FORMS[form])
        for f in (jhg.gated_linear_unit, reference)
    )
    assert_close(ours, theirs)


@pytest.mark.parametrize(
    "dtypes", [("bfloat16", "float16"), ("int8", "uint8"), ("int8", "float32")]
)
def test_the_default_dtype_is_the_promoted_one(dtypes):
    x, w = (jnp.full((4, 4), 100, dtype) for dtype in dtypes)
    result = jhg.gated_linear_unit(x, (w, w), activation=None)
    assert result.dtype == jnp.matmul(x, w).dtype
