"""Graphs as JAX functions: the numbers of the function they came from, and the same graph again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import nn
from support.program_inspection import normal

from jax_hopper_gemm.fusion import evaluate, fuse

EXTENTS = {"b": 2, "m": 32, "n": 64}
half, single = jnp.bfloat16, jnp.float32


def gelu_gradient(y: Any, z: Any) -> Any:
    (d,) = jax.vjp(nn.gelu, z.astype(single))[1](y)
    return d.astype(half), d.sum((0, 1))


@jax.custom_jvp
def exp_neg_sq(y: Any) -> Any:
    """Has the name of a function of JAX that is written in a simpler form."""
    return jnp.cos(y)


exp_neg_sq.defjvps(lambda tangent, ans, y: -tangent * jnp.sin(y))


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "bias": (lambda y, c: nn.relu(y + c).astype(half), (((64,), half),)),
    "gelu, exact": (lambda y: nn.gelu(y, approximate=False).astype(half), ()),
    "transposed": (lambda y, c: nn.silu(y) + c.swapaxes(1, 2), (((2, 64, 32), single),)),
    "column, scalar": (lambda y, c, s: y * c * s, (((32, 1), single), ((), single))),
    "mask": (lambda y, c: jnp.where(c, y, 0.0), (((2, 32, 64), bool),)),
    "rounded": (lambda y: (y**3 + jnp.round(y) - jnp.sign(y)).astype(half), ()),
    "softmax": (lambda y: nn.softmax(y), ()),
    "reductions": (
        lambda y: (y.astype(half), y.sum((0, 1)), y.sum(2), y.max(), nn.logsumexp(y, -1)), (),
    ),
    "named as JAX's": (exp_neg_sq, ()),
    "gradient": (gelu_gradient, (((2, 32, 64), half),)),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_graph_is_the_function(name):
    function, operands = FUNCTIONS[name]
    y = normal(tuple(EXTENTS.values()))
    arrays = [normal(shape, dtype, seed=1 + i) for i, (shape, dtype) in enumerate(operands)]
    traced = jax.make_jaxpr(lambda *args: jax.tree.leaves(function(*args)))(y, *arrays)
    fusion = fuse(traced, 1, "bmn", "m", "n")
    assert not fusion.uncovered
    read = [
        arrays[i].astype(operand.dtype).reshape([EXTENTS[x] for x in along])
        for i, operand, along in zip(
            fusion.operands, fusion.graph.operands, fusion.labels, strict=True
        )
    ]

    def follow(*args: Any) -> list[Any]:
        return evaluate(fusion.graph, args, fusion.labels, "bmn", "m", "n")

    found = fusion.finish(*jax.jit(follow)(y, *read), *arrays)
    expected = jax.tree.leaves(jax.jit(function)(y, *arrays))
    for one, other in zip(found, expected, strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    again = fuse(jax.make_jaxpr(follow)(y, *read), 1, "bmn", "m", "n")
    assert again.graph == fusion.graph and again.labels == fusion.labels


def test_gated_planes_are_stacked():
    gate, up = (normal((32, 64), seed=i) for i in range(2))

    def function(gate: Any, up: Any) -> list[Any]:
        return [jnp.stack([gate * up, gate - up], 1)]

    fusion = fuse(jax.make_jaxpr(function)(gate, up), 2, "mn", "m", "n")
    (found,) = evaluate(fusion.graph, [gate, up], (), "mn", "m", "n")
    np.testing.assert_array_equal(found, function(gate, up)[0])


def test_top_k_is_refused():
    y = jnp.ones((32, 64))
    traced = jax.make_jaxpr(lambda y: tuple(jax.lax.top_k(y, 4)))(y)
    graph = fuse(traced, 1, "mn", "m", "n").graph
    with pytest.raises(ValueError, match="top_k_values: of whole rows"):
        evaluate(graph, [y], (), "mn", "m", "n")
