"""Where a CTA's tile lies: which tile of which matrix, and the TMA coordinates of its boxes.

Only tensor maps know extents, and clip. A span map clips where a span of a grouped axis ends: row
r of those that are left has the coordinates (SPAN_EXTENT - left + r, end, SPAN_EXTENT), see `plan`.
"""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cutlass_dsl import max as larger
from cutlass.cutlass_dsl import min as smaller
from cutlass.cutlass_dsl import select_

from ..gemm.group_search import MAX_LENGTH, SPAN_EXTENT, tile_in_pair
from ..gemm.raster import tile_at
from ..gemm.spec import EPI_TILE_M
from .tile_scheduler.grouped import Warp

OUTSIDE = 2 * MAX_LENGTH  # of every axis


class Place(NamedTuple):
    """One CTA's tile.

    Attributes:
      m, n: which tile along M and N; where M is grouped m is 0 and its rows begin at `first`.
      batch: its matrix of A, B and D; of B alone where M is grouped, of D alone where K is.
      k_tiles: k-tiles to add up, at least one.
      first, end: where M or K is grouped: the tile's part of it begins and its span ends.
      belongs: where M is grouped: whether the rows belong to a group. If not, `batch` is 0.
      together: of a `paired` kernel: whether both CTAs of the cluster have these columns.
    """

    m: Any
    n: Any
    batch: Any
    k_tiles: Any
    first: Any = None
    end: Any = None
    belongs: Any = None
    together: Any = None

    @property
    def left(self):
        return self.end - self.first


def place_of(spec, raster, tile, cta_m, cta_n, k_tiles):
    """Returns the place of a CTA's tile.

    Args:
      tile: what the tile scheduler gave for the cluster.
      cta_m, cta_n: the CTA's place in its cluster.
      k_tiles: k-tiles of a tile whose K is not grouped.
    """
    s = spec
    if s.grouped is None:
        cluster_m, cluster_n, batch = tile_at(raster, tile, Int64, Int32)
        m, n = cluster_m * s.cluster_m + cta_m, cluster_n * s.cluster_n + cta_n
        return Place(m, n, batch, k_tiles)
    together = None
    if s.paired:
        m, n, together = tile_in_pair(tile, cta_m, s.tile_m, Warp())
    else:
        m, n = tile.m * s.cluster_m + cta_m, tile.n * s.cluster_n + cta_n
    if s.grouped == "k":  # of an empty group, one k-tile of zeros
        k_tiles = larger((tile.end - tile.start + (s.tile_k - 1)) // s.tile_k, Int32(1))
        return Place(m, n, tile.matrix, k_tiles, tile.start, tile.end)
    belongs = counts = tile.matrix >= 0
    if s.paired:  # the right one of two tiles of columns may not be there
        counts = belongs & ((n < raster.tiles) | ~together)
    return Place(
        0, n, larger(tile.matrix, Int32(0)), select_(counts, k_tiles, Int32(1)),
        tile.start + m * s.tile_m, tile.end, belongs, together,
    )  # fmt: skip


class Coordinates:
    """The TMA coordinates of tiles, for each kind of tensor map.

    Rows that belong to no group are the product of zeros, which copies from outside of A and B
    bring.
    """

    def __init__(self, spec, any_extent, index=None):
        """Takes what all tiles have in common.

        Args:
          any_extent: a dynamic int32, which no coordinate depends on.
          index: as in `GemmKernel.kernel`.
        """
        self.spec = spec
        self.any_extent = any_extent
        self.index = index

    def a(self, place):
        """Returns tiles (bM, bK, ...) of A, and the index of this one's k-tiles."""
        s = self.spec
        tile, k_first = (s.tile_m, s.tile_k), s.a_major == "k"
        if s.grouped == "k":
            return self._span(tile, k_first, 1, place), (place.m, None, 0, 0)
        if s.grouped == "m":
            first = select_(place.belongs, place.first, Int32(OUTSIDE))
            return self._tiles(tile, k_first, (first, 0, 0)), (0, None, 0)
        return self._tiles(tile, k_first), (place.m, None, self._matrix("a", place))

    def b(self, place):
        """Returns tiles (bN, bK, ...) of one B, and the index of this one's k-tiles."""
        s = self.spec
        tile, k_first = (s.d_tile_n, s.tile_k), s.b_major == "k"
        if s.grouped == "k":
            return self._span(tile, k_first, 1, place), (place.n, None, 0, 0)
        batch = self._matrix("b", place)
        if s.grouped == "m":
            batch = select_(place.belongs, batch, Int32(OUTSIDE))
        return self._tiles(tile, k_first), (place.n, None, batch)

    def result(self, place):
        """Returns tiles (bM, bN, ...) of a matrix of the results, and the index of this one."""
        s = self.spec
        tile = (s.tile_m, s.d_tile_n)
        if s.grouped == "m":
            return self._span(tile, True, 0, place), (0, place.n, 0, 0)
        return self._tiles(tile, True), (place.m, place.n, place.batch)

    def matrix(self, place):
        """Returns tiles (bM, bN, ...) of an operand of the epilogue, and the index of this one."""
        s = self.spec
        tile = (s.tile_m, s.d_tile_n)
        if s.grouped == "m":
            return self._tiles(tile, True, (place.first, 0, 0)), (0, place.n, 0)
        return self._tiles(tile, True), (place.m, place.n, place.batch)

    def row(self, place):
        """Returns tiles (bN, ...) of an operand of the epilogue, and the index of this one."""
        return self._vector(self.spec.d_tile_n), (place.n, place.batch)

    def column(self, place):
        """Returns tiles (bM, ...) of an operand of the epilogue, and the index of this one."""
        return self._vector(self.spec.tile_m), (place.m, place.batch)

    def pieces_of_column(self, first, length):
        """Returns (length, pieces): overlapping pieces of a column, 64 rows apart, from `first`."""
        layout = cute.make_layout(
            (length, self.spec.tile_m // EPI_TILE_M), stride=(cute.E(0), EPI_TILE_M * cute.E(0))
        )
        origin = cute.domain_offset((first, 0), self._all((0, 1), None)).iterator
        return cute.make_tensor(origin, layout)

    def _matrix(self, operand, place):
        """Returns which matrix of an operand a tile reads."""
        if self.spec.indexed != operand:
            return place.batch
        pointer, stack = self.index
        return larger(smaller(cute.arch.load(pointer, Int32), stack - 1), Int32(0))

    def _tiles(self, tile, second_is_contiguous, origin=None):
        order = (1, 0, 2) if second_is_contiguous else (0, 1, 2)
        return cute.local_tile(self._all(order, origin), tile, (None, None, None))

    def _span(self, tile, second_is_contiguous, grouped_mode, place):
        order = (1, 0, 2, 3) if second_is_contiguous else (0, 1, 2, 3)
        origin = [0, 0, place.end, Int32(SPAN_EXTENT)]
        origin[grouped_mode] = SPAN_EXTENT - place.left
        return cute.local_tile(self._all(order, tuple(origin)), tile, (None,) * 4)

    def _vector(self, tile):
        return cute.local_tile(self._all((0, 1), None), (tile,), (None, None))

    def _all(self, order, origin):
        """Returns the tensor of coordinates; its i-th mode counts the `order[i]`-th of them."""
        layout = cute.make_layout(
            (self.any_extent,) * len(order), stride=tuple(cute.E(i) for i in order)
        )
        first = cute.make_identity_tensor((1,) * len(order)).iterator
        tensor = cute.make_tensor(first, layout)
        return tensor if origin is None else cute.domain_offset(origin, tensor)
