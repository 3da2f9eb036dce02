"""Quantized arrays: values of 8 or 4 bits with float32 scales.

A scale is for a tensor, for each row or column, or for blocks. `quantized_products` multiplies two
such arrays, `weights` is about one beside an array of 16 bits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import index
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import export
from jax.typing import ArrayLike, DTypeLike

from ..gemm.dtypes import WEIGHTS, one_of
from ..gemm.spec import K_GROUPS, PROMOTION_K
from ..lowering.launch_operands import pack
from ..primitives.auto_axes import in_auto_axes, kept_sharding
from ..primitives.quantize import quantized, quantized_between
from ..primitives.scaled_dot import scale_of_each
from ..primitives.widen import unpack
from . import checks

BLOCK, BLOCKS = PROMOTION_K, K_GROUPS
_SIZES = ", ".join(map(str, sorted((1, *BLOCKS))))
STATIC = {"static": True}  # of a field that is no array
Class = TypeVar("Class", bound=type)


def storable(cls: Class) -> Class:
    """Makes a dataclass a pytree that a program takes or returns; `jax.export` can store it."""
    jax.tree_util.register_dataclass(cls)
    export.register_pytree_node_serialization(
        cls, serialized_name=f"jax_hopper_gemm.{cls.__name__}",
        serialize_auxdata=lambda static: json.dumps(static).encode(),
        deserialize_auxdata=lambda stored: tuple(json.loads(stored)),
    )  # fmt: skip
    return cls


def tell_flax(x: Any) -> None:
    """Tells Flax, where it is imported by now, how to store a dataclass of arrays."""
    if flax := sys.modules.get("flax.serialization"):
        flax.register_serialization_state(type(x), _arrays_of, _with_arrays, override=True)


def _arrays_of(x: Any) -> dict[str, Any]:
    return {f.name: getattr(x, f.name) for f in fields(x) if f.metadata != STATIC}


def _with_arrays(x: Any, arrays: Mapping[str, Any]) -> Any:
    if (names := set(_arrays_of(x))) != set(arrays):
        raise ValueError(
            f"{type(x).__name__}: a stored one has {sorted(arrays)}, expected {sorted(names)}"
        )
    return replace(x, **arrays)


@storable
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
    packed: bool = field(default=False, metadata=STATIC)
    zero: jax.Array | None = None

    __post_init__ = tell_flax

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.values.shape
        return (*shape[:-1], 2 * shape[-1]) if self.packed else shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """Returns `(values - zero) * scale`, computed in float32, as `dtype`."""
        blocks = blocks_of("dequantize", "self", self)
        wide = (unpack(self.values) if self.packed else self.values).astype(jnp.float32)
        if self.zero is not None:
            wide = wide - spread(self.zero, blocks, self.shape).astype(jnp.float32)
        return (wide * spread(self.scale, blocks, self.shape)).astype(dtype)

    def pack_weights(self) -> Quantized:
        """Returns int4 values as kernels read them: two neighbours along the last axis in a byte.

        On a GPU int4 arrays lie so in any case; elsewhere they take a byte each.

        Raises:
          TypeError: the values are not int4.
          ValueError: the last axis is odd, or there is none.
        """
        if jnp.dtype(self.values.dtype).name != "int4":
            raise TypeError(f"pack_weights: values are {checks.describe(self.values)}, not int4")
        if not self.ndim:
            raise ValueError(
                f"pack_weights: values are a scalar, {checks.describe(self.values)}, expected an "
                "axis whose neighbours are packed"
            )
        if self.shape[-1] % 2:
            raise ValueError(
                f"pack_weights: the last axis is {self.shape[-1]}, expected an even number"
            )
        half = kept_sharding(self.values, (*self.shape[:-1], self.shape[-1] // 2))
        packed = in_auto_axes(pack, half, self.values)  # an axis is split
        return Quantized(packed, self.scale, True, self.zero)


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

    Values have no derivative, as `jnp.round` has none; a scale has that of its block's largest
    magnitude. To train through it, add what it changes as a constant:
    `x + stop_gradient(quantize(x).dequantize() - x)` has the derivative of x, in its dtype.

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
    x, name = jnp.asarray(x), dtype_name(dtype)
    if name not in WEIGHTS:
        raise TypeError(f"quantize: dtype is {name}, expected {one_of(WEIGHTS)}")
    if not isinstance(symmetric, bool):
        raise TypeError(f"quantize: symmetric is {symmetric!r}, expected True or False")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"quantize: x is {checks.describe(x)}, expected floats")
    blocks = (None,) * x.ndim if block is None else _as_blocks(block)
    if len(blocks) != x.ndim:
        raise ValueError(
            f"quantize: block is {blocks}, expected {x.ndim} entries: x is {checks.describe(x)}"
        )
    if any(b not in (None, 1, *BLOCKS) for b in blocks):
        raise ValueError(f"quantize: block is {blocks}, expected {_SIZES} or None for each axis")
    if not symmetric and not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"quantize: {name} has no zero points, only int8 and int4 have: symmetric")
    run = partial(quantized if symmetric else quantized_between, dtype=dtype, blocks=blocks)
    counts = [-(-n // b) if b else 1 for n, b in zip(x.shape, blocks, strict=True)]
    shapes = (x.shape, counts, counts)[: 2 if symmetric else 3]
    shardings = tuple(kept_sharding(x, shape) for shape in shapes)
    values, scale, *zero = in_auto_axes(run, shardings, x)  # axes are cut into blocks
    return Quantized(values, scale, zero=zero[0] if zero else None)


def dtype_name(dtype: Any) -> str:
    try:
        return "None" if dtype is None else jnp.dtype(dtype).name
    except TypeError:
        return repr(dtype)


def _as_blocks(block: Any) -> tuple[int | None, ...]:
    try:
        return tuple(b if b is None else index(b) for b in block)
    except TypeError:
        raise TypeError(
            f"quantize: block is {block!r}, expected {_SIZES} or None for each axis"
        ) from None


def as_quantized(op: str, name: str, x: Any) -> Any:
    """Returns Qwix's `QArray` as a `Quantized`, also of a Flax variable; else `as_jax_array` of it.

    Its scales may belong to any number of neighbours: where these are no block, they are repeated
    for each of the largest blocks that they are a multiple of, or for each element.

    Raises:
      TypeError: its values are no numbers, as those of nf4.
    """
    held = getattr(x, "get_value", None)  # of a variable of Flax nnx
    if callable(held) and is_quantized(array := held()):
        return array
    if not all(hasattr(x, name) for name in ("qvalue", "scale", "zero_point")):
        return checks.as_jax_array(x)
    qtype, dtype = getattr(x, "qtype", None), jnp.dtype(x.qvalue.dtype)
    if isinstance(qtype, str) and jnp.issubdtype(dtype, jnp.unsignedinteger) and qtype != dtype:
        raise TypeError(
            f"{op}: {name} is of {qtype}, whose values {checks.describe(x.qvalue)} are indices of "
            "a table, expected numbers: multiply by what qwix.dequantize returns of it"
        )
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


def blocks_of(op: str, name: str, x: Quantized) -> tuple[int, ...]:
    """Returns for each axis how many elements share a scale: 1, a block, or 0 for all of them."""
    values, scale = x.values, x.scale
    checks.as_arrays(op, None, **{f"{name}.values": values, f"{name}.scale": scale})
    if not jnp.issubdtype(jnp.result_type(scale), jnp.floating):
        raise TypeError(
            f"{op}: the scale of {name} is {checks.describe(scale)}, expected floats: convert it "
            "to float32"
        )
    if x.packed and values.dtype != jnp.uint8:
        raise TypeError(
            f"{op}: {name} is packed, of values {checks.describe(values)}, expected u8: "
            "Quantized.pack_weights packs int4"
        )
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
    for extent, count in zip(x.shape, jnp.shape(scale), strict=True):
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


def spread(scale: jax.Array, blocks: Sequence[int], shape: Sequence[int]) -> jax.Array:
    """Returns scales of blocks along the first axes as those of elements, of an array's shape.

    Args:
      blocks: for each of these axes as `blocks_of`; 0 and 1 leave the scales as they are.
    """
    for axis, block in enumerate(blocks):
        if block in BLOCKS:
            scale = scale_of_each(scale, block, axis, shape[axis])
    return scale
