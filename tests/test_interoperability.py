"""Layers of Flax, Equinox and Haiku on this library's products: their own values and gradients.

A layer is a function of its parameters and an input, and takes ours in one of two ways: as the
product that it is made with, or by `accelerate`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from support.program_inspection import LAUNCH, integers, lowered, normal, products

import jax_hopper_gemm as jhg
from jax_hopper_gemm.testing.lowered import specs_of

X = (2, 32, 64)

dot_general = partial(jhg.dot_general, implementation="hopper")  # or an error says why not
einsum = partial(jhg.einsum, implementation="hopper")
DOT = {"dot_general": dot_general}
ATTENTION = {"qkv_dot_general": dot_general, "out_dot_general": dot_general}

ON_CPU = {
    "dot_general": jhg.dot_general,
    "dot_general_cls": lambda: jhg.dot_general,
    "einsum_op": jhg.einsum,
    "qkv_dot_general": jhg.dot_general,
    "out_dot_general": jhg.dot_general,
}


@dataclass(frozen=True)
class Layer:
    """A layer of another library.

    Attributes:
      make: returns, given a dtype and options, its function of parameters and input, and the
        parameters.
      options: those by which it takes our product; none where it has none to give.
      taken: its products that are ours with these options.
      all: its products.
    """

    make: Callable[..., tuple[Callable[..., Any], Any]]
    options: dict[str, Any]
    taken: int
    all: int


def of_nnx(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(dtype: Any, **options: Any) -> Any:
        module = make(dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0), **options)
        graph, state, rest = nnx.split(module, nnx.Param, ...)
        return lambda state, x: nnx.merge(graph, state, rest)(x), state

    return made


def of_linen(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(dtype: Any, **options: Any) -> Any:
        dtypes = {"dtype": dtype, "param_dtype": dtype}
        params = make(**dtypes).init(jax.random.key(0), jnp.zeros(X, dtype))
        module = make(**dtypes, **options)
        return lambda params, x: module.apply(params, x), params

    return made


def of_equinox(make: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    def made(dtype: Any) -> Any:
        equinox = pytest.importorskip("equinox", reason="needs the extra `test`")
        module = make(equinox.nn)(key=jax.random.key(0), dtype=dtype)
        params, static = equinox.partition(module, equinox.is_inexact_array)
        return lambda params, x: call(equinox.combine(params, static), x), params

    return made


def of_haiku(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(dtype: Any) -> Any:
        haiku = pytest.importorskip("haiku", reason="needs the extra `test`")
        transformed = haiku.without_apply_rng(haiku.transform(lambda x: make(haiku, x)))
        return transformed.apply, transformed.init(jax.random.key(0), jnp.zeros(X, dtype))

    return made


def haiku_attention(haiku: Any, x: Any) -> Any:
    weights = haiku.initializers.VarianceScaling()
    return haiku.MultiHeadAttention(4, 16, w_init=weights)(x, x, x)


LAYERS = {
    "nnx.Linear": Layer(of_nnx(partial(nnx.Linear, 64, 32)), DOT, 1, 1),
    "nnx.LinearGeneral": Layer(of_nnx(partial(nnx.LinearGeneral, 64, (4, 16))), DOT, 1, 1),
    "nnx.Einsum": Layer(
        of_nnx(partial(nnx.Einsum, "bti,ihd->bthd", (64, 2, 32), (2, 32))),
        {"einsum_op": einsum}, 1, 1,
    ),
    "nnx.MultiHeadAttention": Layer(
        of_nnx(partial(nnx.MultiHeadAttention, 4, 64, decode=False)), ATTENTION, 4, 6
    ),
    "linen.Dense": Layer(of_linen(partial(linen.Dense, 32)), DOT, 1, 1),
    "linen.Dense, class": Layer(
        of_linen(partial(linen.Dense, 32)), {"dot_general_cls": lambda: dot_general}, 1, 1
    ),
    "linen.DenseGeneral": Layer(of_linen(partial(linen.DenseGeneral, (4, 16))), DOT, 1, 1),
    "linen.Einsum": Layer(of_linen(partial(linen.Einsum, (64, 2, 32), "bti,ihd->bthd")), {}, 0, 1),
    "linen.MultiHeadDotProductAttention": Layer(
        of_linen(partial(linen.MultiHeadDotProductAttention, num_heads=4)), ATTENTION, 4, 6
    ),
    "equinox.nn.MLP": Layer(
        of_equinox(
            lambda nn: partial(nn.MLP, 64, 32, 128, 1),
            lambda layer, x: jax.vmap(jax.vmap(layer))(x),
        ), {}, 0, 2,
    ),
    "equinox.nn.MultiheadAttention": Layer(
        of_equinox(
            lambda nn: partial(nn.MultiheadAttention, 4, 64),
            lambda layer, x: jax.vmap(layer)(x, x, x),
        ), {}, 0, 6,
    ),
    "haiku.nets.MLP": Layer(of_haiku(lambda hk, x: hk.nets.MLP([128, 32])(x)), {}, 0, 2),
    "haiku.MultiHeadAttention": Layer(of_haiku(haiku_attention), {}, 0, 6),
}  # fmt: skip
TAKING = [name for name, layer in LAYERS.items() if layer.options]


def loss(function: Callable[..., Any], params: Any, x: Any) -> Any:
    return jnp.sum(function(params, x).astype("float32") ** 2)


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(partial(loss, function), (0, 1))


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize("name", TAKING)
def test_a_layer_made_with_our_product_launches_kernels(name: str):
    layer = LAYERS[name]
    function, params = layer.make(jnp.bfloat16, **layer.options)
    x = integers(X, "bfloat16")
    assert products(function, params, x) == (layer.taken, layer.all - layer.taken)
    assert lowered(with_gradients(function), params, x).count(LAUNCH) == 3 * layer.taken


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize("name", LAYERS)
def test_an_accelerated_layer_launches_kernels_for_all_its_products(name: str):
    layer = LAYERS[name]
    function, params = layer.make(jnp.bfloat16)
    x = integers(X, "bfloat16")
    assert products(function, params, x) == (0, layer.all)
    ours = jhg.accelerate(with_gradients(function), implementation="hopper")
    assert sum(spec.panels for spec in specs_of(ours, params, x)) == 3 * layer.all


@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients_are_those_of_the_layer(name: str):
    layer = LAYERS[name]
    theirs, params = layer.make(jnp.bfloat16)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    x = normal(X, jnp.bfloat16)
    expected = jax.jit(with_gradients(theirs))(params, x)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(expected[1][0]) if leaf.ndim > 1)

    def check(path: Any, found: Any, expected: Any) -> None:
        """Compares two arrays; XLA fuses, and so rounds, at other places."""
        if re.search(r"key.*bias", jax.tree_util.keystr(path)):
            return  # it adds the same to all logits of a query: its gradient is rounding alone
        found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
        bound = 8 * float(jnp.finfo(jnp.bfloat16).eps) * np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=0, atol=bound)

    fused = jax.jit(with_gradients(jhg.accelerate(theirs)))(params, x)
    jax.tree.map_with_path(check, fused, expected)
    if layer.options:
        ours, _ = layer.make(jnp.bfloat16, **{key: ON_CPU[key] for key in layer.options})
        assert products(ours, params, x)[0] == layer.taken
        jax.tree.map_with_path(check, jax.jit(with_gradients(ours))(params, x), expected)


def matmul_of(params: Any, x: Any) -> Any:
    """Returns two layers on plain arrays, as any library may call ours."""
    h = jhg.matmul(x, params["up"], bias=params["bias"], activation="gelu")
    return jhg.matmul(h, params["down"])


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_our_functions_run_inside_modules_of_equinox_and_haiku():
    equinox = pytest.importorskip("equinox", reason="needs the extra `test`")
    haiku = pytest.importorskip("haiku", reason="needs the extra `test`")
    params = {"up": integers((64, 32)), "bias": integers((32,)), "down": integers((32, 8))}
    x = integers((16, 64))

    class Module(equinox.Module):
        params: dict[str, jax.Array]

        def __call__(self, x: Any) -> Any:
            return matmul_of(self.params, x)

    def called(x: Any) -> Any:
        return matmul_of({key: haiku.get_parameter(key, p.shape, init=jnp.zeros)
                          for key, p in params.items()}, x)  # fmt: skip

    transformed = haiku.without_apply_rng(haiku.transform(called))
    expected = jax.grad(partial(loss, matmul_of))(params, x)
    of_module = equinox.filter_jit(equinox.filter_grad(lambda m, x: loss(lambda m, x: m(x), m, x)))
    found = of_module(Module(params), x)
    of_haiku = jax.jit(jax.grad(partial(loss, transformed.apply)))({"~": params}, x)
    for tree in (found.params, of_haiku["~"]):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-3), tree, expected)


@pytest.mark.slow
def test_an_optax_loop_trains_alike_on_our_products():
    x = normal((64, 8))
    y = jnp.sin(x).sum(axis=1, keepdims=True)
    weights = {"up": (8, 32), "bias": (32,), "down": (32, 1)}
    params = {key: normal(s) / 4 for key, s in weights.items()}
    optimizer = optax.adamw(1e-2)

    def trained(matmul: Callable[..., Any]) -> list[float]:
        def loss(params: Any) -> Any:
            hidden = jax.nn.gelu(matmul(x, params["up"]) + params["bias"])
            return jnp.mean((matmul(hidden, params["down"]) - y) ** 2)

        def step(carry: Any, _: Any) -> Any:
            params, state = carry
            value, gradients = jax.value_and_grad(loss)(params)
            updates, state = optimizer.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), value

        return jax.jit(lambda c: jax.lax.scan(step, c, length=100)[1])(
            (params, optimizer.init(params))
        )

    losses, expected = trained(jhg.matmul), trained(jnp.matmul)
    assert losses[-1] < 0.2 * losses[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
