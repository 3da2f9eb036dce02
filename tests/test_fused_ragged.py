"""Ragged products with an epilogue on the CPU: those of plain JAX, one group after the other."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import fused_models
from support.covering import ALL
from support.fused_models import (
    TRANSFORMS,
    assert_close,
    axes_of,
    everything,
    fused_dot_of,
    gate,
    gelu,
    normal,
    squared,
)
from support.program_inspection import step

from jax_hopper_gemm.gemm.groups import Groups
from jax_hopper_gemm.gemm.product import Options, Product
from jax_hopper_gemm.gemm.subscripts import Subscripts

T, K, N, G = 9, 4, 5, 3
SIZES = jax.device_put(np.array([2, 0, 5], np.int32))  # two rows belong to no group


def fused(function, lhs, rights, sizes, *operands, subscripts="mk,gkn->mn", groups=None, **options):
    rights = rights if isinstance(rights, tuple) else (rights,)
    arguments = {name: options.pop(name) for name in ("in_place", "out_dtypes") if name in options}
    settings: dict[str, Any] = {"preferred_element_type": jnp.result_type(lhs, *rights)}
    product = Product(
        Subscripts.parse(subscripts), Options(**settings | options),
        groups=groups or Groups.plain(rights[0].shape[0]),
    )  # fmt: skip
    return fused_dot_of(function, (lhs, *rights), operands, product, sizes=sizes, **arguments)


def grouped(function, sizes, *by_group):
    """Returns `function(group's entries...)` of each row's group, rows of no group 0."""
    row, start, out = jnp.arange(T), 0, jnp.zeros(())
    for group in range(G):
        mine = (row >= start) & (row < start + sizes[group])
        found = function(*(x[group] for x in by_group))
        out = jnp.where(mine[:, None], found, out)
        start = start + sizes[group]
    return out


# Each model: ours and plain JAX of the same arguments.


def gelu_mlp(options, x, w1, b1, w2, b2, sizes=SIZES):
    y = fused(lambda acc, b: gelu(acc + b), x, w1, sizes, b1[:, None], **options)
    return fused(lambda acc, b: acc + b, y, w2, sizes, b2[:, None], **options)


def plain_gelu_mlp(x, w1, b1, w2, b2, sizes=SIZES):
    return grouped(lambda w1, b1, w2, b2: gelu(x @ w1 + b1) @ w2 + b2, sizes, w1, b1, w2, b2)


def pair(options, x, w1, w2, b, sizes=SIZES):
    return fused(lambda a, c, b: gate(a + b, c), x, (w1, w2), sizes, b[:, None], **options)


def plain_pair(x, w1, w2, b, sizes=SIZES):
    return grouped(lambda w1, w2, b: gate(x @ w1 + b, x @ w2), sizes, w1, w2, b)


def stacked(options, x, w, sizes=SIZES):
    return fused(gate, x, w, sizes, subscripts="mk,gkcn->mn", **options)


def plain_stacked(x, w, sizes=SIZES):
    return grouped(lambda w: gate(x @ w[:, 0], x @ w[:, 1]), sizes, w)


def several(options, x, w, b, r, s, t, sizes=SIZES):
    """All kinds of operands, weights (G, N, K), and sums of the results."""

    def function(acc, b, r, s, t):
        y = jnp.exp(-jnp.square(acc * s + b)) + r * t
        return y, jnp.sin(acc)

    y, sine = fused(
        function, x, w, sizes, b, r, s[:, None, None], t[:, None],
        subscripts="mk,gnk->mn", **options,
    )  # fmt: skip
    return y * y.sum(0) + sine


def plain_several(x, w, b, r, s, t, sizes=SIZES):
    acc = grouped(lambda w: x @ w.T, sizes, w)
    scale = grouped(lambda s: jnp.broadcast_to(s, (T, 1)), sizes, s)
    y = jnp.exp(-jnp.square(acc * scale + b)) + r * t[:, None]
    y = grouped(lambda _: y, sizes, w)
    return y * y.sum(0) + jnp.sin(acc)


