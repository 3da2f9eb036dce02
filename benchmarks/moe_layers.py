"""A mixture of experts as `moe.py` times it: this library's layer, and one for others' products.

The latter is written plainly in JAX: the same router, the same order of rows, one product for gate
and up, and gradients of moved rows that gather as well, since JAX's own would add up by atomics.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_hopper_gemm import moe

# Functions of (x (T, D), router (D, E), gate_up (E, D, 2, F), down (E, F, D)).
Layer = Callable[..., jax.Array]
RaggedDot = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def layer_of(name: str) -> Layer:
    """Returns the layer of a candidate.

    Raises:
      ModuleNotFoundError: its library is not installed.
    """
    if name == "ours":
        return ours
    if name == "lax":
        return written_with(jax.lax.ragged_dot)
    tokamax: Any = importlib.import_module("tokamax")
    return written_with(tokamax.ragged_dot)


def ours(x: jax.Array, router: Any, gate_up: Any, down: Any, *, k: int) -> jax.Array:
    return moe.mixture_of_experts(x, router, gate_up, down, experts_per_token=k)[0]


def written_with(ragged_dot: RaggedDot) -> Layer:
    """Returns the layer with a product (lhs, rhs, group_sizes) of another library."""

    def layer(x: jax.Array, router: Any, gate_up: Any, down: Any, *, k: int) -> jax.Array:
        experts = router.shape[1]
        weights, chosen = routed(x, router, k)
        chosen = chosen.reshape(-1)
        order = jnp.argsort(chosen)
        positions = jnp.argsort(order).reshape(-1, k)
        sizes = jnp.bincount(chosen, length=experts)
        rows = dispatched(x, order // k, positions)
        both = ragged_dot(rows, gate_up.reshape(experts, x.shape[1], -1), sizes)
        gate, up = jnp.split(both.astype(jnp.float32), 2, axis=1)
        of_rows = weights.reshape(-1)[order][:, None]
        hidden = (jax.nn.silu(gate) * up * of_rows).astype(x.dtype)
        return combined(ragged_dot(hidden, down, sizes), order // k, positions)

    return layer


def routed(x: jax.Array, router: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns weights and experts, (T, k), of each token."""
    logits = jnp.matmul(x, router, preferred_element_type=jnp.float32)
    best, chosen = jax.lax.top_k(logits, k)
    return jax.nn.softmax(best), chosen


def picked(x: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.take(x, tokens, axis=0, mode="clip")


def gathered(rows: jax.Array, positions: jax.Array) -> jax.Array:
    taken = jnp.take(rows, positions, axis=0, mode="clip")
    return taken.sum(1, dtype=jnp.float32).astype(rows.dtype)


def _dispatched(x: jax.Array, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns the rows x[tokens], (T * k, D); token t's are those at positions[t], (T, k)."""
    return picked(x, tokens)


def _combined(rows: jax.Array, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns (T, D), the sum of each token's rows: the transpose of `dispatched`."""
    return gathered(rows, positions)


dispatched = jax.custom_vjp(_dispatched)
combined = jax.custom_vjp(_combined)
dispatched.defvjp(
    lambda x, tokens, positions: (picked(x, tokens), positions),
    lambda positions, cotangent: (gathered(cotangent, positions), None, None),
)
combined.defvjp(
    lambda rows, tokens, positions: (gathered(rows, positions), tokens),
    lambda tokens, cotangent: (picked(cotangent, tokens), None, None),
)
