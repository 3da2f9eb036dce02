"""What follows `ragged_dot`, and gated linear units of rows in groups: jnp, one group at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.program_inspection import integers
from test_ops_epilogue import assert_close

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.dtypes import RESULTS

M, K, N, G = 12, 4, 5, 3
SIZES = jnp.asarray([3, 0, 6], np.int32)  # three rows belong to no group
LHS, RHS, BIAS = integers((M, K)), integers((G, K, N), seed=1), integers((G, N), seed=2)
GATE, UP, BIASES = RHS, integers((G, K, N), seed=3), integers((G, 2, N), seed=4)
SCALE = integers((M, 1), seed=5)
RAGGED: Any = jhg.ragged_dot  # taken with arguments of other types than it declares
GATED: Any = jhg.gated_linear_unit


def per_group(function, sizes, *by_group):
    """Returns `function(*entries)`, (M, N), of each row's group; 0 for rows of no group."""
    rows, out, start = jnp.arange(M), jnp.zeros(()), 0
    for group in range(by_group[0].shape[0]):
        mine = (rows >= start) & (rows < start + sizes[group])
        out = jnp.where(mine[:, None], function(*(x[group] for x in by_group)), out)
        start = start + sizes[group]
    return out


def wide(x, w):
    return jnp.matmul(x, w, preferred_element_type=jnp.float32)


def layer(implementation, lhs, rhs, bias, scale):
    return jhg.ragged_dot(
        lhs, rhs, SIZES, bias=bias, activation="silu", epilogue=lambda y, s: y * s,
        epilogue_operands=(scale,), implementation=implementation,
    )  # fmt: skip


