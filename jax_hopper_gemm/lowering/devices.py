"""Devices of a program that is being lowered, and named shardings with their axes rearranged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any

import jax
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from .. import dispatch
from ..fusion.memo import memoised


def devices_of(ctx: mlir.LoweringRuleContext) -> int:
    """Returns over how many devices XLA partitions; inside `jax.shard_map`, by the other axes."""
    left = axes_left(ctx)
    context: Any = ctx.module_context.axis_context
    return getattr(context, "num_devices", 1) if left is None else prod(n for _, n, _ in left)


def axes_left(ctx: mlir.LoweringRuleContext) -> list[tuple[int, int, int]] | None:
    """Returns the mesh axes of extent over 1 that `jax.shard_map` leaves; None outside.

    Of each: how many devices vary slower, its extent, how many vary faster.
    """
    context: Any = ctx.module_context.axis_context
    if (manual := getattr(context, "manual_axes", None)) is None:
        return None
    extents = list(context.mesh.shape.values())
    return [
        (prod(extents[:i]), n, prod(extents[i + 1 :]))
        for i, (axis, n) in enumerate(context.mesh.shape.items())
        if axis not in manual and n > 1
    ]


def platforms_of(ctx: mlir.LoweringRuleContext) -> tuple[str, ...]:
    return tuple(ctx.platforms or ctx.module_context.platforms)


_in_shard = ContextVar("in_shard", default=False)  # of this thread
lowers_shard = _in_shard.get  # whether this thread lowers within `lowering_shard`


@contextmanager
def lowering_shard() -> Iterator[None]:
    """Marks what this thread lowers within as one device's shard of a program for several."""
    before = _in_shard.set(True)
    try:
        yield
    finally:
        _in_shard.reset(before)


def is_whole_program(operation: Any) -> bool:
    """Whether an operation of MLIR is the function of the whole program that is being lowered.

    A shard's is not: XLA puts it in the place of a call.
    """
    names = operation.attributes
    is_main = "sym_name" in names and ir.StringAttr(names["sym_name"]).value == "main"
    return is_main and not lowers_shard()


def permuted_sharding(sharding: Any, permutation: tuple[int, ...]) -> Any:
    """Returns the sharding of the array whose axis i is axis `permutation[i]`.

    None stays None, and what is no sharding is JAX's to refuse.
    """
    if not isinstance(sharding, NamedSharding | PartitionSpec):
        return sharding
    partitions = padded_partitions(sharding, len(permutation))
    return with_partitions(sharding, tuple(partitions[axis] for axis in permutation))


def padded_partitions(sharding: Any, ndim: int) -> tuple[Any, ...]:
    """Returns one entry of the partition spec for each of `ndim` axes."""
    partitions = tuple(getattr(sharding, "spec", sharding).partitions)
    return partitions + (None,) * (ndim - len(partitions))


def with_partitions(sharding: Any, partitions: tuple[Any, ...]) -> Any:
    """Returns the sharding with another partition spec, on the same mesh; or such a spec."""
    if isinstance(sharding, PartitionSpec):
        return sharding.update(partitions=partitions)
    return sharding.update(spec=sharding.spec.update(partitions=partitions))


def current_device(candidates: Sequence[Any] = ()) -> dispatch.Device:
    """Returns the kind of GPU a program is lowered for.

    That is the first of `candidates` that is a CUDA device, else this process's first one,
    else, for want of any, `absent_device`.
    """
    for device in (*candidates, *_local_cuda_devices()):
        if capability := getattr(device, "compute_capability", None):
            major, minor = str(capability).split(".")
            gpu = dispatch.gpu_of(getattr(device, "device_kind", ""))
            return dispatch.Device((int(major), int(minor)), int(device.core_count), gpu=gpu)
    return dispatch.absent_device()


@memoised
def _local_cuda_devices() -> Sequence[Any]:
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:  # no CUDA backend here
        return ()
