"""`accelerate` of functions that call modules of Flax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from support.program_inspection import integers, products, same

import jax_hopper_gemm as jhg

X, W = integers((16, 16), "bfloat16"), integers((16, 16), "bfloat16", seed=1)


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        options: Any = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": rngs}
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, **options)
        self.linear = nnx.Linear(16, 8, **options)

    def __call__(self, x: Any) -> Any:
        return self.linear(self.attention(x))


@pytest.mark.slow
def test_products_of_nnx_modules_become_ours():
    model = Attention(nnx.Rngs(0))
    x = integers((2, 4, 16), "bfloat16")

    def loss(model: Any, x: Any) -> Any:
        return jnp.sum(model(x).astype("float32") ** 2)

    ours = jhg.accelerate(loss)
    on_kernels, on_xla = products(ours, model, x)
    assert on_kernels + on_xla == sum(products(loss, model, x)) and on_kernels > on_xla
    same(nnx.jit(ours)(model, x), nnx.jit(loss)(model, x))
    found, expected = (nnx.jit(nnx.grad(function))(model, x) for function in (ours, loss))
    for gradients in (found, expected):  # adds one number to a query's logits: it is nothing but
        del gradients["attention"]["key"]["bias"]  # what is lost by rounding

    def close(found: Any, expected: Any) -> None:  # XLA fuses, and so rounds, at other places
        expected = np.asarray(expected, np.float32)
        bound = 4 * float(jnp.finfo(jnp.bfloat16).eps) * np.abs(expected).max()
        np.testing.assert_allclose(np.asarray(found, np.float32), expected, atol=bound)

    jax.tree.map(close, found, expected)
    assert all(np.any(x) for x in jax.tree.leaves(found["linear"]))


@pytest.mark.slow
def test_state_of_an_nnx_module_comes_back_where_it_is_returned():
    def steps(change: Callable[[Any], Any]) -> Any:
        model = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
        graph, state = nnx.split(model)

        def call(state: Any, x: Any) -> Any:
            model = nnx.merge(graph, state)
            return model(x @ W), nnx.state(model)

        y, state = change(call)(state, X)
        nnx.update(model, state)
        return y, model.mean[...]

    found, expected = steps(jhg.accelerate), steps(lambda call: call)
    same(found, expected)
    assert np.any(found[1])


class Normed(linen.Module):
    @linen.compact
    def __call__(self, x: Any, train: bool) -> Any:
        options: Any = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        x = linen.Dense(16, **options)(x)
        x = linen.BatchNorm(use_running_average=not train)(x)
        x = linen.Dropout(0.5, deterministic=not train)(x)
        return linen.DenseGeneral((2, 4), **options)(x)


@pytest.mark.slow
def test_products_of_linen_modules_become_ours_and_state_comes_back():
    model = Normed()
    variables = model.init(jax.random.key(0), X, train=False)
    options = {"train": True, "mutable": ["batch_stats"], "rngs": {"dropout": jax.random.key(1)}}
    ours = jhg.accelerate(model.apply)
    y, state = ours(variables, X, **options)
    expected, new = model.apply(variables, X, **options)
    same((y, state), (expected, new))
    assert np.any(jax.tree.leaves(state)[0] != jax.tree.leaves(variables["batch_stats"])[0])
    report = jhg.explain(model.apply, variables, X, train=False)
    assert len(report.taken) == 2 and not report.left
