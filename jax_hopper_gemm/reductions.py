"""Stand-in: adds up what a kernel leaves in parts."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from .epilogue import Result


def finish_partials(result: Result, array: Any) -> Any:
    if result.kind in ("column_sum", "row_sum"):
        return jnp.sum(array, axis=1)
    if result.kind == "row_max":
        return jnp.max(array, axis=1)
    if result.kind == "max":
        return jnp.max(array, axis=(1, 2))
    if result.kind == "row_sumexp":
        largest = jnp.max(array[:, :, 0], axis=1)
        parts = array[:, :, 1] * jnp.exp(array[:, :, 0] - largest[:, None])
        return largest, jnp.sum(parts, axis=1)
    return array
