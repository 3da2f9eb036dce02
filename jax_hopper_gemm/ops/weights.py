"""Weights: a quantized array beside one of 16 bits becomes such an array where it is read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..gemm.dtypes import HALVES, WEIGHTS
from ..gemm.subscripts import Subscripts
from ..primitives.auto_axes import in_auto_axes, kept_sharding
from ..primitives.scaled_dot import beside_result
from ..primitives.widen import hopper_widen
from . import checks
from .quantized import Quantized, blocks_of, spread
from .steps import OFFSET, SCALES


def is_weights(x: Any, other: Any) -> bool:
    """Whether a quantized array is multiplied by one of 16 bits."""
    dtype = getattr(other, "dtype", None)
    return isinstance(x, Quantized) and dtype is not None and jnp.dtype(dtype).name in HALVES


def weights_of_dot(
    op: str, lhs: Any, rhs: Any, dimension_numbers: Any, out_sharding: Any
) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """Returns the operands, weights as arrays, and scales and an offset beside the result."""
    if not (is_weights(lhs, rhs) or is_weights(rhs, lhs)):
        return (lhs, rhs), {}
    blocks_of(op, *(("lhs", lhs) if isinstance(lhs, Quantized) else ("rhs", rhs)))  # are arrays
    left, right = (jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (lhs, rhs))
    contracted, batch = checks.checked_axes(op, left, right, dimension_numbers)
    if len(contracted[0]) != 1:
        raise NotImplementedError(
            f"{op}: {len(contracted[0])} axes of weights are contracted, expected one: reshape them"
        )
    axes = contracted[0][0], contracted[1][0]
    pair, scales, zeros = weights_apart(op, (("lhs", lhs), ("rhs", rhs)), axes)
    of = Subscripts.of_dot_general((contracted, batch), lhs.ndim, rhs.ndim)
    letters: dict[str, str] = dict(zip(SCALES, (of.lhs, of.rhs), strict=True))
    found = {name: beside_result(x, letters[name], of.out) for name, x in scales.items()}
    if zeros:
        found[OFFSET] = lax.dot_general(
            *zeros, (contracted, batch), lax.Precision.HIGHEST, out_sharding=out_sharding
        )
    return pair, found


def widened(op: str, name: str, x: Quantized, axis: int, dtype: Any) -> tuple[jax.Array, Any]:
    """Returns weights as an array of 16 bits, and what its products are multiplied by.

    Inside `jax.jit` nobody writes this array where a kernel reads the numbers that it is made of.
    That of weights with zero points is written; see `weights_apart`. So is that of a dtype which no
    kernel reads, such as Qwix's int2.

    Args:
      axis: the contracted one; -2 of a vector is its own.

    Returns:
      The array; float32 scales of its rank, one along `axis`, or None where scales change along it:
      the array is then multiplied by them.
    """
    blocks, scale = blocks_of(op, name, x), jnp.asarray(x.scale, jnp.float32)
    read = x.packed or x.values.dtype.name in WEIGHTS
    if x.zero is not None or not read:
        return x.dequantize(dtype), None
    axis = max(axis, -x.ndim) % x.ndim
    others = [0 if i == axis else block for i, block in enumerate(blocks)]
    scale = spread(scale, others, x.shape)
    if blocks[axis] == 0:
        return hopper_widen(x.values, dtype, packed=x.packed), scale
    group = {"axis": axis - x.ndim, "group": blocks[axis], "packed": x.packed}
    return hopper_widen(x.values, dtype, scale, **group), None


def weights_apart(
    op: str, operands: tuple[tuple[str, Any], tuple[str, Any]], axes: tuple[int, int]
) -> tuple[tuple[Any, Any], dict[str, Any], tuple[Any, Any] | None]:
    """Returns what `widened_pair` does, and the operands of a product to subtract, or None.

    Where weights have zero points:

        x @ ((v - z) * s)  =  x @ (v * s)  -  (sums of x along the groups of K) @ (z * s)

    Its contracted axes, where the others have theirs, are as long as there are groups.

    Args:
      axes: the contracted one of each operand.
    """
    found, subtracted = [*operands], None
    for i, (name, x) in enumerate(operands):
        _, other = operands[1 - i]
        if not is_weights(x, other) or x.zero is None:
            continue
        axis, along = max(axes[i], -x.ndim) % x.ndim, max(axes[1 - i], -other.ndim) % other.ndim
        blocks, extent = blocks_of(op, name, x), x.shape[axis]
        if blocks[axis] == 1:  # a zero point for each element of K: as many products as of x
            continue
        zeros = jnp.asarray(x.scale, jnp.float32) * jnp.asarray(x.zero).astype(jnp.float32)
        others = [0 if i == axis else block for i, block in enumerate(blocks)]
        zeros = spread(zeros, others, x.shape)
        groups, group = zeros.shape[axis], blocks[axis] or extent
        shape = [groups if i == axis else n for i, n in enumerate(x.shape)]
        of_groups = partial(_sums_of_groups, axis=along, groups=groups, group=group)
        kept = kept_sharding(other, (*other.shape[:along], groups, *other.shape[along + 1 :]))
        sums = in_auto_axes(of_groups, kept, jnp.asarray(other))  # an axis is cut
        apart = [jnp.broadcast_to(zeros, shape), sums]
        found[i] = name, replace(x, zero=None)
        subtracted = apart[i], apart[1 - i]
    return *widened_pair(op, (found[0], found[1]), axes), subtracted


def _sums_of_groups(x: jax.Array, *, axis: int, groups: int, group: int) -> jax.Array:
    """Returns float32 sums of every `group` elements along an axis, the last one's of the rest."""
    lead, extent, rest = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    missing = [(0, groups * group - extent if i == axis else 0) for i in range(x.ndim)]
    wide = jnp.pad(x.astype(jnp.float32), missing)
    return jnp.sum(wide.reshape(*lead, groups, group, *rest), axis + 1)


def widened_pair(
    op: str, operands: tuple[tuple[str, Any], tuple[str, Any]], axes: tuple[int, int]
) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """Returns the operands of a product, weights as arrays; and scales of its result.

    These have the rank and the name in `SCALES` of their operand.
    """
    arrays, scales = [], {}
    (_, lhs), (_, rhs) = operands
    for (name, x), other, axis, of in zip(operands, (rhs, lhs), axes, SCALES, strict=True):
        if is_weights(x, other):
            x, scale = widened(op, name, x, axis, other.dtype)
            if scale is not None:
                scales[of] = scale
        arrays.append(x)
    return (arrays[0], arrays[1]), scales
