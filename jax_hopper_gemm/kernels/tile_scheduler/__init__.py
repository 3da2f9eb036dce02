"""Tile schedulers: which tile a CTA works on next. One policy a file."""

from .dynamic import DynamicScheduler
from .grouped import GroupedScheduler
from .static import SingleTileScheduler, StaticScheduler

TILE_SCHEDULERS = {
    "single": SingleTileScheduler,
    "static": StaticScheduler,
    "dynamic": DynamicScheduler,
}


def make_scheduler(spec):
    """Returns the scheduler of `spec`'s tiles; that of groups claims statically or dynamically."""
    return (GroupedScheduler if spec.grouped else TILE_SCHEDULERS[spec.tile_scheduler])(spec)


__all__ = ["TILE_SCHEDULERS", "make_scheduler"]
