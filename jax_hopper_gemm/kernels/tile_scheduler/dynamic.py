"""Persistent scheduler with an atomic counter: a cluster takes the next tile when it is free.

Where some SMs are held by other work (a collective, another stream) or are slower, the others
take their tiles; a static scheduler would wait for the slowest. The scheduler warp of a cluster's
first CTA claims tiles and posts them to the mailbox.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..mailbox import Mailbox, MailboxState
from .static import StaticScheduler


@cute.jit
def claim(counter):
    """Returns the counter's value to all lanes of a warp, and advances it."""
    claimed = Int32(0)
    if cute.arch.lane_idx() == 0:
        claimed = cute.arch.atomic_add(counter, Int32(1))
    return cute.arch.shuffle_sync(claimed, 0)


class DynamicScheduler(StaticScheduler):
    """Tile `index` of a cluster's first tile is its own; all later ones come from the counter."""

    needs_scheduler_warp = True

    def __init__(self, spec):
        super().__init__(spec)
        self.mailbox = Mailbox(spec, numbers=1)
        self.smem_words = self.mailbox.smem_words

    def setup(self, words, args, num_reader_warps):
        return MailboxState(args, self.mailbox.setup(words, num_reader_warps))

    def exists(self, state, tile):
        return tile < state.args.raster.total

    def next_tile(self, state, tile, reader):
        """Returns the `reader`-th tile that was claimed; called by whole warps."""
        (following,) = self.mailbox.read(state.box, reader)
        return following, reader + 1

    @cute.jit
    def run_scheduler_warp(self, state, tiles_in_turn: cutlass.Constexpr):
        """Publishes tiles until every reader has met one past the end; one warp of a cluster.

        NOTE: a warpgroup that takes every other tile may step over the first tile past the end, so
        as many follow as there are warpgroups in turn. If it read the mailbox only on a condition
        instead, ptxas would put a wait after every wgmma: 16 `WARPGROUP.DEPBAR` for 2.
        """
        launched = cute.arch.grid_dim()[0] // self.spec.cluster_m
        published = Int32(0)
        past_the_end = Int32(0)
        while past_the_end < tiles_in_turn:
            slot = self.mailbox.free_slot(state.box, published)
            index = launched + claim(state.args.tile_counter)
            self.mailbox.publish(state.box, slot, [index])
            published += 1
            if index >= state.args.raster.total:
                past_the_end += 1