MODELS: dict[str, Any] = {
    "gelu": (gelu_mlp, plain_gelu_mlp, [(T, K), (G, K, N), (G, N), (G, N, 2), (G, 2)]),
    "pair": (pair, plain_pair, [(T, K), (G, K, N), (G, K, N), (G, N)]),
    "stacked": (stacked, plain_stacked, [(T, K), (G, K, 2, N)]),
    "several": (several, plain_several, [(T, K), (G, N, K), (N,), (T, N), (G,), (T,)]),
}


model = partial(fused_models.model, models=MODELS)


def value_and_gradients(function):
    """Returns `function` and the gradients of its square, compiled once for all sizes."""

    def both(sizes, *args):
        of_sizes = partial(function, sizes=sizes)
        return of_sizes(*args), jax.grad(partial(squared, of_sizes), everything(args))(*args)

    return jax.jit(both)


@cache
def plain_value_and_gradients(name):
    return value_and_gradients(MODELS[name][1])


@cache
def plain_derivative(transform, name):
    _, plain, args = model(name)
    return jax.jit(lambda *a: TRANSFORMS[transform](plain, list(a)))(*args)


def clipped(sizes):
    """Returns the rows that are left of each size."""
    ends = np.minimum(np.cumsum(np.maximum(sizes, 0)), T)
    return np.diff(ends, prepend=0).astype(np.int32)


CASES = [(transform, "pair", True) for transform in TRANSFORMS]
CASES += [
    (transform, name, policy)
    for transform, name in (
        ("grad", "gelu"), ("grad", "stacked"), ("grad", "several"), ("hessian", "several"),
        ("checkpoint", "stacked"), ("checkpoint", "several"),
    )
    for policy in (True, False)
]  # fmt: skip


@pytest.mark.parametrize("transform, name, save_preactivation", CASES)
def test_derivatives_are_those_of_plain_jax(transform, name, save_preactivation):
    ours, _, args = model(name, {"save_preactivation": save_preactivation})
    run = TRANSFORMS[transform]
    same = "grad" if transform.startswith("checkpoint") else transform
    assert_close(jax.jit(lambda *a: run(ours, list(a)))(*args), plain_derivative(same, name))


