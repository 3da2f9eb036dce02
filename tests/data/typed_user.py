"""A user's file, whose types pyright must infer: `assert_type` refuses `Any`."""

from __future__ import annotations

from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np

import jax_hopper_gemm as jhg
from jax_hopper_gemm import moe, reports

Pair = tuple[jax.Array, jax.Array]

x = jnp.ones((512, 1024), jnp.bfloat16)
w = jnp.ones((1024, 512), jnp.bfloat16)
experts = jnp.ones((2, 1024, 512), jnp.bfloat16)
sizes = jnp.array([256, 256])
axes = ((1,), (0,)), ((), ())


def with_amax(y: jax.Array) -> Pair:
    return jnp.sin(y), jnp.max(jnp.abs(y))


def step(x: jax.Array, *, rate: float) -> dict[str, jax.Array]:
    loss = jnp.sum(jhg.matmul(x, w) ** 2)
    return {"loss": rate * loss}


assert_type(jhg.__version__, str)
assert_type(jhg.matmul(x, w), jax.Array)
assert_type(jhg.matmul(x, w, bias=w[0], activation="gelu", epilogue=None), jax.Array)
assert_type(jhg.matmul(x, w, epilogue=jnp.tanh, activation=jax.nn.gelu), jax.Array)
assert_type(jhg.matmul(x, w, epilogue=with_amax), Pair)
assert_type(jhg.matmul(x, w, epilogue=lambda y: (jnp.sin(y), jnp.max(y))), Pair)
assert_type(jhg.matmul(x, w, epilogue=with_amax, preferred_element_type=(jnp.bfloat16, None)), Pair)
assert_type(jhg.dot_general(x, w, axes), jax.Array)
assert_type(jhg.dot_general(x, w, axes, epilogue=with_amax), Pair)
assert_type(jhg.einsum("mk,kn->mn", x, w), jax.Array)
assert_type(jhg.einsum("mk,kn->mn", x, w, epilogue=with_amax), Pair)
assert_type(jhg.ragged_dot(x, experts, sizes), jax.Array)
assert_type(jhg.ragged_dot(x, experts, sizes, epilogue=with_amax), Pair)
assert_type(jhg.gated_linear_unit(x, (w, w), activation="silu"), jax.Array)
assert_type(moe.grouped_mlp(x, experts, experts, sizes), jax.Array)
assert_type(moe.dispatch_rows(np.ones((4, 4)), moe.route(np.ones((4, 4)), 2)), jax.Array)

fast = jhg.accelerate(step)
assert_type(fast(x, rate=0.1), dict[str, jax.Array])
report = jhg.explain(step, x, rate=0.1)
assert_type(report, jhg.ProductReport)
assert_type(report.products[0], reports.FoundProduct)
assert_type(report.kernel_share, float)
assert_type(jhg.explain(jhg.matmul, x, w, bias=w[0]), jhg.Explanation)
assert_type(jhg.explain(jhg.gated_linear_unit, x, (w, w)).reason, str)
assert_type(jhg.explain(jax.jit(step), x, rate=0.1).flops, int)
