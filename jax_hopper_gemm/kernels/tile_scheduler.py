"""Tile schedulers: which tile a CTA works on next."""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cutlass_dsl import min as smaller
from cutlass.cutlass_dsl import select_

from ..gemm import group_search, k_split
from ..gemm.group_search import GroupTile, Window, holds, is_last
from . import tile_counter
from .mailbox import Mailbox
from .warp import Warp


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


class SplitScheduler(StaticScheduler):
    """The static scheduler of items that may be parts of tiles; a tile is a `WorkUnit`.

    NOTE: clusters of one launch wait for each other, at the last part of a tile (`finish.py`), and
    other work may hold SMs. None waits for ever: there are no more ranges than clusters, so cluster
    c has range c and waits only for clusters below c. CTAs start in the order of their index, so
    these are resident or done, and cluster 0 waits for nobody.
    """

    def setup(self, words, args, num_reader_warps):
        return args

    def first_tile(self, state):
        item, reader = super().first_tile(state)
        unit = k_split.first_unit(state.split_k.tape, state.k_tiles, item, Int64, Int32)
        return unit, reader

    def exists(self, state, unit):
        return unit.item < state.split_k.tape.items

    def next_tile(self, state, unit, reader):
        stride, _ = super().next_tile(state, Int32(0), reader)
        tape = state.split_k.tape
        return k_split.next_unit(tape, state.k_tiles, unit, stride, Int64, Int32), reader


class DynamicScheduler(StaticScheduler):
    """Persistent with an atomic counter: a cluster takes the next tile when it is free.

    Where some SMs are held by other work (a collective, another stream) or are slower, the others
    take their tiles; a static scheduler would wait for the slowest. A cluster's first tile is that
    of its own index. The scheduler warp of its first CTA claims the later ones and posts them to
    the mailbox.
    """

    needs_scheduler_warp = True

    def __init__(self, spec, numbers=1):
        super().__init__(spec)
        self.mailbox = Mailbox(spec, numbers)  # a message says which tile is next
        self.smem_words = self.mailbox.smem_words

    def setup(self, words, args, num_reader_warps):
        return self.mailbox.setup(words, args, num_reader_warps)

    def exists(self, state, tile):
        return tile < state.args.raster.total

    def next_tile(self, state, tile, reader):
        """Returns the `reader`-th tile that was claimed; called by whole warps."""
        (following,) = self.mailbox.read(state, reader)
        return following, reader + 1

    def run_scheduler_warp(self, state, tiles_in_turn):
        """Publishes tiles until every reader has met one past the end; one warp of a cluster.

        NOTE: a warpgroup that takes every other tile may step over the first tile past the end, so
        as many follow as there are warpgroups in turn. If it read the mailbox only on a condition
        instead, ptxas would put a wait after every wgmma: 16 `WARPGROUP.DEPBAR` for 2.
        """
        cluster = cute.arch.block_idx()[0] // self.spec.cluster_m
        clusters = cute.arch.grid_dim()[0] // self.spec.cluster_m
        if self.spec.dynamic:
            tile_counter.start(state.args.tile_counter, cluster)
        self.publish_tiles(state, cluster, clusters, tiles_in_turn)
        if self.spec.dynamic:
            tile_counter.finish(state.args.tile_counter, clusters)

    @cute.jit
    def publish_tiles(self, state, cluster, clusters, tiles_in_turn: cutlass.Constexpr):
        tile_counter.wait(state.args.tile_counter)
        published = Int32(0)
        past_the_end = Int32(0)
        while past_the_end < tiles_in_turn:
            slot = self.mailbox.free_slot(state, published)
            index = clusters + tile_counter.claim(state.args.tile_counter)
            self.mailbox.publish(state, slot, [index])
            published += 1
            if index >= state.args.raster.total:
                past_the_end += 1


class GroupedScheduler(DynamicScheduler):
    """Persistent scheduler of grouped products: tiles follow from sizes that only the GPU knows.

    The scheduler warp claims the next index, by a fixed stride or from the counter, searches the
    groups for it (`gemm/group_search.py`) and posts the tile to the mailbox. The search of a tile
    hides behind the multiplication of those before it. A tile is a `GroupTile` of the CTA's
    cluster; `n` is -1 past the end.
    """

    def __init__(self, spec):
        super().__init__(spec, len(GroupTile._fields))
        self.rows = spec.tile_m * spec.raster_m if spec.grouped == "m" else None
        self.skip_empty = spec.zero_fill_warp

    def first_tile(self, state):
        return self.next_tile(state, None, Int32(0))

    def exists(self, state, tile):
        return tile.n >= 0

    def next_tile(self, state, tile, reader):
        """Returns the `reader`-th tile of this cluster; called by whole warps."""
        return GroupTile(*self.mailbox.read(state, reader)), reader + 1

    @cute.jit
    def publish_tiles(self, state, cluster, clusters, tiles_in_turn: cutlass.Constexpr):
        lanes = Warp()
        index = cluster
        window = self.first_window(state)
        published = Int32(0)
        past_the_end = Int32(0)
        while past_the_end < tiles_in_turn:
            window = self.search(state, window, index)
            exists = holds(Window(*window), index, lanes)
            tile = group_search.tile_in(state.args.raster, Window(*window), index, lanes, self.rows)
            tile = tile._replace(n=select_(exists, tile.n, Int32(-1)))
            slot = self.mailbox.free_slot(state, published)
            self.mailbox.publish(state, slot, tile)
            published += 1
            past_the_end += select_(exists, Int32(0), Int32(1))
            if cutlass.const_expr(self.spec.dynamic):
                if published == 1:  # the first tile hides the wait
                    tile_counter.wait(state.args.tile_counter)
                index = clusters + tile_counter.claim(state.args.tile_counter)
            else:
                index = index + clusters

    @cute.jit
    def search(self, state, window, index):
        """Returns the window that holds the `index`-th tile, or the last one."""
        lanes = Warp()
        raster = state.args.raster
        ahead = ~holds(Window(*window), index, lanes) & ~is_last(raster, Window(*window))
        while ahead:
            following = self.next_window(state, window)
            window = tuple(following)
            ahead = ~holds(following, index, lanes) & ~is_last(raster, following)
        return window

    def first_window(self, state):
        raster, sizes = state.args.raster, partial(self.size_at, state)
        first = group_search.first_window(raster, sizes, Warp(), self.rows, self.skip_empty)
        return tuple(first)

    def next_window(self, state, window):
        raster, sizes = state.args.raster, partial(self.size_at, state)
        return group_search.next_window(
            raster, Window(*window), sizes, Warp(), self.rows, self.skip_empty
        )

    def size_at(self, state, group, valid):
        """Returns the size of a group, or any value where it is not `valid`."""
        sizes = state.args.group_sizes
        return cute.arch.load(sizes + smaller(group, state.args.raster.sizes - 1), Int32)


TILE_SCHEDULERS = {
    "single": SingleTileScheduler,
    "static": StaticScheduler,
    "dynamic": DynamicScheduler,
}


def make_scheduler(spec):
    """Returns the scheduler of `spec`'s tiles; that of groups claims statically or dynamically."""
    if spec.split_k:
        return SplitScheduler(spec)
    return (GroupedScheduler if spec.grouped else TILE_SCHEDULERS[spec.tile_scheduler])(spec)
