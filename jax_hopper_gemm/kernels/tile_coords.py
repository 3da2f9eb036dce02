"""The tiles of one CTA: which tile of which matrix each is, and its boxes in each tensor map.

Only tensor maps know extents, and clip. A span map clips where a group ends: row r of those that
are left has the coordinates (SPAN_EXTENT - left + r, end, SPAN_EXTENT), see `launch/plan.py`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cutlass_dsl import max as larger
from cutlass.cutlass_dsl import min as smaller
from cutlass.cutlass_dsl import select_

from ..gemm.group_search import MAX_LENGTH, SPAN_EXTENT, tile_in_pair
from ..gemm.k_split import part_of, place_of
from ..gemm.kernel_params import BATCH_MODES
from ..gemm.raster import tile_at
from ..gemm.smem import EPI_TILE_M
from .panels import panel_at
from .warp import Warp

OUTSIDE = 2 * MAX_LENGTH  # of every axis
MIN_TILE = 16  # rows or columns


class CtaInCluster(NamedTuple):
    """Where a CTA lies in its cluster; its rank there is m + cluster_m * n where k is 0."""

    m: Any
    n: Any
    k: Any


class TileCoords(NamedTuple):
    """One CTA's tile. The fields from `first` to `together` are those of a grouped product."""

    m: Any  # which tile along M; 0 where M is grouped and its rows begin at `first`
    n: Any  # which tile along N
    batch: Any  # its matrix of A, B and D; of B alone where M is grouped, of D alone where K is
    k_tiles: Any  # k-tiles to add up, at least one
    first: Any = None  # where on the grouped axis its part begins
    end: Any = None  # where its group ends
    belongs: Any = None  # whether its rows (M is grouped) belong to a group; if not, `batch` is 0
    together: Any = None  # whether both CTAs of a `paired` cluster have these columns
    # The first of the k-tiles. A Python 0 folds away: only where K is split is it the GPU's number.
    k_first: Any = 0
    part: Any = None  # `k_split.Part` where K is split; of a cluster's CTAs that share it, which
    filled: Any = None  # whether its group has any k-tiles, where K is cut into whole ones
    panel: Any = None  # where B and D are several panels, which one `n` counts tiles of

    @property
    def left(self):
        """Elements from `first` to the end of the group."""
        return self.end - self.first


