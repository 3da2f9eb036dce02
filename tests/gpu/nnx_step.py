"""A step of training of a model of Flax's own layers, by `nn.accelerate` on our kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_hopper_gemm import nn
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.testing.lowered import specs_of

# One sequence: of several, the batch axes of attention's scores do not merge into one.
SHAPE, HEADS, HIDDEN = (1, 512, 256), 4, 1024
PRODUCTS = 21  # 8, 16 of their gradients, but for three of the input; three may be one launch
RATE = 2.0**-4


class Model(nnx.Module):
    def __init__(self) -> None:
        width = SHAPE[-1]
        options: dict[str, Any] = {"dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
        self.attention = nnx.MultiHeadAttention(
            HEADS, width, decode=False, use_bias=False, **options
        )
        self.up = nnx.Linear(width, HIDDEN, **options)
        self.down = nnx.Linear(HIDDEN, width, **options)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any) -> Any:
        self.calls[...] += 1
        x = x + self.attention(x)
        return x + self.down(jax.nn.gelu(self.up(x)))


def train_step(model: Model, x: jax.Array) -> jax.Array:
    """Moves the parameters down their gradients, and returns the loss before."""

    def loss(model: Model) -> jax.Array:
        return jnp.mean(model(x).astype(jnp.float32) ** 2)

    value, gradients = nnx.value_and_grad(loss)(model)
    parameters = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p, g: p - RATE * g, parameters, gradients))
    return value


def batch() -> jax.Array:
    return jax.random.normal(jax.random.key(0), SHAPE, jnp.bfloat16)


def specs() -> list[GemmSpec]:
    step = nn.accelerate(train_step, implementation="hopper")

    def run(x: jax.Array) -> Any:
        model = Model()
        return step(model, x), nnx.state(model)

    return specs_of(run, batch())
