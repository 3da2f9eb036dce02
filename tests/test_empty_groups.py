"""Grouped products without rows, columns or K: on the CPU, and lowered for CUDA."""

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
EXTENTS = {"rows": (0, K, N), "K": (6, 0, N), "columns": (6, K, 0)}


def bias(x: Any, w: Any, sizes: Any) -> Any:
    return jhg.ragged_dot(x, w, sizes, bias=jnp.ones((G, w.shape[2]), w.dtype))


def activation(x: Any, w: Any, sizes: Any) -> Any:
    return jhg.ragged_dot(x, w, sizes, activation="silu")


def picked(x: Any, w: Any, sizes: Any) -> Any:
    rows = jnp.arange(x.shape[0], dtype=jnp.int32)
    return jhg.ragged_dot(x, w, sizes, activation="silu", row_indices=rows)


def gate(x: Any, w: Any, sizes: Any) -> Any:
    return jhg.gated_linear_unit(x, jnp.stack([w, w], 2), group_sizes=sizes)


@pytest.mark.parametrize("name", EXTENTS)
@pytest.mark.parametrize("function", [bias, activation, picked, gate])
def test_empty_products_follow_their_rule(function, name):
    m, k, n = EXTENTS[name]
    x, w = normal((m, k), jnp.bfloat16), normal((G, k, n), jnp.bfloat16)
    sizes = SIZES if m else jnp.zeros(G, jnp.int32)

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
    expected = np.ones((m, n)) if function is bias else np.zeros((m, n))
    np.testing.assert_array_equal(np.float32(y), expected)
    assert not any(np.float32(d).any() for d in (dx, dw))
    program.lower(lowering_platforms=("cuda",))


def test_a_mixture_of_experts_may_have_no_tokens():
    arrays = [normal(s) for s in ((0, 16), (16, 4), (4, 16, 2, 8), (4, 8, 16))]

    def loss(*arrays: Any) -> Any:
        return jnp.sum(jhg.moe.mixture_of_experts(*arrays, experts_per_token=2)[0])

    gradients = jax.grad(loss, (0, 1, 2, 3))(*arrays)
    assert [x.shape for x in gradients] == [x.shape for x in arrays]
    assert not any(x.any() for x in gradients)
