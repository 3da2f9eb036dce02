"""Quantization: an array as numbers of 8 or 4 bits and a scale for each of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from ..gemm.quantization import TARGETS, TILE
from ..lowering.quantization import lower_quantize
from ..lowering.register import Lowering
from .define import Rules, define_primitive, mapped_first

SMALLEST = float(jnp.finfo(jnp.float32).tiny)  # of a scale: what is not subnormal


def quantized(x: jax.Array, dtype: Any, blocks: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    """Returns values in 8 or 4 bits and float32 scales; see `ops.quantize`."""
    others, lines = blocks[:-2], tuple(blocks[-2:])
    of_float8 = jnp.dtype(dtype).name in TARGETS
    if lines not in {(1, TILE), (TILE, 1), (TILE, TILE)} or {*others, 1} != {1} or not of_float8:
        return by_xla(x, dtype, blocks)
    first, last = lines
    transposed = last == 1
    values, scale = hopper_quantize(x, dtype, min(first, last), transposed=transposed)
    if transposed:
        return jnp.swapaxes(values, -1, -2), jnp.swapaxes(scale, -1, -2)
    return values, scale


def hopper_quantize(
    x: jax.Array, dtype: Any, block: int, *, transposed: bool, rows: jax.Array | None = None,
    by: str | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns matrices in 8 bits with scales along their last axis, each for 128 elements of it.

    Args:
      x: (..., R, C) floats.
      dtype: float8_e4m3fn or float8_e5m2.
      block: rows of the result that share a scale: 1 or 128.
      transposed: whether the result is transposed, (..., C, R).
      rows: int32 indices of the rows of x, (R', C), that are quantized; zeros where one is none.
      by: "xla" for XLA; else a kernel, where one quantizes so.

    Returns:
      Values, (..., R, C), and float32 scales, (..., R / block, C / 128), rounded up; or those of
      the transpose.
    """
    picks = () if rows is None else (rows,)
    params = {"to": jnp.dtype(dtype).name, "block": block, "transposed": transposed}
    run = _reference if by == "xla" else hopper_quantize_p.bind
    values, scale = run(x, *picks, **params)
    return values, scale


