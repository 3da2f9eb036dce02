"""The tiles of one CTA, as each of its warps goes through them."""

from dataclasses import dataclass
from typing import Any

from .tile_coords import coords_of


@dataclass(frozen=True)
class Tiles:
    """All roles of a CTA see the same sequence:

        tile, reader = tiles.first()
        while tiles.exists(tile):
            coords = tiles.coords(tile)
            ...
            tile, reader = tiles.next(tile, reader)

    A tile is what the scheduler names it by; `reader` counts the messages that the warp has read
    from the scheduler's mailbox.

    Attributes:
      scheduler: the tile scheduler.
      state: the result of its `setup`.
      args: the kernel's parameters.
      cta: `CtaInCluster`.
    """

    spec: Any
    scheduler: Any
    state: Any
    args: Any
    cta: Any

    def first(self):
        return self.scheduler.first_tile(self.state)

    def exists(self, tile):
        return self.scheduler.exists(self.state, tile)

    def next(self, tile, reader):
        return self.scheduler.next_tile(self.state, tile, reader)

    def coords(self, tile):
        return coords_of(self.spec, self.args, tile, self.cta)
