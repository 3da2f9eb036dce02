"""Persistent scheduler of grouped products: tiles are found from sizes that only the GPU knows.

The scheduler warp of a cluster's first CTA claims the next index, by a fixed stride or from the
counter, searches the groups for it (`gemm/group_search.py`) and posts the tile to the mailbox. The
search of a tile hides behind the multiplication of those before it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import max as larger
from cutlass.cutlass_dsl import min as smaller
from cutlass.cutlass_dsl import select_

from ...gemm.group_search import (
    GroupTile,
    Window,
    first_window,
    holds,
    is_last,
    next_window,
    tile_in,
)
from ..mailbox import Mailbox


class Warp:
    """The operations that `grouping` wants of 32 lanes: those of a warp."""

    @property
    def lane(self):
        return cute.arch.lane_idx()

    def integer(self, value):
        return Int32(value)

    def minimum(self, a, b):
        return smaller(Int32(a), Int32(b))

    def maximum(self, a, b):
        return larger(Int32(a), Int32(b))

    def where(self, condition, a, b):
        return select_(condition, Int32(a), Int32(b))

    def of(self, value, lane):
        """Returns what `lane` has."""
        return cute.arch.shuffle_sync(value, lane)

    def prefix_sum(self, value):
        """Returns the sum over this lane and those before it."""
        lane = self.lane
        for distance in (1, 2, 4, 8, 16):
            before = cute.arch.shuffle_sync_up(value, distance)
            value = value + select_(lane >= distance, before, Int32(0))
        return value

    def first(self, condition):
        """Returns the first lane for which `condition` holds; some lane must."""
        ballot = cute.arch.vote_ballot_sync(condition)
        return cute.arch.popc(~ballot & (ballot - 1))


class GroupedScheduler:
    """A tile here is a `GroupTile` of the CTA's cluster; `n` is -1 past the end."""

    needs_scheduler_warp = True

    def __init__(self, spec):
        self.spec = spec
        self.rows = spec.tile_m * spec.raster_m if spec.grouped == "m" else None
        self.skip_empty = spec.zero_fill_warp
        self.mailbox = Mailbox(spec, numbers=len(GroupTile._fields))
        self.smem_words = self.mailbox.smem_words

    def setup(self, words, counter, raster, sizes, num_reader_warps):
        self.counter, self.raster, self.sizes = counter, raster, sizes
        self.box = self.mailbox.setup(words, num_reader_warps)

    def first_tile(self):
        return self.next_tile(None, Int32(0))

    def exists(self, tile):
        return tile.n >= 0

    def next_tile(self, tile, reader):
        """Returns the `reader`-th tile of this cluster; called by whole warps."""
        return GroupTile(*self.mailbox.read(self.box, reader)), reader + 1

    @cute.jit
    def run_scheduler_warp(self, tiles_in_turn: cutlass.Constexpr):
        """Publishes tiles until every reader has met one past the end.

        A warpgroup that takes every other tile may step over the first such tile, so as many
        follow as there are warpgroups in turn. One warp of a cluster's first CTA runs this.
        """
        lanes = Warp()
        launched = cute.arch.grid_dim()[0] // self.spec.cluster_m
        index = cute.arch.block_idx()[0] // self.spec.cluster_m
        window = self.first_window()
        published = Int32(0)
        past_the_end = Int32(0)
        while past_the_end < tiles_in_turn:
            window = self.search(window, index)
            found = holds(Window(*window), index, lanes)
            tile = tile_in(self.raster, Window(*window), index, lanes, self.rows)
            tile = tile._replace(n=select_(found, tile.n, Int32(-1)))
            slot = self.mailbox.free_slot(self.box, published)
            self.mailbox.publish(self.box, slot, tile)
            published += 1
            past_the_end += select_(found, Int32(0), Int32(1))
            index = self.claim(index, launched)

    @cute.jit
    def search(self, window, index):
        """Returns the window that holds the `index`-th tile, or the last one."""
        lanes = Warp()
        ahead = ~holds(Window(*window), index, lanes) & ~is_last(self.raster, Window(*window))
        while ahead:
            following = self.next_window(window)
            window = tuple(following)
            ahead = ~holds(following, index, lanes) & ~is_last(self.raster, following)
        return window

    def first_window(self):
        return tuple(first_window(self.raster, self.size_at, Warp(), self.rows, self.skip_empty))

    def next_window(self, window):
        return next_window(
            self.raster, Window(*window), self.size_at, Warp(), self.rows, self.skip_empty
        )

    def size_at(self, span, valid):
        """Returns the size of a span, or any value where it is not `valid`."""
        return cute.arch.load(self.sizes + smaller(span, self.raster.sizes - 1), Int32)

    @cute.jit
    def claim(self, index, launched):
        if cutlass.const_expr(self.spec.tile_scheduler == "dynamic"):
            claimed = Int32(0)
            if cute.arch.lane_idx() == 0:
                claimed = cute.arch.atomic_add(self.counter, Int32(1))
            index = launched + cute.arch.shuffle_sync(claimed, 0)
        else:
            index = index + launched
        return index
