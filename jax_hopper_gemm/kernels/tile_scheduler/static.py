"""Schedulers that need no communication: a CTA knows its tiles from its own index."""

import cutlass.cute as cute
from cutlass import Int32


class StaticScheduler:
    """Persistent: cluster c of C takes tiles c, c + C, c + 2C, ...

    This is also the protocol of a tile scheduler. All roles of a CTA walk the same sequence:

        tile, reader = first_tile()
        while exists(tile): ...; tile, reader = next_tile(tile, reader)

    A tile is an index here. `reader` is the role's place in the mailbox of a scheduler that has
    one.
    """

    smem_words = 0  # int64 words of shared memory: barriers and mailbox
    needs_scheduler_warp = False

    def __init__(self, spec):
        self.spec = spec

    def setup(self, words, counter, raster, sizes, num_reader_warps):
        """Called once by all threads, before the barriers are made visible.

        Args:
          words: shared memory pointer to `smem_words` int64 words, or None.
          counter: global pointer to the int32 tile counter, or None.
          walk: the order of tiles.
          sizes: of groups; None.
          num_reader_warps: warps of a CTA that call `next_tile`.
        """
        self.total = raster.total

    def first_tile(self):
        return cute.arch.block_idx()[0] // self.spec.cluster_m, Int32(0)

    def exists(self, tile):
        return tile < self.total

    def next_tile(self, tile, reader):
        return tile + cute.arch.grid_dim()[0] // self.spec.cluster_m, reader


class SingleTileScheduler(StaticScheduler):
    """One tile a CTA: as many clusters are launched as there are tiles."""

    def next_tile(self, tile, reader):
        return self.total, reader
