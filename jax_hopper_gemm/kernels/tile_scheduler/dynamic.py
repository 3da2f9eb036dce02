"""Persistent scheduler with an atomic counter: a cluster takes the next tile when it is free.

Where some SMs are held by other work (a collective, another stream) or are slower, the others
take their tiles; a static scheduler would wait for the slowest. The scheduler warp of a cluster's
first CTA claims tiles and posts them to the mailbox.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..mailbox import Mailbox
from .static import StaticScheduler


class DynamicScheduler(StaticScheduler):
    """Tile `index` of a cluster's first tile is its own; all later ones come from the counter."""

    needs_scheduler_warp = True

    def __init__(self, spec):
        super().__init__(spec)
        self.mailbox = Mailbox(spec, numbers=1)
        self.smem_words = self.mailbox.smem_words

    def setup(self, words, counter, raster, sizes, num_reader_warps):
        self.total = raster.total
        self.counter = counter
        self.box = self.mailbox.setup(words, num_reader_warps)

    def next_tile(self, tile, reader):
        """Returns the `reader`-th tile that was claimed; called by whole warps."""
        (following,) = self.mailbox.read(self.box, reader)
        return following, reader + 1

    @cute.jit
    def run_scheduler_warp(self, tiles_in_turn: cutlass.Constexpr):
        """Publishes tiles until every reader has met one past the end.

        A warpgroup that takes every other tile may step over the first such tile, so as many
        follow as there are warpgroups in turn. One warp of a cluster's first CTA runs this.
        """
        launched = cute.arch.grid_dim()[0] // self.spec.cluster_m
        published = Int32(0)
        past_the_end = Int32(0)
        while past_the_end < tiles_in_turn:
            slot = self.mailbox.free_slot(self.box, published)
            claimed = Int32(0)
            if cute.arch.lane_idx() == 0:
                claimed = cute.arch.atomic_add(self.counter, Int32(1))
            index = launched + cute.arch.shuffle_sync(claimed, 0)
            self.mailbox.publish(self.box, slot, [index])
            published += 1
            if index >= self.total:
                past_the_end += 1
