"""Quantized arrays: values of 8 or 4 bits with float32 scales, and their products.

A scale is for a tensor, for each row or column, or for blocks. Where it does not change along the
contracted axis it is multiplied by what the kernel has summed, else while it sums. Beside an array
of 16 bits a quantized one is weights: it becomes such an array where a product reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..gemm.dtypes import HALVES, QUANTIZED, WEIGHTS, one_of
from ..gemm.product import Options
from ..gemm.spec import K_GROUPS, PROMOTION_K
from ..lowering.emit import pack
from ..primitives.quantize import quantized, quantized_between
from ..primitives.scaled_dot import hopper_scaled_dot
from ..primitives.widen import hopper_widen, unpack
from . import checks
from .batch_invariance import in_contexts
from .dense_run import JaxProduct, run
from .steps import SCALES, Steps

BLOCK, BLOCKS = PROMOTION_K, K_GROUPS


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scale", "zero"),
    meta_fields=("packed",),
)
@dataclass(frozen=True)
class Quantized:
    """An array as `(values - zero) * scale` of 8 or 4 bits; products take it as it is.

    Attributes:
      values: float8_e4m3fn, float8_e5m2, int8 or int4.
      scale: float32, of the same rank. Along each axis it has one entry for each of the array's,
        one for each 128, 64 or 32 of them (rounded up), or one alone.
      packed: whether `values` are uint8, as `pack_weights` makes int4.
      zero: of weights, zero points in the shape of `scale`, or None: which value stands for 0.
    """

    values: jax.Array
    scale: jax.Array
    packed: bool = False
    zero: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        *others, last = self.values.shape
        return (*others, 2 * last if self.packed else last)

    @property
    def ndim(self) -> int:
        return self.values.ndim

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """Returns `(values - zero) * scale`, computed in float32."""
        scale, zero = self.scale, self.zero
        for axis, block in enumerate(_blocks("dequantize", "self", self)):
            scale = _each(scale, axis, block, self.shape[axis])
            zero = None if zero is None else _each(zero, axis, block, self.shape[axis])
        wide = (unpack(self.values) if self.packed else self.values).astype(jnp.float32)
        wide = wide if zero is None else wide - zero.astype(jnp.float32)
        return (wide * scale).astype(dtype)

    def pack_weights(self) -> Quantized:
        """Returns int4 values as kernels read them: two neighbours along the last axis in a byte.

        Without it XLA packs them for each product.

        Raises:
          TypeError: the values are not int4.
          ValueError: the last axis is odd.
        """
        if jnp.dtype(self.values.dtype).name != "int4":
            raise TypeError(f"pack_weights: values are {checks.describe(self.values)}, not int4")
        if self.shape[-1] % 2:
            raise ValueError(
                f"pack_weights: the last axis is {self.shape[-1]}, expected an even number"
            )
        return Quantized(pack(self.values), self.scale, True, self.zero)


class QArray(Protocol):
    """The fields of Qwix's quantized array."""

    @property
    def qvalue(self) -> Any: ...

    @property
    def scale(self) -> Any: ...

    @property
    def zero_point(self) -> Any: ...


def quantize(
    x: ArrayLike,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    block: Sequence[int | None] | None = None,
    *,
    symmetric: bool = True,
) -> Quantized:
    """Returns an array in 8 or 4 bits, each block's largest magnitude as the largest number.

    The scale of a block is max(|x|) / largest number of `dtype`: 448, 57344, 127 or 7; at least
    2**-126, so that none is subnormal. Values are rounded to nearest, ties to even. A block of
    zeros has scale 1. One that holds an infinity has an infinite scale, one that holds a NaN a NaN:
    times its scale, all of it is NaN.

    Args:
      x: floats.
      dtype: float8_e4m3fn, float8_e5m2, int8 or int4.
      block: for each axis how many elements share a scale: 1, 32, 64, 128, or None for all. None
        alone is one scale for the tensor. Where both operands are quantized `(1, 128)` suits
        activations and gradients, `(128, 128)` weights; beside an array of 16 bits weights (K, N)
        take `(None, 1)`, or `(128, 1)` for one scale each 128 of K.
      symmetric: False gives each block of integers a zero point, so that its smallest number, or 0,
        and its largest, or 0, become the ends of `dtype`: for weights that lie to one side of 0.

    Raises:
      TypeError: `x` is not an array of floats, or `dtype` is none of those.
      ValueError: `block` has another length than `x` has axes, or an entry that it cannot have; or
        floats of 8 bits are asked for zero points.
    """
    (x,) = checks.as_arrays("quantize", x=x)
    x, name = jnp.asarray(x), jnp.dtype(dtype).name
    if name not in WEIGHTS:
        raise TypeError(f"quantize: dtype is {name}, expected {one_of(WEIGHTS)}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"quantize: x is {checks.describe(x)}, expected floats")
    blocks = (None,) * x.ndim if block is None else tuple(block)
    if len(blocks) != x.ndim:
        raise ValueError(
            f"quantize: block is {blocks}, expected {x.ndim} entries: x is {checks.describe(x)}"
        )
    if any(b not in (None, 1, *BLOCKS) for b in blocks):
        sizes = ", ".join(map(str, sorted((1, *BLOCKS))))
        raise ValueError(f"quantize: block is {blocks}, expected {sizes} or None for each axis")
    if symmetric:
        return Quantized(*quantized(x, dtype, blocks))
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"quantize: {name} has no zero points, only int8 and int4 have: symmetric")
    values, scale, zero = quantized_between(x, dtype, blocks)
    return Quantized(values, scale, zero=zero)


