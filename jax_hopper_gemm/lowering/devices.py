"""Devices of a program that is being lowered: platforms, and over how many XLA partitions it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

from jax.interpreters import mlir


def devices_of(ctx: mlir.LoweringRuleContext) -> int:
    """Returns over how many devices XLA partitions; inside `jax.shard_map`, by the other axes."""
    left = extents_left(ctx)
    context: Any = ctx.module_context.axis_context
    return getattr(context, "num_devices", 1) if left is None else prod(left)


def extents_left(ctx: mlir.LoweringRuleContext) -> list[int] | None:
    """Returns the extents over 1 of the mesh axes that `jax.shard_map` leaves; None outside."""
    context: Any = ctx.module_context.axis_context
    if (manual := getattr(context, "manual_axes", None)) is None:
        return None
    return [n for axis, n in context.mesh.shape.items() if axis not in manual and n > 1]


def axis_left(ctx: mlir.LoweringRuleContext) -> tuple[int, int, int] | None:
    """Returns that axis of the mesh: the devices that vary slower, itself, those that vary faster.

    None outside of `jax.shard_map`.
    """
    context: Any = ctx.module_context.axis_context
    if (manual := getattr(context, "manual_axes", None)) is None:
        return None
    names, extents = zip(*context.mesh.shape.items(), strict=True)
    (i,) = (i for i, n in enumerate(extents) if names[i] not in manual and n > 1)
    return prod(extents[:i]), extents[i], prod(extents[i + 1 :])


def platforms_of(ctx: mlir.LoweringRuleContext) -> tuple[str, ...]:
    return tuple(ctx.platforms or ctx.module_context.platforms)


class _Shard(threading.local):
    """Whether this thread lowers what one of several devices runs."""

    lowered = False


_shard = _Shard()


@contextmanager
def lowering_shard() -> Iterator[None]:
    """Marks what this thread lowers within as one device's shard of a program for several."""
    before, _shard.lowered = _shard.lowered, True
    try:
        yield
    finally:
        _shard.lowered = before


def lowers_shard() -> bool:
    """Whether this thread lowers within `lowering_shard`."""
    return _shard.lowered