def reference(lhs, rhs, bias, scale):
    y = per_group(lambda w, b: jax.nn.silu(wide(lhs, w) + b) * scale, SIZES, rhs, bias)
    return y.astype(lhs.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("dtype", RESULTS)
def test_values_follow_jnp(dtype, implementation):
    args = [x.astype(dtype) for x in (LHS, RHS, BIAS, SCALE)]
    assert_close(jax.jit(partial(layer, implementation))(*args), jax.jit(reference)(*args))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_gradients_follow_jnp(implementation):
    args = [0.25 * x for x in (LHS, RHS, BIAS, SCALE)]
    weights = integers((M, N), seed=6)
    ours, theirs = (
        jax.jit(jax.grad(lambda *a, f=f: (f(*a) * weights).sum(), (0, 1, 2, 3)))(*args)
        for f in (partial(layer, implementation), reference)
    )
    assert_close(ours, theirs)


def test_gradients_of_16_bit_operands_come_in_16_bits():
    args = [x.astype(jnp.bfloat16) for x in (LHS, RHS, BIAS)]

    def loss(lhs, rhs, bias):
        y = jhg.ragged_dot(lhs, rhs, SIZES, bias=bias, activation="relu")
        return (y * integers(y.shape, y.dtype, seed=6)).sum()

    def plain(lhs, rhs, bias):
        y = per_group(lambda w, b: jax.nn.relu(lhs @ w + b), SIZES, rhs, bias)
        return (y * integers(y.shape, seed=6)).sum()

    ours = jax.jit(jax.grad(loss, (0, 1, 2)))(*args)
    theirs = jax.jit(jax.grad(plain, (0, 1, 2)))(LHS, RHS, BIAS)
    # Sums of small integers: exact in either.
    for x, y in zip(ours, theirs, strict=True):
        assert x.dtype == jnp.bfloat16
        np.testing.assert_array_equal(x.astype(np.float32), y)


@pytest.mark.slow
def test_the_epilogue_is_given_each_rows_own():
    seen = []

    def epilogue(y, scale, factor, row):
        seen.append((y.shape, scale.shape, factor.shape, row.shape))
        return y * scale + factor * row, jnp.sum(y * y, 1)

    scale, factor, row = BIAS[:, None], BIAS[:, :1, None], BIAS[0]
    first, second = jhg.ragged_dot(
        LHS, RHS, SIZES, epilogue=epilogue, epilogue_operands=(scale, factor, row)
    )
    assert seen[0] == ((M, N), (M, N), (M, 1), (N,))
    product = per_group(lambda w: LHS @ w, SIZES, RHS)
    expected = per_group(lambda w, s, f: LHS @ w * s + f * row, SIZES, RHS, BIAS, BIAS[:, :1])
    assert_close((first, second), (expected, jnp.sum(product * product, 1)))


def test_each_result_has_a_dtype():
    lhs, rhs = LHS.astype(jnp.bfloat16), RHS.astype(jnp.bfloat16)
    found = jhg.ragged_dot(
        lhs, rhs, SIZES, epilogue=lambda y: (y, 2 * y),
        preferred_element_type=(jnp.float32, jnp.float16),
    )  # fmt: skip
    assert [x.dtype.name for x in found] == ["float32", "float16"]
    assert jhg.ragged_dot(lhs, rhs, SIZES, activation="relu").dtype == jnp.bfloat16
    wide = jhg.ragged_dot(lhs, rhs, SIZES, activation="relu", preferred_element_type=jnp.float32)
    assert wide.dtype == jnp.float32


@pytest.mark.slow
def test_an_offset_picks_the_groups_of_this_device():
    sizes = jnp.asarray([2, 3, 1, 4], np.int32)
    rhs, bias = integers((4, K, N), seed=1), integers((4, N), seed=2)
    whole = per_group(lambda w, b: jnp.cos(LHS @ w + b), sizes, rhs, bias)

    def part(offset):
        own = slice(offset, offset + 2)
        return jhg.ragged_dot(
            LHS, rhs[own], sizes, group_offset=jnp.asarray(offset), bias=bias[own],
            activation=jnp.cos,
        )  # fmt: skip

    parts = part(0), part(2)
    assert_close(parts[0] + parts[1], whole)
    np.testing.assert_array_equal(parts[0][5:], 0)
    np.testing.assert_array_equal(parts[1][:5], 0)


FORMS: dict[str, Any] = {"stacked": jnp.stack((GATE, UP), 2), "pair": (GATE, UP)}


def gated_reference(x, weights, bias, sizes=SIZES):
    gate, up = weights if isinstance(weights, tuple) else (weights[:, :, 0], weights[:, :, 1])
    y = per_group(
        lambda g, u, b: jax.nn.silu(wide(x, g) + b[0]) * (wide(x, u) + b[1]),
        sizes, gate, up, bias,
    )  # fmt: skip
    return y.astype(x.dtype)


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_a_gated_unit_of_groups_follows_jnp(form, dtype, implementation):
    unit = partial(jhg.gated_linear_unit, group_sizes=SIZES, implementation=implementation)
    x, weights, bias = jax.tree.map(lambda x: x.astype(dtype), (LHS, FORMS[form], BIASES))
    ours = jax.jit(lambda *a: unit(*a[:2], bias=a[2]))(x, weights, bias)
    assert_close(ours, jax.jit(gated_reference)(x, weights, bias))
    pair = jax.jit(lambda *a: unit(*a[:2], bias=(a[2][:, 0], a[2][:, 1])))(x, weights, bias)
    assert_close(pair, ours)


@pytest.mark.slow
@pytest.mark.parametrize("save_preactivation", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_a_gated_unit_of_groups_follow_jnp(form, save_preactivation):
    def ours(x, weights, bias):
        return jhg.gated_linear_unit(
            x, weights, bias=bias, group_sizes=SIZES, save_preactivation=save_preactivation
        )

    ct = integers((M, N), seed=6)
    found, expected = (
        jax.jit(jax.grad(lambda *a, f=f: (f(*a) * ct).sum(), (0, 1, 2)))(
            0.25 * LHS, FORMS[form], BIASES
        )
        for f in (ours, gated_reference)
    )
    assert_close(found, expected)


@pytest.mark.slow
def test_vmap_of_a_gated_units_gradient():
    x, sizes = jnp.stack([LHS, 2 * LHS]) * 0.25, jnp.stack([SIZES, SIZES[::-1]])

    def gradients(f):
        def loss(x, weights, sizes):
            return (f(x, weights, sizes) ** 2).sum()

        mapped = jax.vmap(jax.grad(loss, (0, 1)), (0, None, 0))
        return jax.jit(mapped)(x, FORMS["pair"], sizes)

    ours = gradients(lambda x, w, s: jhg.gated_linear_unit(x, w, bias=BIASES, group_sizes=s))
    assert_close(ours, gradients(lambda x, w, s: gated_reference(x, w, BIASES, s)))


@pytest.mark.slow
def test_an_offset_of_a_gated_unit():
    def unit(own, offset):
        return jhg.gated_linear_unit(
            LHS, (GATE[own], UP[own]), bias=BIASES[own], group_sizes=SIZES, group_offset=offset
        )

    whole = gated_reference(LHS, FORMS["pair"], BIASES)
    assert_close(unit(slice(0, 2), 0) + unit(slice(2, 3), 2), whole)


def test_a_checkpoint_policy_saves_them():
    def loss(policy, x, w, v):
        @partial(jax.checkpoint, policy=policy)
        def mlp(x, w, v):
            y = jhg.ragged_dot(x, w, SIZES, activation="relu")
            return jhg.ragged_dot(y, v, SIZES)

        return (mlp(x, w, v) ** 2).sum()

    def products(policy):
        v = jnp.swapaxes(RHS, 1, 2)
        text = str(jax.make_jaxpr(jax.grad(partial(loss, policy), (0, 1, 2)))(LHS, RHS, v))
        return text.count("= hopper_fused["), text.count("= hopper_ragged_dot[")

    assert products(jax.checkpoint_policies.dots_saveable) == (1, 5)
    assert products(None) == (2, 5)


def bf16(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.bfloat16)


X, W, S = bf16(8, 4), bf16(3, 4, 5), jnp.zeros(3, jnp.int32)
ERRORS = [
    (lambda: RAGGED(X, W, S, bias=bf16(5)), ValueError,
     "ragged_dot: bias is bf16[5], expected (3, 5), a row for each matrix of rhs, bf16[3,4,5]. "
     "One for all groups? Pass jnp.broadcast_to(bias, (G, N)), or add it in epilogue"),
    (lambda: RAGGED(X, W, S, bias=bf16(2, 5)), ValueError,
     "ragged_dot: bias is bf16[2,5], expected (3, 5), a row for each matrix of rhs, bf16[3,4,5]"),
    (lambda: RAGGED(X, W, S, activation=3), TypeError,
     "ragged_dot: activation is a int, expected a function"),
    (lambda: RAGGED(X, W, S, epilogue=lambda y, b: y + b, epilogue_operands=(bf16(2, 1, 5),)),
     ValueError,
     "ragged_dot: epilogue_operands[0] is bf16[2,1,5], expected (3, 1, N) or (3, 1, 1), an "
     "entry for each group of bf16[3,4,5], or at most two axes, which broadcast to (M, N)"),
    (lambda: RAGGED(X, W, S, epilogue_operands=(bf16(5),)), ValueError,
     "ragged_dot: 1 epilogue_operands came without an epilogue, the function that takes them "
     "after the product"),
    (lambda: GATED(bf16(2, 8, 4), (W, W), group_sizes=S), ValueError,
     "gated_linear_unit: x is bf16[2,8,4], expected (M, K): its rows are in groups"),
    (lambda: GATED(X, (W, W), bias=bf16(2, 5), group_sizes=S), ValueError,
     "gated_linear_unit: bias is bf16[2,5], expected (3, 2, 5)"),
    (lambda: GATED(X, W, group_sizes=S), ValueError,
     "gated_linear_unit: weights is bf16[3,4,5], expected (G, K, 2, N): stack gate and up with "
     "jnp.stack((gate, up), 2), or pass the pair (gate, up)"),
    (lambda: GATED(X, (W, W), group_sizes=S[:2]), ValueError,
     "gated_linear_unit: G differs: weights is bf16[3,4,5], group_sizes is i32[2]"),
    (lambda: GATED(X, (W, W), group_sizes=S.astype(jnp.float32)), TypeError,
     "gated_linear_unit: group_sizes is f32[3], expected integers"),
    (lambda: GATED(X, (W[0], W[0]), group_offset=1), ValueError,
     "gated_linear_unit: group_offset came without group_sizes"),
]  # fmt: skip


@pytest.mark.parametrize("call, error, message", ERRORS)
def test_messages(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == message
