"""Persistent scheduler with an atomic counter: a cluster takes the next tile when it is free.

Where some SMs are held by other work (a collective, another stream) or are slower, the others
take their tiles; a static scheduler would wait for the slowest.

    scheduler warp of the cluster's first CTA       readers (loader, math warps) of all its CTAs
      wait empty[slot]                                wait full[slot]
      next = launched + atomicAdd(counter, 1)         next = slot
      for each CTA: arrive + expect 4 bytes on full   arrive on empty[slot] of the first CTA
                    st.async next -> its slot

A cluster of one CTA has a plain store and arrival in place of the last two lines.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .static import StaticScheduler

DEPTH = 3  # slots: how far ahead of the slowest reader a tile may be claimed


class DynamicScheduler(StaticScheduler):
    """Tile `index` of a cluster's first tile is its own; all later ones come from the counter.

    Shared memory: DEPTH full barriers, DEPTH empty barriers, DEPTH slots (8 bytes, 4 used).
    """

    smem_words = 3 * DEPTH
    needs_scheduler_warp = True

    @cute.jit
    def setup(self, words, counter, raster, sizes, num_reader_warps: cutlass.Constexpr):
        self.total = raster.total
        self.counter = counter
        self.full = words
        self.empty = words + DEPTH
        self.slots = cute.recast_ptr(words + 2 * DEPTH, dtype=Int32)
        if cute.arch.warp_idx() == 0:
            with cute.arch.elect_one():
                for slot in cutlass.range_constexpr(DEPTH):
                    cute.arch.mbarrier_init(self.full + slot, 1)
                    cute.arch.mbarrier_init(
                        self.empty + slot, num_reader_warps * self.spec.cluster_size
                    )

    @cute.jit
    def next_tile(self, tile, reader):
        """Waits for the slot `reader` counts to and returns its tile; called by whole warps."""
        slot, phase = reader % DEPTH, (reader // DEPTH) % 2
        cute.arch.mbarrier_wait(self.full + slot, phase)
        following = Int32(0)
        if cute.arch.lane_idx() == 0:  # the thread that frees the slot is the one that read it
            following = cute.arch.load(self.slots + slot * 2, Int32)
            first_cta = 0 if cutlass.const_expr(self.spec.cluster_size > 1) else None
            cute.arch.mbarrier_arrive(self.empty + slot, first_cta)
        return cute.arch.shuffle_sync(following, 0), reader + 1

    @cute.jit
    def run_scheduler_warp(self, tiles_in_turn: cutlass.Constexpr):
        """Publishes tiles until every reader has met one past the end.

        A warpgroup that takes every other tile may step over the first such tile, so as many
        follow as there are warpgroups in turn. One warp of a cluster's first CTA runs this.
        """
        launched = cute.arch.grid_dim()[0] // self.spec.cluster_m
        lane = cute.arch.lane_idx()
        published = Int32(0)
        past_the_end = Int32(0)
        while past_the_end < tiles_in_turn:
            slot, phase = published % DEPTH, (published // DEPTH) % 2
            cute.arch.mbarrier_wait(self.empty + slot, phase ^ 1)
            claimed = Int32(0)
            if lane == 0:
                claimed = cute.arch.atomic_add(self.counter, Int32(1))
            index = launched + cute.arch.shuffle_sync(claimed, 0)
            if lane < self.spec.cluster_size:
                self.publish(slot, index, lane)
            published += 1
            if index >= self.total:
                past_the_end += 1

    def publish(self, slot, index, cta):
        """Writes a slot of one CTA of the cluster and completes its full barrier; one thread."""
        if self.spec.cluster_size == 1:  # a store to the cluster wants a cluster of two or more
            cute.arch.store(self.slots + slot * 2, index)
            cute.arch.mbarrier_arrive(self.full + slot)
        else:
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + slot, 4, cta)
            cute.arch.store_async_dsmem(self.slots + slot * 2, index, self.full + slot, cta)
