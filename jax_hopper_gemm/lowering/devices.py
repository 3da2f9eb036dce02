"""What lowering knows of a program's devices: their platforms, and over how many XLA shares it."""

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


class _Share(threading.local):
    """Whether this thread lowers what one of several devices runs."""

    lowered = False


_share = _Share()


@contextmanager
def lowering_shard() -> Iterator[None]:
    """What this thread lowers within is one device's share of a program for several."""
    before, _share.lowered = _share.lowered, True
    try:
        yield
    finally:
        _share.lowered = before


def lowers_shard() -> bool:
    """Whether this thread lowers within `lowering_shard`."""
    return _share.lowered
