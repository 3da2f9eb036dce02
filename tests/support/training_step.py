"""A step of training that has every kind of product: with an epilogue, gated, ragged; gradients.

What GPU tests run whole: captured in a CUDA graph, on many threads, in many processes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import group_sizes
import jax
import jax.numpy as jnp
import numpy as np

from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.ops import gated_linear_unit, matmul, ragged_dot
from jax_hopper_gemm.testing.lowered import specs_of

TOKENS, WIDTH, HIDDEN, EXPERTS = 512, 256, 1024, 8
RATE = 2.0**-4
LAUNCHES = 14  # products and their gradients; x, the batch, needs none

Parameters = dict[str, jax.Array]


def loss(parameters: Parameters, x: jax.Array, sizes: jax.Array) -> jax.Array:
    """A layer of each kind, one after another; float32."""
    p, multiply = parameters, partial(matmul, implementation="hopper")
    hidden = multiply(x, p["up"], bias=p["bias"], activation="gelu")
    x = multiply(hidden, p["down"], residual=x)
    hidden = gated_linear_unit(x, p["gate_up"], activation="silu", implementation="hopper")
    x = multiply(hidden, p["gated_down"])
    x = ragged_dot(x, p["experts"], sizes, implementation="hopper")
    return jnp.mean(x.astype(jnp.float32) ** 2)


def step(parameters: Parameters, x: jax.Array, sizes: jax.Array) -> tuple[Parameters, jax.Array]:
    """Returns the parameters after a step down their gradients, and the loss before it."""
    value, gradients = jax.value_and_grad(loss)(parameters, x, sizes)
    return jax.tree.map(lambda p, g: p - RATE * g, parameters, gradients), value


def parameters(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {
        "up": (WIDTH, HIDDEN), "bias": (HIDDEN,), "down": (HIDDEN, WIDTH),
        "gate_up": (WIDTH, 2, HIDDEN), "gated_down": (HIDDEN, WIDTH),
        "experts": (EXPERTS, WIDTH, WIDTH),
    }  # fmt: skip
    contracted = {name: shape[-2 if name == "experts" else 0] for name, shape in shapes.items()}
    return {
        name: (rng.standard_normal(shape) * contracted[name] ** -0.5).astype(jnp.bfloat16)
        for name, shape in shapes.items()
    }


def batch(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns x and the sizes of the groups of its rows."""
    x = np.random.default_rng(seed).standard_normal((TOKENS, WIDTH)).astype(jnp.bfloat16)
    return x, group_sizes.uneven(TOKENS, EXPERTS, seed)


def specs() -> list[GemmSpec]:
    return specs_of(step, parameters(), *batch())


def bits(tree: Any) -> np.ndarray:
    """Returns all numbers of arrays as bytes, one after another."""
    return np.concatenate([np.asarray(x).ravel().view(np.uint8) for x in jax.tree.leaves(tree)])
