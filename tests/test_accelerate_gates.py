"""`accelerate` on gates whose weights are both halves of one array, which kernels read."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.accelerated import products
from support.program_inspection import integers, lowered

import jax_hopper_gemm as jhg
from jax_hopper_gemm.interop import fuse_jaxpr

BF16, F32 = jnp.bfloat16, jnp.float32
GATE = ["logistic", "mul", "mul"]
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


def test_weights_of_a_gate_may_be_made_of_a_number():
    def function(x: Any, w: Any) -> Any:
        return jax.nn.silu(x @ (2 * w)) * (x @ jnp.ones_like(w))

    ((num_b, *_),) = products(function, X, jax.ShapeDtypeStruct((K, N), BF16))
    assert num_b == 2


def test_the_report_says_what_a_gate_of_one_array_saves():
    of_one = jhg.explain(gate, X, weights(0))
    of_two = jhg.explain(lambda x, w: gate(x, w, order=(1, 0)), X, weights(0))
    assert of_one.saved_us == pytest.approx(of_two.saved_us) and of_two.saved_us > 0


def by_split(x: Any, w: Any) -> Any:
    first, second = jnp.split(x @ w.reshape(len(w), -1), 2, axis=-1)
    return jax.nn.silu(first) * second


def by_slices(x: Any, w: Any) -> Any:
    both = x @ w.reshape(len(w), -1)
    columns = both.shape[-1] // 2
    return jax.nn.silu(both[:, :columns]) * both[:, columns:]


def by_index(x: Any, w: Any) -> Any:
    both = jnp.einsum("mk,kin->min", x, w)
    return jax.nn.silu(both[:, 0]) * both[:, 1]


def after_a_bias(x: Any, w: Any) -> Any:
    bias = jnp.cos(jnp.arange(2 * w.shape[2], dtype=F32))
    both = jnp.dot(x, w.reshape(len(w), -1), preferred_element_type=F32) + bias
    slope = jnp.cos(both.shape[0] * bias) + jnp.arange(len(x), dtype=F32)[:, None] / len(x)
    first, second = jnp.split((slope * both).astype(x.dtype), 2, axis=-1)
    return jax.nn.silu(first) * second + slope.max().astype(x.dtype)


def of_groups(x: Any, w: Any) -> Any:
    sizes = jnp.full(2, x.shape[0] // 2, jnp.int32)
    both = lax.ragged_dot(x, jnp.stack([w, -w]).reshape(2, len(w), -1), sizes)
    first, second = jnp.split(both, 2, axis=-1)
    return jax.nn.silu(first) * second


CUT = [by_split, by_slices, by_index, after_a_bias, of_groups]


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize("function", CUT)
def test_a_product_that_is_cut_in_two_is_a_gate(function):
    ((num_b, dtypes, names),) = products(function, X, weights(1))
    assert (num_b, dtypes) == (1, ("bfloat16",))
    assert " ".join(GATE) in " ".join(name for name in names if name != "squeeze")


def test_a_product_that_is_cut_in_two_stays_one_where_it_is_no_gate():
    """As of keys and values; where all of it is read, too; and where parts are no halves."""
    w = jax.ShapeDtypeStruct((K, N), BF16)
    plain = [(1, ("bfloat16",), None)]
    assert products(lambda x, w: jnp.split(x @ w, 2, axis=-1), X, w) == plain

    def also_returned(x: Any, w: Any) -> Any:
        both = x @ w
        return jax.nn.silu(both[:, : N // 2]) * both[:, N // 2 :], both

    def unequal(x: Any, w: Any) -> Any:
        first, second = jnp.split(x @ w, [N // 4], axis=-1)
        return jax.nn.silu(first[:, : N // 4]) * second[:, : N // 4]

    assert products(also_returned, X, w) == products(unequal, X, w) == plain


def test_a_cut_product_that_no_kernel_runs_never_stands_as_two(monkeypatch):
    """As the gradient of rotated keys that heads share: the program would be gone through twice."""
    halved, with_halves = [], fuse_jaxpr.with_halves

    def spied(*args: Any) -> Any:
        found = with_halves(*args)
        halved.append(len(found[2]))
        return found

    def function(scores: Any, queries: Any) -> Any:
        of_keys = jnp.einsum("bthgd,bhtgs->bshd", queries, scores)
        first, second = jnp.split(of_keys, 2, axis=-1)
        return jnp.concatenate([first - second, second + first], axis=-1)

    monkeypatch.setattr(fuse_jaxpr, "with_halves", spied)
    shapes = (4, 8, 512, 4, 512), (4, 512, 8, 4, 64)
    jax.make_jaxpr(jhg.accelerate(function))(*(jax.ShapeDtypeStruct(x, BF16) for x in shapes))
    assert halved == [0]


@pytest.mark.parametrize("gate_us", [1.0, 3.0])
def test_the_gate_of_a_cut_product_is_weighed_against_that_one_product(gate_us, monkeypatch):
    asked = []

    def expected(launch: Any, alone: Any, *_: Any) -> tuple[float, float]:
        asked.append([x.rhs_shape for x in alone])
        return gate_us, 2.0

    monkeypatch.setattr(fuse_jaxpr, "expected_us", expected)
    ((_, _, names),) = products(lambda x, w: by_split(x, w), X, weights(1))
    assert asked == [[(K, 2 * N)]] and (names is None) == (gate_us > 2.0)


@pytest.mark.slow
@pytest.mark.usefixtures("all_fused")
@pytest.mark.parametrize("function", [gate, partial(gate, axis=1), *CUT])
def test_numbers_of_a_gate_of_one_array(function):
    def loss(x: Any, w: Any) -> Any:
        y = function(x, w).astype(F32)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)), y

    x, w = integers((16, 32), "bfloat16") / 8, integers((2, 32, 64), "bfloat16", seed=1) / 8
    w = w if function is gate else jnp.moveaxis(w, 0, 1)
    step = jax.grad(loss, argnums=(0, 1), has_aux=True)
    exact = jax.tree.leaves(jax.jit(step)(x.astype(F32), w.astype(F32)))
    outside = jax.grad(jhg.accelerate(loss), argnums=(0, 1), has_aux=True)
    assert products(loss, x, w)[0][0] == 1
    for ours in (jhg.accelerate(step), outside):
        for found, y in zip(jax.tree.leaves(jax.jit(ours)(x, w)), exact, strict=True):
            limit = 0.01 * float(jnp.abs(y).max())
            np.testing.assert_allclose(found.astype(F32), y, rtol=0.01, atol=limit)
