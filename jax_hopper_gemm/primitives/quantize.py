"""Quantization: an array as numbers of 8 bits and a scale for each of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import numpy as jnp

from ..gemm.spec import PROMOTION_K

BLOCK = PROMOTION_K
SMALLEST = float(jnp.finfo(jnp.float32).tiny)  # of a scale: what is not subnormal


def quantized(x: jax.Array, dtype: Any, blocks: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    """Returns values in 8 bits and float32 scales; see `ops.quantize`.

    Args:
      x: floats.
      dtype: float8_e4m3fn, float8_e5m2 or int8.
      blocks: for each axis how many elements share a scale: 1, 128, or None for all.
    """
    wide = x.astype(jnp.float32)
    split, axes = _split(wide, blocks)
    largest = jnp.max(jnp.abs(split), axes, keepdims=True, initial=0.0)
    scale = scale_of(largest, dtype)
    values = rounded(split / scale, dtype)
    padded = [extent + more for extent, (_, more) in zip(x.shape, _padding(x, blocks), strict=True)]
    values = values.reshape(padded)[tuple(map(slice, x.shape))]
    return values, jnp.squeeze(scale, _inner(blocks))


def scale_of(largest: jax.Array, dtype: Any) -> jax.Array:
    """Returns the scale of blocks with such a largest magnitude: 1 for 0, else no subnormal."""
    scale = jnp.maximum(largest / largest_number(dtype), SMALLEST)
    return jnp.where(largest == 0, jnp.ones_like(scale), scale)


def largest_number(dtype: Any) -> float:
    """Returns the largest number of a dtype of 8 bits: 448, 57344 or 127."""
    return 127.0 if jnp.dtype(dtype) == jnp.int8 else float(jnp.finfo(dtype).max)


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns numbers of 8 bits: the nearest, ties to even, the largest for what lies beyond."""
    limit = largest_number(dtype)
    clipped = jnp.clip(x, -limit, limit)
    return (jnp.round(clipped) if jnp.dtype(dtype) == jnp.int8 else clipped).astype(dtype)


def _split(x: jax.Array, blocks: Sequence[int | None]) -> tuple[jax.Array, tuple[int, ...]]:
    """Returns an array with each axis of blocks as two, and the axes that share a scale."""
    x, shape, axes = jnp.pad(x, _padding(x, blocks)), [], []
    for extent, block in zip(x.shape, blocks, strict=True):
        if block == BLOCK:
            axes.append(len(shape) + 1)
            shape += [extent // BLOCK, BLOCK]
        else:
            axes += [len(shape)] if block is None else []
            shape.append(extent)
    return x.reshape(shape), tuple(axes)


def _padding(x: jax.Array, blocks: Sequence[int | None]) -> list[tuple[int, int]]:
    """Returns how many elements each axis lacks of whole blocks."""
    pairs = zip(x.shape, blocks, strict=True)
    return [(0, -extent % BLOCK if block == BLOCK else 0) for extent, block in pairs]


def _inner(blocks: Sequence[int | None]) -> tuple[int, ...]:
    """Returns the axes of `_split`'s array that number the elements of a block."""
    axes, at = [], 0
    for block in blocks:
        if block == BLOCK:
            axes.append(at + 1)
        at += 2 if block == BLOCK else 1
    return tuple(axes)
