"""The JAX primitive `hopper_widen`: numbers of 8 and 4 bits as 16-bit floats, times their scales.

    values (..., K, ...), scale (..., ceil(K / group), ...)  ->  values * scale

The other axes of a scale are those of the values, or 1. It is computed in float32 and rounded once.
Where a product reads the result, a kernel may read values and scales in its place, and then scales
what it sums of each group, without that rounding (`lowering.origins`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.interpreters import mlir

from ..lowering.launch_operands import in_words
from ..lowering.origins import mark_widened
from ..lowering.register import Lowering, lower_fun_once
from .auto_axes import in_auto_axes
from .define import Rules, define_primitive, mapped_first


def hopper_widen(
    values: jax.Array, dtype: Any, scale: jax.Array | None = None, axis: int = 0, *,
    group: int = 0, packed: bool = False,
) -> jax.Array:  # fmt: skip
    """Returns an array in a 16-bit dtype.

    Args:
      values: of 8 or 4 bits; or `packed`, as `lowering.launch_operands.pack` returns it.
      scale: float32, of the rank of the values: along `axis`, counted from the end, one for each
        `group` of them.
    """
    params = {"dtype": np.dtype(dtype), "axis": axis, "group": group, "packed": packed}
    widen = partial(hopper_widen_p.bind, **params)
    arrays = (values,) if scale is None else (values, scale)
    return in_auto_axes(widen, jax.typeof(values).sharding, *arrays)


def unpack(packed: jax.Array) -> jax.Array:
    """Returns the int8 numbers that `lowering.launch_operands.pack` was given as int4."""
    pairs = lax.bitcast_convert_type(packed, jnp.int4)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1]).astype(jnp.int8)


def _reference(
    values: Any, *scale: Any, dtype: Any, axis: int, group: int, packed: bool
) -> jax.Array:
    values = unpack(values) if packed else values
    if not scale:
        return lax.convert_element_type(values, dtype)
    (each,), axis = scale, values.ndim + axis
    each = lax.broadcast_in_dim(
        each, (*each.shape[: axis + 1], group, *each.shape[axis + 1 :]),
        tuple(i + (i > axis) for i in range(each.ndim)),
    )  # fmt: skip
    shape = list(scale[0].shape)
    shape[axis] *= group
    each = lax.slice_in_dim(each.reshape(shape), 0, values.shape[axis], axis=axis)
    return lax.convert_element_type(values.astype(jnp.float32) * each, dtype)


def _batch(axis_data: Any, operands: Any, axes: Any, **params: Any) -> tuple[Any, int]:
    pairs = zip(operands, axes, strict=True)
    mapped = [mapped_first(axis_data.size, x, axis) for x, axis in pairs]
    return hopper_widen_p.bind(*mapped, **params), 0


_lower_to_xla = lower_fun_once(lambda *args, **params: in_words(_reference(*args, **params)))


def _lower_for_cuda(ctx: mlir.LoweringRuleContext, *values: Any, **params: Any) -> Any:
    results = _lower_to_xla(ctx, *values, **params)
    axis = params["axis"] if params["group"] else 0
    mark_widened(results[0], values, axis, params["group"])
    return results


hopper_widen_p = define_primitive(
    "hopper_widen",
    _reference,
    rules=Rules(jvp="reference", batch=_batch),
    lowering=Lowering(_lower_for_cuda),
)