def by_xla(x: jax.Array, dtype: Any, blocks: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    """Returns what `quantized` does, whatever dtype and blocks, as operations of XLA."""
    split, axes, inner = _split(x.astype(jnp.float32), blocks)
    scale = scale_of(largest_magnitude(split, axes, keepdims=True), dtype)
    values = rounded(lax.stop_gradient(split / scale), dtype)
    return _joined(values, x, blocks), jnp.squeeze(scale, inner)


def quantized_between(
    x: jax.Array, dtype: Any, blocks: Sequence[Any]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns values in int8 or int4, scales and zero points, whose dtype is that of the values.

    From the least to the largest number of a block, or 0, all of the dtype's numbers are taken.
    """
    split, axes, inner = _split(x.astype(jnp.float32), blocks)
    low, high = (
        _with_nan(f(split, axes, keepdims=True, initial=0.0), split, axes, keepdims=True)
        for f in (jnp.min, jnp.max)
    )
    first, last = (float(getattr(jnp.iinfo(dtype), end)) for end in ("min", "max"))
    # Halves, as the difference of two finite numbers may be infinite.
    scale = jnp.maximum((high / 2 - low / 2) / ((last - first) / 2), SMALLEST)
    scale = jnp.where(high == low, jnp.ones_like(scale), scale)
    finite = jnp.isfinite(scale)  # else values and zero points are 0, and all is 0 * scale: NaN
    zero = jnp.where(finite, jnp.clip(jnp.round(first - low / scale), first, last), 0.0)
    values = jnp.clip(jnp.round(split / scale) + zero, first, last)
    values = _joined(jnp.where(finite, values, 0.0).astype(dtype), x, blocks)
    return values, jnp.squeeze(scale, inner), jnp.squeeze(zero, inner).astype(dtype)


def largest_magnitude(x: jax.Array, axes: Any = None, *, keepdims: bool = False) -> jax.Array:
    """Returns max(|x|) along axes, None for all; NaN where there is one."""
    largest = jnp.max(jnp.abs(x), axes, keepdims=keepdims, initial=0.0)
    return _with_nan(largest, x, axes, keepdims=keepdims)


def _with_nan(extreme: jax.Array, x: jax.Array, axes: Any, *, keepdims: bool) -> jax.Array:
    """Returns a maximum or minimum of x; NaN where x has one, which XLA:CPU's may lose.

    No NaN is made where x has none: `jax.debug_nans` would find it.
    """
    lost = lax.stop_gradient(jnp.where(jnp.isnan(x), x, jnp.zeros_like(x)))
    return extreme + jnp.sum(lost, axes, keepdims=keepdims)


def scale_of(largest: jax.Array, dtype: Any) -> jax.Array:
    """Returns the scale of blocks with such a largest magnitude: 1 for 0, else no subnormal."""
    scale = jnp.maximum(largest / largest_number(dtype), SMALLEST)
    return jnp.where(largest == 0, jnp.ones_like(scale), scale)


def largest_number(dtype: Any) -> float:
    """Returns the largest number of a dtype of 8 or 4 bits: 448, 57344, 127 or 7."""
    return float((jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).max)


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns the nearest numbers of 8 or 4 bits, ties to even; the largest for what is beyond."""
    limit = largest_number(dtype)
    clipped = jnp.clip(x, -limit, limit)
    whole = jnp.round(clipped) if jnp.issubdtype(dtype, jnp.integer) else clipped
    return whole.astype(dtype)


def _split(
    x: jax.Array, blocks: Sequence[int | None]
) -> tuple[jax.Array, tuple[int, ...], tuple[int, ...]]:
    """Returns an array with each axis of blocks as two, and the axes that share a scale.

    After them come those of these that number the elements of a block.
    """
    extents, shape, axes, inner = x.shape, [], [], []
    x = jnp.pad(x, _padding(x, blocks)) if x.ndim else x
    for extent, block in zip(extents, blocks, strict=True):
        if block in (None, 1):
            axes += [len(shape)] if block is None else []
            shape.append(extent)
        else:
            inner.append(len(shape) + 1)
            shape += [-(-extent // block), block]
    return x.reshape(shape), (*axes, *inner), tuple(inner)


def _joined(values: jax.Array, x: jax.Array, blocks: Sequence[int | None]) -> jax.Array:
    """Returns the values of `_split`'s array as they lie in `x`."""
    pairs = zip(x.shape, _padding(x, blocks), strict=True)
    return values.reshape([n + more for n, (_, more) in pairs])[tuple(map(slice, x.shape))]


def _padding(x: jax.Array, blocks: Sequence[int | None]) -> list[tuple[int, int]]:
    """Returns how many elements each axis lacks of whole blocks."""
    return [(0, -n % block if block else 0) for n, block in zip(x.shape, blocks, strict=True)]


# The primitive.


def _reference(x: Any, *rows: Any, to: str, block: int, transposed: bool) -> list[jax.Array]:
    if rows:
        x = x.at[rows[0]].get(mode="fill", fill_value=0)
    last = (TILE, block) if transposed else (block, TILE)
    pair = by_xla(x, jnp.dtype(to), (*(1,) * (x.ndim - 2), *last))
    return [jnp.swapaxes(y, -1, -2) if transposed else y for y in pair]


def _batch(axis_data: Any, operands: Any, axes: Any, **params: Any) -> tuple[Any, list[int]]:
    if len(operands) > 1:
        return jax.vmap(partial(_reference, **params), axes)(*operands), [0, 0]
    x = mapped_first(axis_data.size, operands[0], axes[0])
    return hopper_quantize_p.bind(x, **params), [0, 0]


hopper_quantize_p = define_primitive(
    "hopper_quantize",
    _reference,
    multiple_results=True,
    rules=Rules(jvp="reference", batch=_batch),
    lowering=Lowering(lower_quantize),
)