@pytest.mark.slow
def test_sizes_are_clipped():
    ours, _, args = model("pair")
    ours = value_and_gradients(ours)
    for sizes in ([9, 0, 0], [0, 0, 0], [-3, 4, 1], [4, 9, 2], [3, 3, 3]):
        expected = plain_value_and_gradients("pair")(clipped(sizes), *args)
        assert_close(ours(jnp.asarray(sizes, np.int32), *args), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_xla_computes_the_same_without_a_kernel(name):
    ours, _, args = model(name, {"implementation": "xla"})
    gradient = jax.jit(lambda *a: TRANSFORMS["grad"](ours, a)).trace(*args)
    jaxpr = str(gradient.jaxpr)
    assert "hopper_fused" not in jaxpr and "implementation=None" not in jaxpr
    assert_close(gradient.lower().compile()(*args), plain_derivative("grad", name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gelu", "pair", "stacked"])
def test_16_bit_gradients_are_near_those_of_float32(name):
    ours, _, args = model(name, dtype="bfloat16")
    ours = jax.jit(jax.grad(partial(squared, ours), everything(args)))
    exact = [np.asarray(x, np.float32) for x in args]
    _, plain = plain_value_and_gradients(name)(SIZES, *exact)
    for found, expected, arg in zip(ours(*args), plain, args, strict=True):
        assert found.dtype == arg.dtype
        # A few roundings of 2^-9 on the way, each of values of the gradient's size.
        error = np.abs(np.float32(found) - np.float32(expected)).max()
        assert error <= 8 * 2**-9 * np.abs(expected).max()


@pytest.mark.slow
def test_rows_of_no_group_are_zero_and_have_no_gradient():
    x, w, b = normal(T, K), normal(G, K, N), normal(G, N)

    def layer(x, w, b):
        return fused(lambda acc, b: jnp.cos(acc) + b, x, w, SIZES, b[:, None])

    run, cotangent = jax.jit(partial(step, layer)), np.ones((T, N), np.float32)
    y, gradients = run(cotangent, x, w, b)
    np.testing.assert_array_equal(np.asarray(y)[7:], 0)
    np.testing.assert_array_equal(np.asarray(gradients[0])[7:], 0)
    np.testing.assert_array_equal(gradients[2], np.asarray(SIZES)[:, None] * np.ones((G, N)))
    cotangent[7:] = np.nan
    _, other = run(cotangent, x, w, b)
    jax.tree.map(np.testing.assert_array_equal, gradients, other)


@pytest.mark.slow
def test_a_gradient_by_group_is_summed_in_float32():
    rows = 4096
    x, w = np.zeros((rows, 2), jnp.bfloat16), np.zeros((2, 2, 2), jnp.bfloat16)
    b, sizes = np.zeros((2, 2), np.float32), np.array([rows - 3, 3], np.int32)

    def loss(b):
        y = fused(lambda acc, b: acc + b, x, w, sizes, b[:, None])
        return y.astype(jnp.float32).sum()

    # In bfloat16 a sum of ones ends at 256.
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(b), [[rows - 3] * 2, [3] * 2])


MAPPED = [
    (name, axes, sizes)
    for name in MODELS
    for axes, sizes in [
        # The products of "gelu" and their operands are of the kinds of "pair".
        *((axes, False) for axes in axes_of(
            MODELS[name][2], *({i} for i in range(1 if name == "gelu" else len(MODELS[name][2]))),
        )),
        *((axes, True) for axes in axes_of(MODELS[name][2], {0, 1}, *(
            (set(), set(range(len(MODELS[name][2])))) if ALL or name == "pair" else ()
        ))),
    ]
]  # fmt: skip
EACH = jnp.asarray([[2, 0, 5], [0, 1, 0], [4, 4, 4]], np.int32)


@pytest.mark.pure
@pytest.mark.slow
@pytest.mark.parametrize(
    "name, axes, sizes, save_preactivation", [(*case, i % 2 == 0) for i, case in enumerate(MAPPED)]
)
def test_vmap_and_derivatives_commute(name, axes, sizes, save_preactivation):
    ours, _, args = model(name, {"save_preactivation": save_preactivation})
    single = [[x, x + 1, 2 * x] for x in args]
    args = [
        x if axis is None else jnp.stack(each, axis)
        for x, each, axis in zip(args, single, axes, strict=True)
    ]
    given = EACH if sizes else SIZES

    @jax.jit
    def both(*args):
        def gradient(*a):
            *a, own = a
            return jax.grad(partial(squared, partial(ours, sizes=own)), everything(a))(*a)

        mapped_axes = (*axes, 0 if sizes else None)
        mapped = jax.vmap(lambda *a: ours(*a[:-1], sizes=a[-1]), mapped_axes)
        of_mapped = jax.grad(lambda *a: squared(mapped, *a, given), everything(args))(*args)
        return jax.vmap(gradient, mapped_axes)(*args, given), of_mapped

    each = [
        plain_value_and_gradients(name)(
            clipped(EACH[i] if sizes else SIZES),
            *(x[0 if axis is None else i] for x, axis in zip(single, axes, strict=True)),
        )[1]
        for i in range(len(EACH))
    ]
    by_argument = list(zip(*each, strict=True))
    expected = (
        tuple(map(np.stack, by_argument)),
        tuple(
            np.sum(x, 0) if axis is None else np.stack(x, axis)
            for x, axis in zip(by_argument, axes, strict=True)
        ),
    )
    assert_close(both(*args), expected)


@pytest.mark.slow
def test_vmap_of_vmap():
    x, w, b = normal(2, 3, T, K), normal(3, G, K, N), normal(2, G, N)
    sizes = jnp.stack([EACH, EACH[::-1]])

    def mapped(f):
        inner = jax.vmap(f, (0, 0, None, 0))
        return jax.vmap(inner, (0, None, 0, 0))

    def layer(x, w, b, sizes):
        return fused(lambda acc, b: jnp.tanh(acc + b), x, w, sizes, b[:, None])

    def plain(x, w, b, sizes):
        ends = jnp.minimum(jnp.cumsum(sizes), T)
        return grouped(lambda w, b: jnp.tanh(x @ w + b), jnp.diff(ends, prepend=0), w, b)

    found, expected = (
        jax.jit(jax.value_and_grad(lambda *a, f=f: squared(mapped(f), *a, sizes), (0, 1, 2)))(
            x, w, b
        )
        for f in (layer, plain)
    )
    assert_close(found, expected)


def products(function, *args) -> int:
    text = str(jax.make_jaxpr(function)(*args))
    return sum(text.count(f"= {name}[") for name in ("hopper_ragged_dot", "hopper_fused")) + (
        2 * text.count("= hopper_gate_up[")
    )


def test_nothing_of_the_product_is_kept_for_a_bias():
    x, w, b = normal(T, K), normal(G, K, N), normal(G, N)
    layer = partial(fused, lambda acc, b: acc + b)
    _, residuals = jax.eval_shape(
        lambda x, w, b: jax.vjp(lambda x, w, b: layer(x, w, SIZES, b[:, None]), x, w, b), x, w, b
    )
    kept = [leaf.shape for leaf in jax.tree.leaves(residuals) if leaf.dtype == jnp.float32]
    assert sorted(kept) == sorted([(T, K), (G, K, N)])


def test_recompute_keeps_operands_alone():
    x, w = normal(T, K), normal(G, K, N)
    for save_preactivation, expected in {
        True: {(T, K), (T, N), (G, K, N)},
        False: {(T, K), (G, K, N)},
    }.items():
        layer = partial(fused, jnp.tanh, save_preactivation=save_preactivation)
        _, back = jax.eval_shape(
            lambda x, w, layer=layer: jax.vjp(lambda x, w: layer(x, w, SIZES), x, w), x, w
        )
        leaves = jax.tree.leaves(back)
        assert {leaf.shape for leaf in leaves if leaf.dtype == jnp.float32} == expected


def test_an_operand_without_a_derivative_costs_no_product():
    x, w, b = normal(T, K), normal(G, K, N), normal(N)
    layer = partial(fused, lambda acc, b: jnp.tanh(acc + b))

    def loss(x, w, b):
        return squared(layer, x, w, SIZES, b)

    assert products(jax.grad(loss, 2), x, w, b) == 1
    assert products(jax.grad(loss, 1), x, w, b) == 2
    assert products(jax.grad(loss, (0, 1, 2)), x, w, b) == 3


def test_an_output_that_is_the_product_is_not_stored_twice():
    x, w = normal(T, K, dtype="bfloat16"), normal(G, K, N, dtype="bfloat16")

    def loss(x, w):
        before, after = fused(lambda acc: (acc.astype(jnp.bfloat16), jnp.tanh(acc)), x, w, SIZES)
        return (before * after).astype(jnp.float32).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(x, w)
    (equation,) = [e for e in jaxpr.eqns if e.primitive.name == "hopper_fused"]
    assert len(equation.outvars) == 2


@pytest.mark.slow
def test_closed_over_arrays_are_operands():
    x, w, r = normal(T, K), normal(G, K, N), normal(T, N)

    def loss(r):
        return squared(lambda x, w: fused(lambda acc: jnp.tanh(acc + r), x, w, SIZES), x, w)

    expected = jax.grad(
        lambda r: squared(lambda x: grouped(lambda w: jnp.tanh(x @ w + r), SIZES, w), x)
    )(r)
    assert_close(jax.grad(loss)(r), expected)


@pytest.mark.slow
def test_scan_carries_epilogues():
    weights, x = 0.5 * normal(3, G, K, K), normal(T, K, seed=1)

    def loss(layer, weights, x):
        step = jax.checkpoint(lambda x, w: (layer(x, w), None))
        return jax.lax.scan(step, x, weights)[0].sum()

    ours, theirs = (
        jax.jit(jax.grad(partial(loss, f), (0, 1)))(weights, x)
        for f in (
            lambda x, w: fused(gelu, x, w, SIZES),
            lambda x, w: grouped(lambda w: gelu(x @ w), SIZES, w),
        )
    )
    assert_close(ours, theirs)
