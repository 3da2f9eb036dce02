"""A stand-in for `ops`: the arguments that the layers pass, computed by plain products.

NOTE: to be removed once `ops.matmul` and `ops.gated_linear_unit` take these arguments; the layers
then import `ops` instead.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .. import ops


def matmul(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    activation: Any = None,
    residual: Any = None,
    preactivation: str = "save",
    preferred_element_type: Any = None,
    **options: Any,
) -> jax.Array:
    dtype = preferred_element_type or jnp.result_type(a, b)
    y = ops.matmul(a, b, preferred_element_type=_wide(dtype), **options)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    y = _activate(activation, y)
    if residual is not None:
        y = y + residual.astype(y.dtype)
    return y.astype(dtype)


def gated_linear_unit(
    x: Any,
    weights: Any,
    *,
    activation: Any,
    bias: Any = None,
    preactivation: str = "save",
    preferred_element_type: Any = None,
    **options: Any,
) -> jax.Array:
    dtype = preferred_element_type or jnp.result_type(x, weights)
    gate, up = (
        ops.matmul(x, weights[:, i], preferred_element_type=_wide(dtype), **options)
        for i in range(2)
    )
    if bias is not None:
        gate, up = gate + bias[0].astype(gate.dtype), up + bias[1].astype(up.dtype)
    return (_activate(activation, gate) * up).astype(dtype)


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _activate(activation: Any, y: Any) -> Any:
    if isinstance(activation, str):
        activation = getattr(jax.nn, activation)
    return y if activation is None else activation(y)
