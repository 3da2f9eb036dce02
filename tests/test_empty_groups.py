"""Grouped products without groups, rows, columns or K: on the CPU, and lowered for CUDA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.program_inspection import normal

import jax_hopper_gemm as jhg

G, K, N = 4, 64, 32
SIZES = jnp.array([1, 0, 2, 3])
EXTENTS = {
    "groups": (0, 6, K, N), "rows": (G, 0, K, N), "K": (G, 6, 0, N), "columns": (G, 6, K, 0),
}  # fmt: skip


def bias(x: Any, w: Any, sizes: Any) -> Any:
    return jhg.ragged_dot(x, w, sizes, bias=1 + jnp.sum(w, 1))


def activation(x: Any, w: Any, sizes: Any) -> Any:
    return jhg.ragged_dot(x, w, sizes, activation="silu")


def picked(x: Any, w: Any, sizes: Any) -> Any:
    rows = jnp.arange(x.shape[0], dtype=jnp.int32)
    return jhg.ragged_dot(x, w, sizes, activation="silu", row_indices=rows)


def gate(x: Any, w: Any, sizes: Any) -> Any:
    return jhg.gated_linear_unit(x, jnp.stack([w, w], 2), group_sizes=sizes)


def contraction(x: Any, w: Any, sizes: Any) -> Any:
    """A weight's gradient for each matrix, times the matrices: the shape of the others' results."""
    numbers = jax.lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
    gradients = jhg.ragged_dot_general(x, x, sizes, numbers)
    return jhg.ragged_dot(x, gradients @ w, sizes)


@pytest.mark.parametrize("name", EXTENTS)
@pytest.mark.parametrize("function", [bias, activation, picked, gate, contraction])
def test_empty_products_follow_their_rule(function, name):
    groups, m, k, n = EXTENTS[name]
    x, w = normal((m, k), jnp.bfloat16), normal((groups, k, n), jnp.bfloat16)
    sizes = SIZES[:groups] if m else jnp.zeros(groups, jnp.int32)

    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(function(x, w, sizes).astype(jnp.float32) ** 2)

    def programs(x: Any, w: Any) -> Any:
        stacks = jnp.stack([x, x]), jnp.stack([w, w])
        mapped = jax.vmap(lambda x, w: function(x, w, sizes))
        gradients = jax.vmap(jax.grad(loss, (0, 1)))(*stacks)
        return function(x, w, sizes), mapped(*stacks), mapped(*(s[:0] for s in stacks)), gradients

    program = jax.jit(programs).trace(x, w)
    y, both, none, (dx, dw) = jax.jit(programs)(x, w)
    assert y.shape == (m, n) and both.shape == (2, m, n) and none.shape == (0, m, n)
    assert dx.shape == (2, *x.shape) and dw.shape == (2, *w.shape)
    expected = np.ones((m, n)) if function is bias and groups else np.zeros((m, n))
    np.testing.assert_array_equal(np.float32(y), expected)
    assert not any(np.float32(d).any() for d in (dx, dw))
    program.lower(lowering_platforms=("cuda",))


@pytest.mark.slow
def test_a_mixture_of_experts_may_have_no_tokens():
    arrays = [normal(s) for s in ((0, 16), (16, 4), (4, 16, 2, 8), (4, 8, 16))]

    def loss(*arrays: Any) -> Any:
        return jnp.sum(jhg.moe.mixture_of_experts(*arrays, experts_per_token=2)[0])

    gradients = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*arrays)
    assert [x.shape for x in gradients] == [x.shape for x in arrays]
    assert not any(map(np.any, gradients))


def test_an_empty_batch_may_have_its_own_sizes():
    numbers = jax.lax.RaggedDotDimensionNumbers((([2], [2]), ([0], [0])), [1], [1])
    x, w, sizes = jnp.ones((0, 6, K)), jnp.ones((0, G, K, N)), jnp.ones((0, G), jnp.int32)
    assert jhg.ragged_dot_general(x, w, sizes, numbers).shape == (0, 6, N)
