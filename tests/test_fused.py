"""Products with an epilogue on the CPU: values, derivatives and vmap are those of plain JAX."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.fused_models import (
    MODELS,
    TRANSFORMS,
    assert_close,
    axes_of,
    everything,
    fused,
    gelu,
    model,
    normal,
    squared,
)
from support.program_inspection import integers

CASES = [(transform, name, True) for transform in TRANSFORMS for name in ("gelu", "pair")]
CASES += [
    (transform, name, policy)
    for transform in ("grad", "hessian", "checkpoint")
    for name, policy in (("gelu", False), ("pair", False), ("several", False),
                         ("stacked", True), ("stacked", False), ("several", True))
]  # fmt: skip


@pytest.mark.parametrize("transform, name, save_preactivation", CASES)
def test_derivatives_are_those_of_plain_jax(transform, name, save_preactivation):
    ours, _, args = model(name, {"save_preactivation": save_preactivation})
    run = TRANSFORMS[transform]
    assert_close(jax.jit(lambda *a: run(ours, list(a)))(*args), plain_derivative(transform, name))


@cache
def plain_derivative(transform, name):
    _, plain, args = model(name)
    return jax.jit(lambda *a: TRANSFORMS[transform](plain, list(a)))(*args)


@pytest.mark.parametrize("name", MODELS)
def test_values_are_the_same_bits(name):
    ours, plain, args = model(name)
    np.testing.assert_array_equal(jax.jit(ours)(*args), jax.jit(plain)(*args))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_nothing_needs_jit(name):
    ours, _, args = model(name)
    for transform in ("value", "grad"):
        assert_close(TRANSFORMS[transform](ours, args), plain_derivative(transform, name))


def test_xla_is_plain_jax():
    x, w = normal(3, 4), normal(4, 5)
    layer = partial(fused, jnp.tanh, implementation="xla")
    assert "hopper" not in str(jax.make_jaxpr(jax.grad(partial(squared, layer)))(x, w))
    assert_close(layer(x, w), jnp.tanh(x @ w))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gelu", "pair", "stacked"])
def test_16_bit_gradients_are_near_those_of_float32(name):
    ours, plain, args = model(name, dtype="bfloat16")
    exact = [np.asarray(x, np.float32) for x in args]
    gradients = (
        jax.jit(lambda *a, f=f: TRANSFORMS["grad"](f, a))(*of)
        for f, of in ((ours, args), (plain, exact))
    )
    for found, expected, arg in zip(*gradients, args, strict=True):
        assert found.dtype == arg.dtype
        # A few roundings of 2^-9 on the way, each of values of the gradient's size.
        error = np.abs(np.float32(found) - np.float32(expected)).max()
        assert error <= 8 * 2**-9 * np.abs(expected).max()


MAPPED = [
    (name, axes)
    for name in MODELS
    for axes in axes_of(
        MODELS[name][2],
        *[{i} for i in range(len(MODELS[name][2]))],
        set(range(len(MODELS[name][2]))),
    )
]


@pytest.mark.parametrize("index, name, axes", [(i, *case) for i, case in enumerate(MAPPED)])
def test_vmap_and_derivatives_commute(index, name, axes):
    ours, plain, args = model(name, {"save_preactivation": index % 2 == 0})
    args = [
        x if axis is None else np.stack([x, x + 1, 2 * x], axis)
        for x, axis in zip(map(np.asarray, args), axes, strict=True)
    ]

    def mapped_gradient(f):
        return jax.vmap(jax.grad(partial(squared, f), everything(args)), axes)(*args)

    def gradient_of_mapped(f):
        return jax.grad(lambda *a: squared(jax.vmap(f, axes), *a), everything(args))(*args)

    for transform in (mapped_gradient, gradient_of_mapped):
        assert_close(jax.jit(transform, static_argnums=0)(ours),
                     jax.jit(transform, static_argnums=0)(plain))  # fmt: skip


def products(function, *args) -> int:
    return str(jax.make_jaxpr(function)(*args)).count("= hopper_")


def test_nothing_of_the_product_is_kept_for_a_bias():
    x, w, b = normal(3, 4), normal(4, 5), normal(5)
    layer = partial(fused, lambda acc, b: acc + b)
    _, residuals = jax.eval_shape(lambda *a: jax.vjp(layer, *a), x, w, b)
    kept = [leaf.shape for leaf in jax.tree.leaves(residuals)]
    assert sorted(kept) == [(3, 4), (4, 5)]


def test_recompute_keeps_operands_alone():
    x, w = normal(3, 4), normal(4, 5)
    for save_preactivation, expected in {
        True: [(3, 4), (3, 5), (4, 5)],
        False: [(3, 4), (4, 5)],
    }.items():
        layer = partial(fused, jnp.tanh, save_preactivation=save_preactivation)
        _, back = jax.eval_shape(lambda *a, layer=layer: jax.vjp(layer, *a), x, w)
        kept = {leaf.shape for leaf in jax.tree.leaves(back)}
        assert sorted(kept) == expected


def test_an_operand_without_a_derivative_costs_no_product():
    x, w, b = normal(3, 4), normal(4, 5), normal(5)
    layer = partial(fused, lambda acc, b: jnp.tanh(acc + b))
    assert products(jax.grad(partial(squared, layer), 2), x, w, b) == 1
    assert products(jax.grad(partial(squared, layer), 1), x, w, b) == 2
    assert products(jax.grad(partial(squared, layer), (0, 1, 2)), x, w, b) == 3


def test_no_gradient_is_taken_of_a_result_without_a_derivative():
    x, w, v, wrt = normal(3, 4), normal(4, 5), normal(5, 6), (0, 1, 2)

    def rounded(acc):
        return acc, jnp.sign(acc), acc + jax.lax.stop_gradient(jnp.round(acc) - acc)

    def loss(layer, number, x, w, v):
        return squared(partial(fused, lambda acc: acc), layer(x, w)[number], v)

    for number, count in enumerate((2 + 4, 2 + 1, 2 + 4)):  # forwards, and gradients
        ours, theirs = (
            jax.jit(jax.grad(partial(loss, layer, number), wrt))
            for layer in (partial(fused, rounded), lambda x, w: rounded(x @ w))
        )
        assert_close(ours(x, w, v), theirs(x, w, v))
        assert products(ours, x, w, v) == count


def test_a_stacked_operand_has_one_product_for_each_gradient():
    ours, _, args = model("stacked")
    assert products(jax.grad(partial(squared, ours), (0, 1)), *args) == 3


def test_closed_over_arrays_are_operands():
    x, w, b = normal(3, 4), normal(4, 5), normal(5)

    def loss(b):
        return squared(lambda x, w: fused(lambda acc: jnp.tanh(acc + b), x, w), x, w)

    expected = jax.grad(lambda b: squared(lambda x: jnp.tanh(x @ w + b), x))(b)
    assert_close(jax.grad(loss)(b), expected)
    assert_close(jax.jit(jax.grad(loss))(b), expected)
    table = np.arange(5.0, dtype=np.float32)
    assert_close(fused(lambda acc: acc * table, x, w), (x @ w) * table)


def test_dtypes_of_results():
    x, w = normal(3, 4, dtype="bfloat16"), normal(4, 5, dtype="bfloat16")

    def function(acc):
        assert acc.dtype == jnp.float32
        return acc, acc.astype(jnp.float16), acc.sum(0), jnp.argmax(acc, 1), acc

    found = fused(function, x, w)
    names = [y.dtype.name for y in found]
    assert names == ["bfloat16", "float16", "float32", "int32", "bfloat16"]
    wanted = ("float32", "float16", "float32", "int32", "float16")
    found = fused(function, x, w, out_dtypes=wanted)
    names = [y.dtype.name for y in found]
    assert names == [*wanted]


def test_the_product_is_rounded_once():
    x, w = normal(8, 64, dtype="bfloat16"), normal(64, 8, dtype="bfloat16")
    exact = jnp.matmul(x, w, preferred_element_type=jnp.float32)
    found = jax.jit(partial(fused, lambda acc: acc - jnp.round(acc)))(x, w)
    np.testing.assert_array_equal(found, (exact - jnp.round(exact)).astype(jnp.bfloat16))


@pytest.mark.slow
def test_wider_products_keep_their_dtype():
    with jax.enable_x64(True):
        x, w = normal(3, 4, dtype="float64"), normal(4, 5, dtype="float64")
        layer = partial(fused, jnp.tanh)
        assert_close(layer(x, w), jnp.tanh(x @ w), 1e-14)
        assert_close(
            jax.grad(partial(squared, layer))(x, w),
            jax.grad(partial(squared, lambda x, w: jnp.tanh(x @ w)))(x, w),
            1e-14,
        )
        z = (x + 1j * x).astype(jnp.complex128)
        assert_close(fused(jnp.sin, z, w.astype(z.dtype)), jnp.sin(z @ w), 1e-13)


def test_masks_and_indices_have_no_derivatives():
    x, w, mask = integers((3, 4)), integers((4, 5), seed=1), jnp.arange(5) % 2 == 0

    def layer(x, w, mask):
        def function(acc, mask):
            return jnp.where(mask, acc, 0.0), jnp.argmax(acc, 1)

        y, best = fused(function, x, w, mask)
        return y * best[:, None]

    def plain(x, w, mask):
        acc = x @ w
        return jnp.where(mask, acc, 0.0) * jnp.argmax(acc, 1)[:, None]

    gradients = [jax.grad(partial(squared, f), (0, 1))(x, w, mask) for f in (layer, plain)]
    assert_close(*gradients)


@pytest.mark.parametrize("name", MODELS)
def test_shard_map_runs_each_part_and_sums_gradients(name):
    ours, plain, args = model(name)
    args[0] = jnp.concatenate([args[0]] * 4)
    if name == "several":
        args[3] = jnp.concatenate([args[3]] * 4)
    specs = tuple(
        P("x") if i == 0 or (name, i) == ("several", 3) else P() for i in range(len(args))
    )
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))

    def mapped(f):
        return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("x"))

    found, expected = (
        jax.jit(jax.value_and_grad(partial(squared, mapped(f)), everything(args)))(*args)
        for f in (ours, plain)
    )
    assert_close(found, expected)


def test_explicit_axes_pass_through():
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x = jax.reshard(normal(8, 4), P("x", None))
        w = jax.reshard(normal(4, 6, seed=1), P(None, "y"))
        b = jax.reshard(normal(6, seed=2), P("y"))

        def layer(x, w, b):
            return fused(lambda acc, b: jnp.tanh(acc + b), x, w, b)

        def plain(x, w, b):
            return jnp.tanh(x @ w + b)

        ours, theirs = (jax.jit(f)(x, w, b) for f in (layer, plain))
        assert jax.typeof(ours) == jax.typeof(theirs)
        gradients = [
            jax.jit(jax.grad(partial(squared, f), (0, 1, 2)))(x, w, b) for f in (layer, plain)
        ]
        for ours, theirs in zip(*gradients, strict=True):
            assert jax.typeof(ours) == jax.typeof(theirs)
        assert_close(*gradients)


def test_scan_carries_epilogues():
    weights, x = 0.5 * normal(3, 4, 4), normal(2, 4, seed=1)

    def loss(layer, weights, x):
        step = jax.checkpoint(lambda x, w: (layer(x, w), None))
        return jax.lax.scan(step, x, weights)[0].sum()

    ours, theirs = (
        jax.jit(jax.grad(partial(loss, f), (0, 1)))(weights, x)
        for f in (partial(fused, gelu), lambda x, w: gelu(x @ w))
    )
    assert_close(ours, theirs)
