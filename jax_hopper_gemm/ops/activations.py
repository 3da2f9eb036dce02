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


_OF_JAX = (
    "celu", "elu", "gelu", "hard_sigmoid", "hard_swish", "hard_tanh", "leaky_relu", "mish", "relu",
    "relu6", "selu", "sigmoid", "silu", "softplus", "swish", "tanh",
)  # fmt: skip
_FUNCTIONS: dict[str, Activation] = {name: getattr(jax.nn, name) for name in _OF_JAX} | {
    "gelu_exact": gelu_exact, "identity": identity, "relu_squared": relu_squared,
    "softsign": jax.nn.soft_sign,
}  # fmt: skip
ACTIVATIONS = dict(sorted(_FUNCTIONS.items()))  # in the order of messages


def activation_function(activation: Any) -> Activation | None:
    """Returns the function of a name in `ACTIVATIONS`, else `activation`; None for the identity."""
    function = ACTIVATIONS[activation] if isinstance(activation, str) else activation
    return None if function is identity else function