def as_quantized(op: str, name: str, x: Any) -> Any:
    """Returns Qwix's `QArray` as a `Quantized`, anything else as it is.

    Its scales may belong to any number of neighbours: where these are no block, they are repeated
    for each of the largest blocks that they are a multiple of, or for each element.
    """
    if not all(hasattr(x, field) for field in ("qvalue", "scale", "zero_point")):
        return x
    scale, zero = jnp.asarray(x.scale, jnp.float32), x.zero_point
    for axis, (extent, count) in enumerate(zip(x.qvalue.shape, scale.shape, strict=True)):
        tile = extent // count
        if count > 1:
            block = max(block for block in (1, *BLOCKS) if tile % block == 0)
            scale = jnp.repeat(scale, tile // block, axis)
            zero = None if zero is None else jnp.repeat(zero, tile // block, axis)
    return Quantized(x.qvalue, scale, zero=zero)


def is_quantized(*operands: Any) -> bool:
    return any(isinstance(x, Quantized) for x in operands)


def _blocks(op: str, name: str, x: Quantized) -> tuple[int, ...]:
    """Returns for each axis how many elements share a scale: 1, a block, or 0 for all of them."""
    values, scale = x.values, x.scale
    if x.zero is not None and jnp.shape(x.zero) != jnp.shape(scale):
        raise ValueError(
            f"{op}: the zero points of {name} are {checks.describe(x.zero)}, expected the shape of "
            f"its scale, {checks.describe(scale)}"
        )
    if jnp.ndim(scale) != jnp.ndim(values):
        raise ValueError(
            f"{op}: the scale of {name} is {checks.describe(scale)}, expected the rank of its "
            f"values, {checks.describe(values)}"
        )
    found = []
    for extent, count in zip(x.shape, scale.shape, strict=True):
        sizes = {-(-extent // block): block for block in BLOCKS} | {extent: 1, 1: 0}
        if count not in sizes:
            counts = [f"{-(-extent // block)} (one for each {block})" for block in BLOCKS]
            raise ValueError(
                f"{op}: the scale of {name} is {checks.describe(scale)}, of values "
                f"{checks.describe(values)}: an axis of {extent} has {extent}, "
                f"{', '.join(counts)} or 1"
            )
        found.append(sizes[count])
    return tuple(found)


@dataclass(frozen=True)
class Operand:
    """A quantized operand of a product, its axes in the order batch, free, contracted."""

    values: jax.Array
    scale: jax.Array
    blocks: tuple[int, ...]
    batch: int  # how many axes of each kind; one is contracted
    free: int

    @property
    def constant(self) -> bool:
        """Whether no scale changes along the contracted axis."""
        return self.blocks[-1] == 0

    def flat(self) -> tuple[jax.Array, jax.Array]:
        """Returns matrices (B, rows, K) or (rows, K), and their block scales."""
        batch, free = self.batch, self.free
        values, scale, blocks = self.values, self.scale, list(self.blocks)
        if free != 1 or blocks[batch] == 0:  # one for each row
            for axis in range(batch, batch + free):
                scale = _each(scale, axis, blocks[axis], values.shape[axis])
            wide = (*scale.shape[:batch], *values.shape[batch:-1], scale.shape[-1])
            scale = jnp.broadcast_to(scale, wide)
        for axis in range(batch):
            scale = _each(scale, axis, blocks[axis], values.shape[axis])
        along_k = -(-values.shape[-1] // BLOCK)
        if blocks[-1] == 1 and values.shape[-1] != along_k:
            raise NotImplementedError("a scale for each element of the contracted axis")
        rows = int(np.prod(scale.shape[batch : batch + free], dtype=int))
        scale = jnp.broadcast_to(scale, (*values.shape[:batch], *scale.shape[batch:-1], along_k))
        lead = (int(np.prod(values.shape[:batch], dtype=int)),) if batch else ()
        return values.reshape(*lead, -1, values.shape[-1]), scale.reshape(*lead, rows, along_k)


def run_quantized(
    operands: tuple[tuple[str, Any], ...],
    dimension_numbers: Any,
    steps: Steps,
    following: tuple[Any, ...],
    options: Options,
) -> Any:
    """Returns a product of quantized arrays and what follows it.

    Args:
      operands: two, each one's name, for messages, and itself.
      dimension_numbers: as in `dot_general`; one axis is contracted.
      steps: what follows; `following` are its operands, checked.
      options: `preferred_element_type` None is float32.
    """
    op = steps.op
    for name, x in operands:
        if not isinstance(x, Quantized):
            raise TypeError(
                f"{op}: {name} is {checks.describe(x)} beside a quantized array: quantize it, too"
            )
        if x.zero is not None:
            raise NotImplementedError(
                f"{op}: {name} has zero points beside a quantized array; kernels multiply "
                "symmetric ones: quantize it without, or pass the other one in 16 bits"
            )
        if x.packed or x.values.dtype.name not in QUANTIZED:
            raise TypeError(
                f"{op}: {name} is of int4 beside a quantized array: pass the other one in 16 bits"
            )
    (lhs_k, rhs_k), (lhs_batch, rhs_batch) = dimension_numbers
    if len(lhs_k) != 1:
        raise NotImplementedError(
            f"{op}: {len(lhs_k)} axes of quantized arrays are contracted, expected one: reshape "
            "them"
        )
    axes = (lhs_k, lhs_batch), (rhs_k, rhs_batch)
    lhs, rhs = (_arranged(op, *x, *own) for x, own in zip(operands, axes, strict=True))
    preferred = options.preferred_element_type
    single = jnp.float32 if preferred is None else preferred
    if lhs.constant and rhs.constant:
        scales = (_broadcast(lhs, rhs.free, 0), _broadcast(rhs, 0, lhs.free))
        scaled = replace(steps, named=(*SCALES, *steps.named))
        numbers = ("dimension_numbers", dimension_numbers), ("out_sharding", None)
        values = tuple(x.values for _, x in operands)
        options = replace(options, preferred_element_type=single)
        return run(
            JaxProduct(lax.dot_general, numbers), values, scaled, (*scales, *following), options
        )
    (l_values, l_scale), (r_values, r_scale) = lhs.flat(), rhs.flat()
    dtype = jnp.dtype(single if steps.plain else jnp.float32)
    options = in_contexts(replace(options, preferred_element_type=dtype))
    product = hopper_scaled_dot(l_values, r_values, l_scale, r_scale, options)
    shape = (
        *lhs.values.shape[: lhs.batch], *lhs.values.shape[lhs.batch : -1],
        *rhs.values.shape[rhs.batch : -1],
    )  # fmt: skip
    product = product.reshape(shape)
    if isinstance(preferred, tuple):
        return steps.after(product, following, jnp.dtype("float32"), preferred)
    return steps.after(product, following, jnp.dtype(single), None)


def _each(scale: jax.Array, axis: int, block: int, extent: int) -> jax.Array:
    """Returns scales of blocks along an axis as those of its elements; others unchanged."""
    if block not in BLOCKS:
        return scale
    return lax.slice_in_dim(jnp.repeat(scale, block, axis), 0, extent, axis=axis)


def is_weights(x: Any, other: Any) -> bool:
    """Whether a quantized array is multiplied by one of 16 bits."""
    dtype = getattr(other, "dtype", None)
    return isinstance(x, Quantized) and dtype is not None and jnp.dtype(dtype).name in HALVES


def widened(op: str, name: str, x: Quantized, axis: int, dtype: Any) -> tuple[jax.Array, Any]:
    """Returns weights as an array of 16 bits, and what its products are multiplied by.

    Inside `jax.jit` nobody writes this array where a kernel reads the numbers that it is made of.
    That of weights with zero points is written; see `zeros_apart`.

    Args:
      axis: the contracted one; -2 of a vector is its own.

    Returns:
      The array; float32 scales of its rank, one along `axis`, or None where scales change along it:
      the array is then multiplied by them.
    """
    blocks, scale = _blocks(op, name, x), jnp.asarray(x.scale, jnp.float32)
    if x.zero is not None:
        return x.dequantize(dtype), None
    axis = max(axis, -x.ndim) % x.ndim
    for i, block in enumerate(blocks):
        scale = scale if i == axis else _each(scale, i, block, x.shape[i])
    if blocks[axis] == 0:
        return hopper_widen(x.values, dtype, packed=x.packed), scale
    group = {"axis": axis - x.ndim, "group": blocks[axis], "packed": x.packed}
    return hopper_widen(x.values, dtype, scale, **group), None


def zeros_apart(
    op: str, operands: tuple[tuple[str, Any], tuple[str, Any]], axes: tuple[int, int]
) -> tuple[tuple[Any, Any], tuple[Any, Any] | None]:
    """Returns the operands without zero points, and the operands of a product to subtract.

        x @ ((v - z) * s)  =  x @ (v * s)  -  (sums of x along the groups of K) @ (z * s)

    Its contracted axes, where the others have theirs, are as long as there are groups.

    Args:
      axes: the contracted one of each operand.
    """
    pair: list[Any] = [x for _, x in operands]
    for i, (name, x) in enumerate(operands):
        other = pair[1 - i]
        if not is_weights(x, other) or x.zero is None:
            continue
        axis, along = max(axes[i], -x.ndim) % x.ndim, max(axes[1 - i], -other.ndim) % other.ndim
        blocks, extent = _blocks(op, name, x), x.shape[axis]
        if blocks[axis] == 1:  # a zero point for each element of K: as many products as of x
            continue
        zeros = jnp.asarray(x.scale, jnp.float32) * jnp.asarray(x.zero).astype(jnp.float32)
        for other_axis, block in enumerate(blocks):
            if other_axis != axis:
                zeros = _each(zeros, other_axis, block, x.shape[other_axis])
        groups, group = zeros.shape[axis], blocks[axis] or extent
        shape = [groups if i == axis else n for i, n in enumerate(x.shape)]
        padding = [(0, groups * group - extent if i == along else 0) for i in range(other.ndim)]
        wide = jnp.pad(jnp.asarray(other).astype(jnp.float32), padding)
        sums = wide.reshape(*wide.shape[:along], groups, group, *wide.shape[along + 1 :])
        apart = [jnp.broadcast_to(zeros, shape), jnp.sum(sums, along + 1)]
        pair[i] = replace(x, zero=None)
        return (pair[0], pair[1]), (apart[i], apart[1 - i])
    return (pair[0], pair[1]), None


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


def beside_result(
    scale: jax.Array, contracted: int, batch: Sequence[int], others: int
) -> jax.Array:
    """Returns the scales of an operand of `dot_general` as they broadcast against its result.

    Args:
      contracted, batch: these axes of the operand.
      others: how many free axes of the other one lie before its own; if negative, so many behind.
    """
    free = [i for i in range(scale.ndim) if i not in (contracted, *batch)]
    shape = [scale.shape[i] for i in (*batch, *free)]
    shape[len(batch) : len(batch)] = [1] * max(others, 0)
    return lax.transpose(scale, (*batch, *free, contracted)).reshape(*shape, *[1] * max(-others, 0))


def _arranged(
    op: str, name: str, x: Quantized, contracted: Sequence[int], batch: Sequence[int]
) -> Operand:
    blocks, scale = list(_blocks(op, name, x)), x.scale
    for axis, block in enumerate(blocks):
        if block not in BLOCKS or block == BLOCK:
            continue
        if axis in contracted:
            raise NotImplementedError(
                f"{op}: {name} has a scale for each {block} of the contracted axis; beside a "
                f"quantized array kernels take one for each {BLOCK}: pass the other in 16 bits"
            )
        scale, blocks[axis] = _each(scale, axis, block, x.shape[axis]), 1
    free = [axis for axis in range(x.ndim) if axis not in (*contracted, *batch)]
    order = (*batch, *free, *contracted)
    return Operand(
        lax.transpose(x.values, order), lax.transpose(scale, order),
        tuple(blocks[axis] for axis in order), len(batch), len(free),
    )  # fmt: skip


def _broadcast(x: Operand, behind: int, before: int) -> jax.Array:
    """Returns scales that are constant along K as they broadcast against the result.

    Args:
      behind, before: how many free axes of the other operand follow or precede.
    """
    scale = lax.squeeze(x.scale, (x.scale.ndim - 1,))
    for axis, block in enumerate(x.blocks[:-1]):
        scale = _each(scale, axis, block, x.values.shape[axis])
    if scale.size == 1:
        return scale.reshape(())
    batch, own = scale.shape[: x.batch], scale.shape[x.batch :]
    return scale.reshape(*batch, *(1,) * before, *own, *(1,) * behind)
