"""Schedulers that need no communication: a CTA knows its tiles from its own index."""

import cutlass.cute as cute
from cutlass import Int32


class StaticScheduler:
    """Persistent: cluster c of C takes tiles c, c + C, c + 2C, ...

    This is also the protocol of a tile scheduler; `tile_coords.Tiles` shows how roles use it. A
    tile is an index here.
    """

    smem_words = 0  # int64 words of shared memory for barriers and mailbox
    needs_scheduler_warp = False  # whether a warp of each cluster runs `run_scheduler_warp`

    def __init__(self, spec):
        self.spec = spec

    def setup(self, words, args, num_reader_warps):
        """Returns the state that the other methods take, a frozen view.

        Called once by all threads, before the barriers at `words` are made visible, with the
        kernel's parameters. `num_reader_warps` of a CTA call `next_tile`.
        """
        return args.raster

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
