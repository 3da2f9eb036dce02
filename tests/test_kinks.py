"""Gradients at kinks: a derivative jumps where the function that ran forwards does.

The products are large and close to what the bias takes away, so their sums with it are small: a
product rounded to 16 bits says nothing of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.stepwise import run_stepwise

import jax_hopper_gemm as jhg

M, K, N, G = 96, 128, 64, 3
SIZES = np.array([32, 0, 64], np.int32)
FACTOR = 16.0  # a power of two: it rounds nothing, and neither does a fused multiply-add
FUNCTIONS = {
    "relu": jax.nn.relu,
    "relu squared": lambda z: jnp.square(jax.nn.relu(z)),
    "leaky relu": jax.nn.leaky_relu,
    "relu6": jax.nn.relu6,
    "hard swish": jax.nn.hard_swish,
    "hard tanh": jax.nn.hard_tanh,
    "elu": jax.nn.elu,
    "abs": jnp.abs,
    "max": lambda z: jnp.maximum(z, 0.0),
    "max of a number": lambda z: jnp.maximum(z, 0.3),
    "clip": lambda z: jnp.clip(z, -1.0, 1.0),
    "clip at zero": lambda z: jnp.clip(z, 0.0, 1.0),
    "where": lambda z: jnp.where(z > 0.5, 3 * z, z),
    "where at zero": lambda z: jnp.where(z < 0, z, -2 * z),
    "where of a product": lambda z: jnp.where(z > 0.5, z * z, z),
    "floor": lambda z: z * jnp.floor(z),
    "row maximum": lambda z: jnp.max(z, -1, keepdims=True) * z,
}  # fmt: skip


def operands(dtype: Any, groups: tuple[int, ...] = ()) -> tuple[jax.Array, jax.Array]:
    """Returns a and b: the elements of a column of their product are nearly equal, and over 64."""
    rng = np.random.default_rng(7)
    a = 1 + rng.integers(0, 4, (M, K)) / 128
    b = rng.integers(32, 64, (*groups, K, N)) / 64
    return jax.device_put(a.astype(dtype)), jax.device_put(b.astype(dtype))


def means(product: jax.Array) -> jax.Array:
    return product.mean(0)


def wide(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def cotangent(dtype: Any) -> jax.Array:
    return jax.device_put(np.random.default_rng(8).normal(size=(M, N)).astype(dtype))


def assert_close(ours: Any, theirs: Any) -> None:
    """Both are computed in float32 and rounded to 16 bits once or twice; sums of 96 or fewer."""
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, rtol=0, atol=2**-7 * np.abs(y).max())


def by_mask(function: Any, z: jax.Array, ct: jax.Array) -> jax.Array:
    return jax.vjp(function, z)[1](ct.astype(jnp.float32))[0]


@pytest.mark.parametrize("save_preactivation", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_derivative_after_a_bias_is_that_of_the_function_that_ran(
    name, dtype, save_preactivation
):
    function, ct = FUNCTIONS[name], cotangent(dtype)
    a, b = operands(dtype)
    c = -FACTOR * jax.jit(lambda a, b: means(wide(a, b)))(a, b)
    whole = np.zeros((M, N), np.float32)  # its gradient is the derivative of each element

    def ours(a, b, c, whole, ct):
        layer = partial(
            jhg.matmul, save_preactivation=save_preactivation, alpha=FACTOR, activation=function,
            preferred_element_type=dtype,
        )  # fmt: skip
        return jax.vjp(lambda a, b, c, z: layer(a, b, bias=c, c=z), a, b, c, whole)[1](ct)

    def theirs(a, b, c, ct):
        g = by_mask(function, FACTOR * wide(a, b) + c, ct)
        scaled = FACTOR * g.astype(dtype)
        return wide(scaled, b.T), wide(a.T, scaled), g.sum(0), g

    results, expected = jax.jit(ours)(a, b, c, whole, ct), jax.jit(theirs)(a, b, c, ct)
    assert_close(results, expected)
    if name in PIECEWISE_LINEAR:
        np.testing.assert_array_equal(results[-1], expected[-1])


PIECEWISE_LINEAR = {"relu", "leaky relu", "relu6", "hard tanh", "abs", "max", "max of a number",
                    "clip", "clip at zero", "where", "where at zero"}  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("moving", ["alpha", "c", "beta"])
def test_a_factor_that_moves_keeps_the_mask(moving, dtype):
    a, b = operands(dtype)
    ct = cotangent(dtype)
    c = -jnp.broadcast_to(jax.jit(lambda a, b: means(wide(a, b)))(a, b), (M, N))
    factors = dict(alpha=jnp.float32(FACTOR), beta=jnp.float32(FACTOR), c=c)

    def ours(a, b, x, ct):
        others = {k: v for k, v in factors.items() if k != moving}
        layer = partial(jhg.matmul, b=b, **others, activation="relu", preferred_element_type=dtype)
        return jax.vjp(lambda a, x: layer(a, **{moving: x}), a, x)[1](ct)

    def theirs(a, b, x, ct):
        f = factors | {moving: x}

        def after(acc, x):
            f[moving] = x
            return jax.nn.relu(f["alpha"] * acc + f["beta"] * f["c"])

        g, of_x = jax.vjp(after, wide(a, b), x)[1](ct.astype(jnp.float32))
        return wide(g.astype(dtype), b.T), of_x

    x = factors[moving]
    assert_close(jax.jit(ours)(a, b, x, ct), jax.jit(theirs)(a, b, x, ct))


GATES = {
    "relu": jax.nn.relu,
    "clip": lambda z: jnp.clip(z, -1 / 32, 1 / 16),
    "where": lambda z: jnp.where(z > 1 / 32, 3 * z, z),
}


@pytest.mark.parametrize("save_preactivation", [True, False])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", GATES)
def test_the_derivative_of_a_gate_after_biases_is_that_of_the_function_that_ran(
    name, grouped, save_preactivation
):
    dtype, function = "bfloat16", GATES[name]
    groups = (G,) if grouped else ()
    x, gate = operands(dtype, groups)
    up, ct = np.flip(gate, -1), cotangent(dtype)
    row = np.repeat(np.arange(G), SIZES) if grouped else None

    def product(w):
        if not grouped:
            return wide(x, w)
        return jnp.einsum("mk,mkn->mn", x, w[row], preferred_element_type=jnp.float32)

    def spread(bias):
        return bias[row] if grouped else jnp.broadcast_to(bias, (M, N))

    def bias_of(w):
        acc = np.asarray(jax.jit(product)(w))
        own = [acc[row == i] if grouped else acc for i in range(G if grouped else 1)]
        mean = np.stack([-y.sum(0) / max(1, len(y)) for y in own])
        return mean if grouped else mean[0]

    biases = (bias_of(gate), bias_of(up))

    def ours(x, biases, ct):
        def layer(x, biases):
            sizes = SIZES if grouped else None
            return jhg.gated_linear_unit(
                x, (gate, up), bias=biases, activation=function, group_sizes=sizes,
                save_preactivation=save_preactivation, preferred_element_type=dtype,
            )  # fmt: skip

        return jax.vjp(layer, x, biases)[1](ct)

    def theirs(x, biases, ct):
        z = [product(w) + spread(b) for w, b in zip((gate, up), biases, strict=True)]
        of = jax.vjp(lambda g, u: function(g) * u, *z)[1](ct.astype(jnp.float32))
        of_biases = jax.vjp(lambda bs: [spread(b) for b in bs], list(biases))[1](list(of))[0]
        sums = [
            jnp.einsum("mn,mkn->mk" if grouped else "mn,kn->mk", g.astype(dtype),
                       w[row] if grouped else w, preferred_element_type=jnp.float32)
            for g, w in zip(of, (gate, up), strict=True)
        ]  # fmt: skip
        return sum(sums), of_biases

    results, expected = jax.jit(ours)(x, biases, ct), jax.jit(theirs)(x, biases, ct)
    assert_close(results, expected)


@pytest.mark.slow
@pytest.mark.parametrize("save_preactivation", [True, False])
@pytest.mark.parametrize("name", ["relu", "abs", "clip", "where", "max"])
def test_the_derivative_of_a_ragged_product_after_a_bias_is_that_of_the_function_that_ran(
    name, save_preactivation
):
    dtype, function = "bfloat16", FUNCTIONS[name]
    a, b = operands(dtype, (G,))
    row = np.repeat(np.arange(G), SIZES)
    matrices = np.asarray(b)[row]
    acc = np.asarray(jnp.einsum("mk,mkn->mn", a, matrices, preferred_element_type=jnp.float32))
    bias = np.stack([-(acc[row == i].sum(0)) / max(1, int(SIZES[i])) for i in range(G)])
    whole, ct = np.zeros((M, N), np.float32), cotangent(dtype)

    def ours(bias, whole, ct):
        def layer(bias, whole):
            return jhg.ragged_dot(
                a, b, SIZES, bias=bias, epilogue=lambda y, z: function(FACTOR * y + z),
                epilogue_operands=(whole,), save_preactivation=save_preactivation,
            )  # fmt: skip

        return jax.vjp(layer, bias, whole)[1](ct)

    def theirs(bias, ct):
        g = by_mask(function, FACTOR * (acc + bias[row]), ct)
        return jax.ops.segment_sum(FACTOR * g, row, G), g

    results, expected = jax.jit(ours)(bias, whole, ct), jax.jit(theirs)(bias, ct)
    assert_close(results, expected)
    np.testing.assert_array_equal(results[1], expected[1])


@jax.custom_jvp
def largest(y):
    """Has the derivative of a maximum that JAX before 0.12 has, but for numbers that are equal."""
    return jnp.maximum(y, 0.5)


@largest.defjvp
def _(primals, tangents):
    (y,), (tangent,) = primals, tangents
    result = largest(y)
    return result, jnp.where((y == result) & (y > 0.5), tangent, 0)


@pytest.mark.usefixtures("all_fused")
@pytest.mark.parametrize(
    "jump",
    [
        lambda y: jnp.where(y > 0.5, y, 0),
        lambda y: jnp.maximum(y, 0.5),
        largest,
        lambda y: jnp.minimum(largest(y), 8.0),
    ],
    ids=["where", "max", "by its result", "clip"],
)
def test_a_program_that_was_differentiated_jumps_where_its_kernels_did(jump):
    """Later kernels compute the mask anew of what is stored: of each 16,384 numbers 5 to 23 were on
    its other side.
    """
    a, b = (jax.random.normal(jax.random.key(i), (128, 128), jnp.bfloat16) for i in range(2))

    def gradient_and_output(a, b, shift):
        def layer(shift):
            y = jump(jax.nn.silu(a @ b / 16 + shift))
            return y @ jnp.eye(128, dtype=y.dtype), y

        _, pull, y = jax.vjp(layer, shift, has_aux=True)
        return pull(jnp.ones_like(y))[0], y

    gradient, y = run_stepwise(jhg.accelerate(gradient_and_output), a, b, jnp.zeros_like(a))
    least = float(y.min())
    assert 1000 < np.count_nonzero(y > least) < y.size
    # Where both are equal, a maximum has half the derivative; that of silu is 0.84 and more here.
    np.testing.assert_array_equal(gradient > 0.5, y > least)


@pytest.mark.usefixtures("all_fused")
@pytest.mark.parametrize("before", [lambda y: y, lambda y: y / 8])
@pytest.mark.parametrize("compared", [jnp.equal, jnp.not_equal, jnp.less, jnp.greater_equal])
def test_numbers_are_compared_with_what_is_made_of_them_as_both_are_stored(compared, before):
    a, b = (jax.random.normal(jax.random.key(i), (128, 128), jnp.bfloat16) for i in range(2))

    def both(a: Any, b: Any) -> Any:
        y = before(a @ b)
        most = jnp.maximum(y, 0.5)
        return most, compared(y, most).astype(y.dtype)

    _, found = run_stepwise(jhg.accelerate(both), a, b)
    _, expected = both(a, b)
    assert 1000 < np.count_nonzero(expected) <= expected.size
    np.testing.assert_array_equal(found, expected)


def test_a_test_for_nan_is_part_of_its_kernel():
    def known(a: Any, b: Any) -> Any:
        y = jnp.exp(a @ b)
        return jnp.where(y == y, y, 0)

    a = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    (program,) = jax.make_jaxpr(jhg.accelerate(known))(a, a).eqns
    assert [e.primitive.name for e in program.params["call_jaxpr"].eqns] == ["hopper_fused"]


def test_a_kernel_chooses_the_numbers_that_xla_chose():
    """XLA computes what is compared, small as it is, and a kernel the gradient."""
    x, w = (jax.random.normal(jax.random.key(i), (128, 128), jnp.bfloat16) for i in range(2))

    @jax.grad
    def gradient(x):
        y = largest(2 * jnp.tanh(x @ w / 8 + 1))
        return jnp.mean((y @ w).astype(jnp.float32) ** 2)

    expected = jax.jit(gradient)(x)
    found = jax.jit(jhg.accelerate(gradient))(x)
    assert_close([found], [expected])


@pytest.mark.usefixtures("all_fused")
@pytest.mark.parametrize(
    "function", [jnp.nan_to_num, lambda y: jnp.where(jnp.isfinite(y), y, 0), jnp.isinf]
)
def test_a_product_is_infinite_for_an_accelerated_program_where_it_is_in_its_dtype(function):
    a = jnp.full((32, 64), 64, jnp.float16) * jnp.arange(1, 65, dtype=jnp.float16)

    def of_product(a: Any, b: Any) -> Any:
        return function(a @ b.T).astype(jnp.float16) / 8

    expected = of_product(a, a)
    assert jnp.isinf(a @ a.T).any() and jnp.isfinite(expected).all()
    np.testing.assert_array_equal(jhg.accelerate(of_product)(a, a), expected)
