"""Activations by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Activation = Callable[[jax.Array], jax.Array]


def gelu_exact(x: jax.Array) -> jax.Array:
    """Returns x * Phi(x) by the error function; "gelu" approximates it by tanh, JAX's default."""
    return jax.nn.gelu(x, approximate=False)


def relu_squared(x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(x))


def identity(x: jax.Array) -> jax.Array:
    return x


ACTIVATIONS: dict[str, Activation] = {
    "celu": jax.nn.celu,
    "elu": jax.nn.elu,
    "gelu": jax.nn.gelu,
    "gelu_exact": gelu_exact,
    "hard_sigmoid": jax.nn.hard_sigmoid,
    "hard_swish": jax.nn.hard_swish,
    "hard_tanh": jax.nn.hard_tanh,
    "identity": identity,
    "leaky_relu": jax.nn.leaky_relu,
    "mish": jax.nn.mish,
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "relu_squared": relu_squared,
    "selu": jax.nn.selu,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "softsign": jax.nn.soft_sign,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
}


def activation_function(activation: Any) -> Activation | None:
    """Returns the function of a name in `ACTIVATIONS`, else `activation`; None for the identity."""
    function = ACTIVATIONS[activation] if isinstance(activation, str) else activation
    return None if function is identity else function
