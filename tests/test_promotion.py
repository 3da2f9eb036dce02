"""Derivatives where JAX promotes no dtypes: those of 8 bits, and any if the user says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.program_inspection import normal

import jax_hopper_gemm as jhg
from jax_hopper_gemm.moe.expert_parallel import EXCHANGES

X, W = normal((64, 128), jnp.bfloat16), normal((128, 96), jnp.bfloat16, 1)
SIZES = jnp.array([24, 40])
EXPERTS = jnp.stack([W, 2 * W])


def loss(y: jax.Array) -> jax.Array:
    return jnp.sum(y.astype(jnp.float32) ** 2)


def accelerated(x: Any) -> Any:
    return jhg.accelerate(lambda x: jax.nn.silu(x @ W) * (x @ EXPERTS[1]))(x)


def mixture(x: Any, held: int = 4, **options: Any) -> Any:
    router, gate_up, down = (
        normal(s, jnp.bfloat16) for s in ((128, 4), (held, 128, 2, 32), (held, 32, 128))
    )
    return jhg.moe.mixture_of_experts(x, router, gate_up, down, experts_per_token=2, **options)[0]


def exchanged(exchange: Any, x: Any) -> Any:
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,))
    experts = partial(mixture, held=1, expert_axis="expert", exchange=exchange)
    return jax.shard_map(experts, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))(x)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "matmul": lambda x: jhg.matmul(x, W, bias=W[:1], activation="gelu", c=jnp.ones((64, 96))),
    "epilogue": lambda x: jhg.matmul(x, W, epilogue=jax.nn.softmax),
    "gate": lambda x: jhg.gated_linear_unit(x, (W, EXPERTS[1])),
    "ragged": lambda x: jhg.ragged_dot(x, EXPERTS, SIZES, bias=EXPERTS[:, 0], activation="silu"),
    "quantized": lambda x: jhg.matmul(jhg.quantize(x, block=(1, 128)), jhg.quantize(W)),
    "recipe": lambda x: jhg.matmul(x, W, recipe=jhg.recipes.BlockScaling()),
    "accelerate": accelerated,
    "mixture": mixture,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_product_asks_jax_to_promote(name):
    gradient = jax.grad(lambda x: loss(FUNCTIONS[name](x)))
    expected = jax.jit(gradient)(X)
    with jax.numpy_dtype_promotion("strict"):
        np.testing.assert_array_equal(jax.jit(lambda x: gradient(x))(X), expected)


@pytest.mark.parametrize("name", [*FUNCTIONS, *EXCHANGES])
def test_nor_does_one_where_integers_have_64_bits(name):
    function = FUNCTIONS.get(name) or partial(exchanged, name)
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        jax.make_jaxpr(jax.grad(lambda x: loss(function(x))))(X)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int4])
def test_a_function_may_round_to_8_bits(dtype):
    def rounded(y: Any) -> Any:
        return y.astype(dtype).astype(jnp.bfloat16)

    def jaxs(x: Any) -> Any:
        return loss(rounded(lax.dot(x, W, preferred_element_type=jnp.float32)))

    expected = np.float32(jax.grad(jaxs)(X))
    found = (
        jax.grad(lambda x: loss(jhg.matmul(x, W, epilogue=rounded)))(X),
        jax.grad(lambda x: loss(jhg.accelerate(lambda x: rounded(x @ W))(x)))(X),
    )
    for ours in found:
        assert np.linalg.norm(np.float32(ours) - expected) <= 0.05 * np.linalg.norm(expected)
