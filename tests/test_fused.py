"""Products with an epilogue on the CPU: values, derivatives and vmap are those of plain JAX."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.program_inspection import integers

from jax_hopper_gemm.gemm.product import Options, Product
from jax_hopper_gemm.gemm.subscripts import Subscripts
from jax_hopper_gemm.primitives.fused_dot import fused_dot


def fused(function, lhs, rights, *operands, subscripts="mk,kn->mn", out_sharding=None, **options):
    rights = rights if isinstance(rights, tuple) else (rights,)
    arguments = {name: options.pop(name) for name in ("in_place", "out_dtypes") if name in options}
    settings: dict[str, Any] = {"preferred_element_type": jnp.result_type(lhs, *rights)}
    product = Product(Subscripts.parse(subscripts), Options(**settings | options), out_sharding)
    return fused_dot(function, lhs, rights, operands, product, **arguments)


def normal(*shape: int, seed: int = 0, dtype: Any = "float32") -> jax.Array:
    values = np.random.default_rng([seed, *shape]).normal(size=shape)
    return jnp.asarray(values).astype(dtype)


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(0.8 * (x + 0.04 * x**3)))


def gate(a, b):
    return a * jax.nn.sigmoid(a) * b


# Each model: ours and plain JAX of the same arguments.


def gelu_mlp(options, x, w1, b1, w2, b2):
    y = fused(lambda acc, b: gelu(acc + b), x, w1, b1, **options)
    return fused(lambda acc, b: acc + b, y, w2, b2, **options)


def plain_gelu_mlp(x, w1, b1, w2, b2):
    return gelu(x @ w1 + b1) @ w2 + b2


def pair(options, x, w1, w2):
    return fused(gate, x, (w1, w2), **options)


def plain_pair(x, w1, w2):
    return gate(x @ w1, x @ w2)


def stacked(options, x, w):
    return fused(gate, x, w, subscripts="mk,kcn->mn", **options)


def plain_stacked(x, w):
    both = jnp.einsum("mk,kcn->mcn", x, w)
    return gate(both[:, 0], both[:, 1])


def several(options, x, w, b, r, s):
    def function(acc, b, r, s):
        y = jnp.exp(-jnp.square(acc * s + b)) + r
        return y, y.sum(0), jnp.sin(acc)

    y, total, sine = fused(function, x, w, b, r, s, subscripts="btk,kn->btn", **options)
    return y * total + sine


def plain_several(x, w, b, r, s):
    acc = jnp.einsum("btk,kn->btn", x, w)
    y = jnp.exp(-jnp.square(acc * s + b)) + r
    return y * y.sum(0) + jnp.sin(acc)


MODELS = {
    "gelu": (gelu_mlp, plain_gelu_mlp, [(3, 4), (4, 5), (5,), (5, 2), (2,)]),
    "pair": (pair, plain_pair, [(3, 4), (4, 5), (4, 5)]),
    "stacked": (stacked, plain_stacked, [(3, 4), (4, 2, 5)]),
    "several": (several, plain_several, [(2, 3, 4), (4, 5), (5,), (2, 3, 5), ()]),
}


def model(
    name: str, options: dict[str, Any] | None = None, dtype: Any = "float32", models: Any = MODELS
):
    ours, plain, shapes = models[name]
    arrays = [0.5 * normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
    return partial(ours, options or {}), plain, arrays


def assert_close(ours, theirs, tolerance: float = 1e-5) -> None:
    """Float32 throughout: what differs is the order of sums, and of a few products."""

    def check(x, y):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        scale = max(1.0, float(np.abs(y).max(initial=0)))
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * scale)

    jax.tree.map(check, ours, theirs)


def squared(function, *args):
    return (function(*args) ** 2).sum()


def everything(args):
    return tuple(range(len(args)))


TRANSFORMS = {
    "value": lambda f, args: f(*args),
    "grad": lambda f, args: jax.grad(partial(squared, f), everything(args))(*args),
    "grad of one": lambda f, args: jax.grad(partial(squared, f), len(args) - 1)(*args),
    "jacfwd": lambda f, args: jax.jacfwd(f, everything(args))(*args),
    "jacrev": lambda f, args: jax.jacrev(f, everything(args))(*args),
    "hessian": lambda f, args: jax.hessian(partial(squared, f), everything(args))(*args),
    "jacrev of jacrev": lambda f, args: jax.jacrev(jax.grad(partial(squared, f), 1), 1)(*args),
    "grad of grad": lambda f, args: jax.grad(
        lambda *a: sum((g**2).sum() for g in jax.grad(partial(squared, f), everything(args))(*a)),
        everything(args),
    )(*args),
    "jvp of grad": lambda f, args: jax.jvp(
        jax.grad(partial(squared, f), everything(args)), args, args
    ),
    "linearize": lambda f, args: jax.linearize(f, *args)[1](*args),
    "linear_transpose of vjp": lambda f, args: jax.linear_transpose(
        lambda ct: jax.vjp(f, *args)[1](ct), f(*args)
    )(tuple(args)),
    "checkpoint": lambda f, args: jax.grad(partial(squared, jax.checkpoint(f)), everything(args))(
        *args
    ),
    "checkpoint, all saved": lambda f, args: jax.grad(
        partial(squared, jax.checkpoint(f, policy=jax.checkpoint_policies.everything_saveable)),
        everything(args),
    )(*args),
}


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
    ours, plain, args = model(name)
    for run in (TRANSFORMS["value"], TRANSFORMS["grad"]):
        assert_close(run(ours, args), run(plain, args))


def test_xla_is_plain_jax():
    x, w = normal(3, 4), normal(4, 5)
    layer = partial(fused, jnp.tanh, implementation="xla")
    assert "hopper" not in str(jax.make_jaxpr(jax.grad(partial(squared, layer)))(x, w))
    assert_close(layer(x, w), jnp.tanh(x @ w))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gelu", "pair", "stacked"])
def test_16_bit_gradients_are_near_those_of_float32(name):
    ours, plain, args = model(name, dtype="bfloat16")
    exact = [x.astype(jnp.float32) for x in args]
    run = TRANSFORMS["grad"]
    for found, expected, arg in zip(run(ours, args), run(plain, exact), args, strict=True):
        assert found.dtype == arg.dtype
        # A few roundings of 2^-9 on the way, each of values of the gradient's size.
        error = np.abs(found.astype(np.float32) - expected).max()
        assert error <= 8 * 2**-9 * np.abs(expected).max()


def axes_of(shapes, *places):
    """Yields for each set of places the axes along which arguments are mapped."""
    for chosen in places:
        yield [min(len(shapes[i]), 1) if i in chosen else None for i in range(len(shapes))]


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
        x if axis is None else jnp.stack([x, x + 1, 2 * x], axis)
        for x, axis in zip(args, axes, strict=True)
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
            jax.grad(partial(loss, layer, number), wrt)
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
    found = fused(function, x, w, out_dtypes=("float32", None, None, None, "float16"))
    names = [y.dtype.name for y in found]
    assert names == ["float32", "float16", "float32", "int32", "float16"]
    with pytest.raises(ValueError, match="names 1 dtypes, and the epilogue returns 5 arrays"):
        fused(function, x, w, out_dtypes=("float32",))


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
