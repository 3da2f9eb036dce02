"""The program of one device's shard: what it knows beside its operands, and sums over devices.

Such a program is lowered for one device, where JAX has no names of mesh axes: devices are numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from .choose_shards import Factors, Shard
from .mesh import Axes, Mesh

Groups = tuple[tuple[int, ...], ...]

reduce_over_devices_p = Primitive("reduce_over_devices")
device_number_p = Primitive("device_number")


def _abstract_eval(x: Any, *, groups: Groups, dimension: int | None, by: str) -> Any:
    shape = list(x.shape)
    if dimension is not None:
        shape[dimension] //= len(groups[0])
    return x.update(shape=tuple(shape))


def _lower(
    ctx: mlir.LoweringRuleContext, value: Any, *, groups: Groups, dimension: int | None, by: str
) -> list[Any]:
    listed: Any = np.array(groups, np.int64)
    shared = {
        "replica_groups": ir.DenseIntElementsAttr.get(listed),
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


device_number_p.def_abstract_eval(lambda: ShapedArray((), np.dtype("uint32")))
mlir.register_lowering(device_number_p, lambda ctx: list(stablehlo.PartitionIdOp().results))
reduce_over_devices_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(reduce_over_devices_p, _lower)


@dataclass(frozen=True)
class ShardContext:
    """What the program of a shard knows beside its operands."""

    mesh: Mesh
    letters: Factors
    shard: Shard
    sum_dtype: str  # in which products of shards are to be summed
    # Inside `jax.shard_map` over all mesh axes but one: how many devices vary slower than that one,
    # its extent, how many vary faster. `mesh` then is this axis.
    axis: tuple[int, int, int] | None = None

    def part(self, letter: str, *, summed: bool = False) -> tuple[Any, int]:
        """Returns which part of a letter the device has, int32, and of how many.

        It is that of the factors, or if `summed` that of the product behind `sum`.
        """
        axes = self.shard.result(letter) if summed else self.shard.axes.get(letter, ())
        if not axes:
            return 0, 1
        device = device_number_p.bind().astype(np.int32)
        if self.axis is not None:
            _, extent, faster = self.axis
            device = device // faster % extent
        return self.mesh.index(device, axes), self.mesh.count(axes)

    def sum(self, product: jax.Array, letters: str | None = None) -> jax.Array:
        """Returns the sum over devices of a product of factors, of which each keeps its shard.

        `letters` are of its axes, if not those of the call's product.
        """
        letters = self.letters.out if letters is None else letters
        for letter, axes in self.shard.scattered.items():
            product = self._over(product, axes, "add", letters.index(letter))
        return self._over(product, self.shard.summed, "add")

    def reduce(self, x: jax.Array, letters: Iterable[str], by: Literal["add", "max"]) -> jax.Array:
        """Returns the sum, or largest, over the devices that shard letters of the product."""
        axes = tuple(axis for letter in letters for axis in self.shard.result(letter))
        return self._over(x, axes, by)

    def _over(
        self, x: jax.Array, axes: Axes, by: Literal["add", "max"], dimension: int | None = None
    ) -> jax.Array:
        """Returns the sum, or largest, of the arrays of devices that differ along axes alone.

        Along `dimension` each of them keeps a part, in their order; None: each keeps all.
        """
        if not axes:
            return x
        groups = self._groups(axes)
        return reduce_over_devices_p.bind(x, groups=groups, dimension=dimension, by=by)

    def _groups(self, axes: Axes) -> Groups:
        groups = self.mesh.groups(axes)
        if self.axis is None:
            return groups
        slower, extent, faster = self.axis
        devices = np.arange(slower * extent * faster).reshape(slower, extent, faster)
        lines = devices.swapaxes(1, 2).reshape(-1, extent).tolist()
        return tuple(tuple(line[i] for i in group) for line in lines for group in groups)