def coords_of(spec, args, tile, cta):
    """Returns the `TileCoords` of a CTA's tile; `tile` is the cluster's, as schedulers name it."""
    s, raster = spec, args.raster
    if s.grouped is None:
        k_first, k_tiles, part = 0, args.k_tiles, None
        if s.split_k:
            tape = args.split_k.tape
            tile, k_first, k_tiles, part = place_of(tape, args.k_tiles, tile, Int64, Int32)
        if s.cluster_k > 1:
            part = cta.k
            k_first, k_tiles = part_of(args.k_tiles, part, s.cluster_k)
        cluster_m, cluster_n, batch = tile_at(raster, tile, Int64, Int32)
        m, n = cluster_m * s.cluster_m + cta.m, cluster_n * s.cluster_n + cta.n
        panel = None
        if s.panels > 1:
            panel, n = panel_at(args.panel_starts, n)
        return TileCoords(m, n, batch, k_tiles, k_first=k_first, part=part, panel=panel)
    together = None
    if s.paired:
        m, n, together = tile_in_pair(tile, cta.m, s.tile_m, Warp())
    else:
        m, n = tile.m * s.cluster_m + cta.m, tile.n * s.cluster_n + cta.n
    # NOTE: a tile of no group, or of an empty one, multiplies one k-tile of zeros. A branch that
    # set the accumulators to zero instead would put them in local memory: 704 stores a thread.
    if s.grouped == "k":
        k_tiles = larger((tile.end - tile.start + (s.tile_k - 1)) // s.tile_k, Int32(1))
        coords = TileCoords(m, n, tile.matrix, k_tiles, tile.start, tile.end)
        return coords if s.spans_k else _of_whole_k_tiles(s, coords, raster.length)
    belongs = counts = tile.matrix >= 0
    if s.paired:  # the right one of two tiles of columns may not be there
        counts = belongs & ((n < raster.tiles) | ~together)
    return TileCoords(
        0, n, larger(tile.matrix, Int32(0)), select_(counts, args.k_tiles, Int32(1)),
        tile.start + m * s.tile_m, tile.end, belongs, together,
    )  # fmt: skip


def _of_whole_k_tiles(spec, coords, length):
    """Returns the coordinates of a tile whose group begins with a k-tile; an empty one has some
    k-tile that there is, which it must not multiply."""
    k_first = smaller(coords.first, length - spec.tile_k) // spec.tile_k
    return coords._replace(k_first=k_first, filled=coords.first < coords.end)


def _if_filled(coords, tile):
    """Returns a tile of A or B where its group has k-tiles, else one outside, of zeros."""
    return select_(coords.filled, tile, Int32(OUTSIDE // MIN_TILE))


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
    """

    spec: Any
    scheduler: Any  # the tile scheduler
    state: Any  # the result of its `setup`
    args: Any  # `KernelArgs`
    cta: CtaInCluster

    def first(self):
        return self.scheduler.first_tile(self.state)

    def exists(self, tile):
        return self.scheduler.exists(self.state, tile)

    def next(self, tile, reader):
        return self.scheduler.next_tile(self.state, tile, reader)

    def coords(self, tile):
        return coords_of(self.spec, self.args, tile, self.cta)


class TmaCoords:
    """The coordinates of tiles in each kind of tensor map.

    Copies from outside of A and B bring zeros for rows that belong to no group.
    """

    def __init__(self, spec, args):
        self.spec = spec
        self.batch_axes = len(BATCH_MODES) if spec.nested else 1
        # A dynamic int32; no coordinate depends on it.
        self.any_extent = args.raster.length if spec.grouped else args.raster.total
        self.stack_index = args.stack_index
        self.nest = args.nest

    def a(self, coords):
        """Returns tiles (bM, bK, ...) of A, and the index of this one's k-tiles."""
        s = self.spec
        tile, k_contiguous = (s.tile_m, s.tile_k), s.a_major == "k"
        if s.spans_k:
            return self._span(tile, k_contiguous, 1, coords), (coords.m, None, 0, 0)
        if s.grouped == "k":
            return self._tiles(tile, k_contiguous), (_if_filled(coords, coords.m), None, 0)
        if s.grouped == "m":
            first = select_(coords.belongs, coords.first, Int32(OUTSIDE))
            return self._tiles(tile, k_contiguous, (first, 0, 0)), (0, None, 0)
        return self._tiles(tile, k_contiguous), (coords.m, None, *self._matrix("a", coords))

    def b(self, coords):
        """Returns tiles (bN, bK, ...) of one B, and the index of this one's k-tiles."""
        s = self.spec
        tile, k_contiguous = s.stored_b(s.d_tile_n, s.tile_k), s.b_major == "k"
        if s.spans_k:
            return self._span(tile, k_contiguous, 1, coords), (coords.n, None, 0, 0)
        if s.grouped == "k":
            return self._tiles(tile, k_contiguous), (_if_filled(coords, coords.n), None, 0)
        return self._tiles(tile, k_contiguous), (coords.n, None, *self._matrix_of_b(coords))

    def scales_of_b(self, coords):
        """Returns tiles (bN, groups, ...) of the scales of one B, and the index of this one's."""
        s = self.spec
        tiles = self._tiles((s.d_tile_n, s.tile_k // s.k_group), False)
        return tiles, (coords.n, None, *self._matrix_of_b(coords))

    def _matrix_of_b(self, coords):
        batch = self._matrix("b", coords)
        if self.spec.grouped == "m":
            batch = (select_(coords.belongs, *batch, Int32(OUTSIDE)),)
        return batch

    def result(self, coords):
        """Returns tiles (bM, bN, ...) of a matrix of the results, and the index of this one."""
        s = self.spec
        tile = (s.d_tile_m, s.d_tile_n)
        if s.grouped == "m":
            return self._span(tile, True, 0, coords), (0, coords.n, 0, 0)
        return self._tiles(tile, s.d_major == "n"), (coords.m, coords.n, *self._batch(coords))

    def matrix(self, coords):
        """Returns tiles (bM, bN, ...) of an operand of the epilogue, and the index of this one."""
        s = self.spec
        tile = (s.d_tile_m, s.d_tile_n)
        if s.grouped == "m":
            return self._tiles(tile, True, (coords.first, 0, 0)), (0, coords.n, 0)
        return self._tiles(tile, s.d_major == "n"), (coords.m, coords.n, *self._batch(coords))

    def row(self, coords):
        """Returns tiles (bN, ...) of an operand of the epilogue, and the index of this one."""
        return self._vector(self.spec.d_tile_n), (coords.n, *self._batch(coords))

    def column(self, coords):
        """Returns tiles (bM, ...) of an operand of the epilogue, and the index of this one."""
        return self._vector(self.spec.d_tile_m), (coords.m, *self._batch(coords))

    def pieces_of_column(self, first, length):
        """Returns (length, pieces): overlapping pieces of a column, 64 rows apart, from `first`."""
        layout = cute.make_layout(
            (length, self.spec.d_tile_m // EPI_TILE_M), stride=(cute.E(0), EPI_TILE_M * cute.E(0))
        )
        origin = cute.domain_offset((first, 0), self._all((0, 1), None)).iterator
        return cute.make_tensor(origin, layout)

    def _matrix(self, operand, coords):
        if self.spec.indexed != operand:
            return self._batch(coords)
        index = cute.arch.load(self.stack_index.index, Int32)
        return (larger(smaller(index, self.stack_index.matrices - 1), Int32(0)),)

    def _batch(self, coords):
        """Returns the coordinates of a tile's matrix along each axis of the batch."""
        if not self.spec.nested:
            return (coords.batch,)
        inner, middle = self.nest
        outside = coords.batch // inner
        return coords.batch - outside * inner, outside % middle, outside // middle

    def _tiles(self, tile, second_is_contiguous, origin=None):
        order = (1, 0) if second_is_contiguous else (0, 1)
        order = (*order, *range(2, 2 + self.batch_axes))
        return cute.local_tile(self._all(order, origin), tile, (None,) * len(order))

    def _span(self, tile, second_is_contiguous, grouped_mode, coords):
        order = (1, 0, 2, 3) if second_is_contiguous else (0, 1, 2, 3)
        origin = [0, 0, coords.end, Int32(SPAN_EXTENT)]
        origin[grouped_mode] = SPAN_EXTENT - coords.left
        return cute.local_tile(self._all(order, tuple(origin)), tile, (None,) * 4)

    def _vector(self, tile):
        order = tuple(range(1 + self.batch_axes))
        return cute.local_tile(self._all(order, None), (tile,), (None,) * len(order))

    def _all(self, order, origin):
        """Returns the tensor of coordinates; its i-th mode counts the `order[i]`-th of them."""
        layout = cute.make_layout(
            (self.any_extent,) * len(order), stride=tuple(cute.E(i) for i in order)
        )
        first = cute.make_identity_tensor((1,) * len(order)).iterator
        tensor = cute.make_tensor(first, layout)
        return tensor if origin is None else cute.domain_offset(origin, tensor)
