"""`accelerate` on gates whose weights are both parts of one array, which kernels read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.accelerated import products
from support.program_inspection import integers, lowered

import jax_hopper_gemm as jhg

BF16, F32 = jnp.bfloat16, jnp.float32
M, K, N = 4096, 2048, 8192
X = jax.ShapeDtypeStruct((M, K), BF16)


def gate(x: Any, weights: Any, axis: int = 0, order: tuple[int, int] = (0, 1)) -> Any:
    """Weights are (2, K, N), (K, 2, N) or (K, N, 2), by axis."""
    first, second = (lax.index_in_dim(weights, i, axis, keepdims=False) for i in order)
    return jax.nn.silu(x @ first) * (x @ second)


def weights(axis: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*(K, N)[:axis], 2, *(K, N)[axis:]), BF16)


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize(
    ("axis", "order", "copied"),
    [(0, (0, 1), False), (1, (0, 1), False), (2, (0, 1), True), (0, (1, 0), True)],
)
def test_a_gate_of_one_array_reads_it_where_it_lies(axis, order, copied):
    """Not where no matrix of it has adjacent elements, nor where up comes first."""

    def function(x: Any, w: Any) -> Any:
        return gate(x, w, axis, order)

    ((num_b, *_),) = products(function, X, weights(axis))
    assert num_b == (2 if copied else 1)
    assert ("stablehlo.slice" in lowered(jhg.accelerate(function), X, weights(axis))) == copied


def test_the_report_says_what_a_gate_of_one_array_saves():
    of_one = jhg.explain(gate, X, weights(0))
    of_two = jhg.explain(lambda x, w: gate(x, w, order=(1, 0)), X, weights(0))
    assert of_one.saved_us == pytest.approx(of_two.saved_us) and of_two.saved_us > 0


@pytest.mark.usefixtures("all_fused")
@pytest.mark.parametrize("axis", [0, 1])
def test_numbers_of_a_gate_of_one_array(axis):
    def loss(x: Any, w: Any) -> Any:
        y = gate(x, w, axis).astype(F32)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)), y

    x, w = integers((16, 32), "bfloat16") / 8, integers((2, 32, 64), "bfloat16", seed=1) / 8
    w = jnp.moveaxis(w, 0, axis)
    step = jax.grad(loss, argnums=(0, 1), has_aux=True)
    exact = jax.tree.leaves(jax.jit(step)(x.astype(F32), w.astype(F32)))
    outside = jax.grad(jhg.accelerate(loss), argnums=(0, 1), has_aux=True)
    assert products(loss, x, w)[0][0] == 1
    for ours in (jhg.accelerate(step), outside):
        for found, y in zip(jax.tree.leaves(jax.jit(ours)(x, w)), exact, strict=True):
            limit = 0.01 * float(jnp.abs(y).max())
            np.testing.assert_allclose(found.astype(F32), y, rtol=0.01, atol=limit)
