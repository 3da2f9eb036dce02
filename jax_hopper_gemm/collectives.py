"""Sums over devices inside the program of one device's share, and which device it is.

Such a program is lowered for one device, where JAX has no names of mesh axes: devices are numbers.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

Groups = tuple[tuple[int, ...], ...]

reduce_over_devices_p = Primitive("reduce_over_devices")
device_number_p = Primitive("device_number")


def reduce_over_devices(
    x: jax.Array,
    groups: Groups,
    *,
    dimension: int | None = None,
    by: Literal["add", "max"] = "add",
) -> jax.Array:
    """Returns the elementwise sum, or largest, of the arrays of each group of devices.

    Args:
      groups: numbers of devices; each device is in one group.
      dimension: along which each device of a group keeps a part of its own, in their order; None:
        each keeps all.
    """
    return reduce_over_devices_p.bind(x, groups=groups, dimension=dimension, by=by)


def _abstract_eval(x: Any, *, groups: Groups, dimension: int | None, by: str) -> Any:
    shape = list(x.shape)
    if dimension is not None:
        shape[dimension] //= len(groups[0])
    return x.update(shape=tuple(shape))


def _lower(
    ctx: mlir.LoweringRuleContext, value: Any, *, groups: Groups, dimension: int | None, by: str
) -> list[Any]:
    shared = {
        "replica_groups": ir.DenseIntElementsAttr.get(np.array(groups, np.int64)),
        "channel_handle": stablehlo.ChannelHandle.get(ctx.module_context.new_channel(), 1),
        "use_global_device_ids": ir.BoolAttr.get(True),
    }
    element = value.type.element_type
    if dimension is None:
        operation = stablehlo.AllReduceOp([value.type], [value], **shared)
    else:
        index = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), dimension)
        kind = ir.RankedTensorType.get(ctx.avals_out[0].shape, element)
        operation = stablehlo.ReduceScatterOp(kind, value, scatter_dimension=index, **shared)
    scalar = ir.RankedTensorType.get([], element)
    block = operation.regions[0].blocks.append(scalar, scalar)
    combine = {"add": stablehlo.AddOp, "max": stablehlo.MaxOp}[by]
    with ir.InsertionPoint(block):
        stablehlo.ReturnOp([combine(*block.arguments).result])
    return list(operation.results)


def device_number() -> jax.Array:
    """Returns the number of the device, () int32."""
    return device_number_p.bind().astype(np.int32)


def _lower_number(ctx: mlir.LoweringRuleContext) -> list[Any]:
    return list(stablehlo.PartitionIdOp().results)


device_number_p.def_abstract_eval(lambda: jax.core.ShapedArray((), np.dtype("uint32")))
mlir.register_lowering(device_number_p, _lower_number)
reduce_over_devices_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(reduce_over_devices_p, _lower)
