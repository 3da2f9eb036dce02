"""Sizes of groups and numbers of rows as users give them, brought into the form of a product."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..span_sizes import span_ends
from ..spans import Spans


def as_int32(values: jax.Array, least: int = 0) -> jax.Array:
    """Returns integers of any type as int32, those beyond int32 or under `least` at these limits.

    Those that are int32 already stay as they are.
    """
    if values.dtype == np.int32:
        return values
    limits, own = np.iinfo(np.int32), np.iinfo(values.dtype)
    if own.max > limits.max:
        values = jnp.minimum(values, np.array(limits.max, values.dtype))
    if own.min < 0:
        values = jnp.maximum(values, np.array(least, values.dtype))
    return values.astype(np.int32)


def sizes_in_rows(sizes: jax.Array, length: int, inner: int) -> jax.Array:
    """Returns int32 sizes in rows, `length` of them, where each counts `inner` rows at a time."""
    sizes = as_int32(sizes)
    if inner == 1:
        return sizes
    return jnp.minimum(jnp.maximum(sizes, 0), length // max(inner, 1)) * inner


def spans_of(sizes: jax.Array, offset: Any, groups: int, length: int) -> tuple[jax.Array, Spans]:
    """Returns the sizes of a product's spans, and which of them belong to its `groups` groups.

    With an offset the rows of all groups before it are the first span.
    """
    if offset is None:
        return sizes, Spans.plain(groups)
    # Clipped before it is converted: a group far beyond the last stays there.
    offset = jnp.clip(jnp.reshape(offset, ()), 0, sizes.shape[0]).astype(np.int32)
    number = jnp.arange(sizes.shape[0], dtype=np.int32)
    before = jnp.max(span_ends(jnp.where(number < offset, sizes, 0), length), initial=0)
    local = lax.dynamic_slice(jnp.pad(sizes, (0, groups)), (offset,), (groups,))
    sizes = jnp.concatenate([before[None], local])
    return sizes, Spans(period=groups + 2, count=groups, first=1)
