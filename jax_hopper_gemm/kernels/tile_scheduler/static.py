"""Schedulers that need no communication: a CTA knows its tiles from its own index."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class StaticState:
    """What all warps share: the number of cluster tiles."""

    total: Any


class StaticScheduler:
    """Persistent: cluster c of C takes tiles c, c + C, c + 2C, ...

    This is also the protocol of a tile scheduler; `tiles.Tiles` shows how roles use it. A tile is
    an index here.

    Attributes:
      smem_words: int64 words of shared memory for barriers and mailbox.
      needs_scheduler_warp: whether a warp of each cluster runs `run_scheduler_warp`.
    """

    smem_words = 0
    needs_scheduler_warp = False

    def __init__(self, spec):
        self.spec = spec

    def setup(self, words, args, num_reader_warps):
        """Called once by all threads, before the barriers are made visible.

        Args:
          words: shared memory pointer to `smem_words` int64 words.
          args: the kernel's parameters.
          num_reader_warps: warps of a CTA that call `next_tile`.

        Returns:
          The state that the other methods take.
        """
        return StaticState(args.raster.total)

    def first_tile(self, state):
        return cute.arch.block_idx()[0] // self.spec.cluster_m, Int32(0)

    def exists(self, state, tile):
        return tile < state.total

    def next_tile(self, state, tile, reader):
        return tile + cute.arch.grid_dim()[0] // self.spec.cluster_m, reader


class SingleTileScheduler(StaticScheduler):
    """One tile a CTA: as many clusters are launched as there are tiles."""

    def next_tile(self, state, tile, reader):
        return state.total, reader
