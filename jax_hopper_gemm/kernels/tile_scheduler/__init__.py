"""Tile schedulers: which tile a CTA works on next. One policy a file."""

from .dynamic import DynamicScheduler
from .static import SingleTileScheduler, StaticScheduler

TILE_SCHEDULERS = {
    "single": SingleTileScheduler,
    "static": StaticScheduler,
    "dynamic": DynamicScheduler,
}

__all__ = ["TILE_SCHEDULERS", "DynamicScheduler", "SingleTileScheduler", "StaticScheduler"]
