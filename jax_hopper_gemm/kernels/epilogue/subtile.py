"""A subtile (64, epi_tile_n): its place in a tile and in D, and which of its elements lie in D."""

from typing import Any, NamedTuple

from ...gemm.spec import EPI_TILE_M
from ...gemm.wgmma_fragment import DividedPosition, first_column, first_row, nth_column, nth_row


class SubtileCoords(NamedTuple):
    """One subtile's coordinates.

    Attributes:
      rows, n: extents of D.
      m: the end of its rows: that of D, or of a group.
      row0, column0: its first row and column.
      batch: its matrix.
      tile_n, tiles_n: its tile along N, and how many of those D has.
    """

    rows: Any
    m: Any
    n: Any
    row0: Any
    column0: Any
    batch: Any
    tile_n: Any
    tiles_n: Any

    def right_by(self, columns):
        """Returns the coordinates of the subtile so many columns further."""
        return self._replace(column0=self.column0 + columns)

    def inside(self, thread, columns):
        """Returns which of a thread's two rows, and of its columns, lie in D.

        Args:
          columns: how many columns a thread has.
        """
        position = DividedPosition(thread)
        row = first_row(position, self.row0)
        column = first_column(position, self.column0)
        rows_inside = [nth_row(row, i) < self.m for i in range(2)]
        columns_inside = [column + nth_column(0, i) < self.n for i in range(columns)]
        return rows_inside, columns_inside


class Subtile(NamedTuple):
    """A subtile of a warpgroup's rows of a tile.

    Attributes:
      i_m, i_n: which of them.
      count: subtiles of operands that the warpgroup has read before.
      block_coords: coordinates of the first subtile of its rows; None where the graph needs none.
      block: its row block and column block in the tile.
      buffer: the shared buffers that its matrices are staged in; None where it is not stored.
    """

    i_m: int
    i_n: int
    count: Any
    block_coords: SubtileCoords | None
    block: Any = None
    buffer: Any = None

    def coords(self, epi_tile_n):
        """Returns its coordinates, computed anew by each call; None where the graph needs none."""
        if self.block_coords is None:
            return None
        return self.block_coords.right_by(self.i_n * epi_tile_n)


def first_coords(spec, extents, coords, row_block):
    """Returns the coordinates of a row block's first subtile; None without `extents`.

    Args:
      extents: (M, N) of D, if the graph needs them.
      coords: the tile's coordinates.
      row_block: which 64 rows of the tile.
    """
    if not extents:
        return None
    rows, n = extents
    columns = spec.d_tile_n
    tiles_n = (n + columns - 1) // columns
    if spec.grouped == "m":
        m, batch, row0 = coords.end, 0, coords.first + row_block * EPI_TILE_M
    else:
        m, batch = rows, coords.batch
        row0 = (coords.m * (spec.tile_m // EPI_TILE_M) + row_block) * EPI_TILE_M
    return SubtileCoords(rows, m, n, row0, coords.n * columns, batch, coords.n, tiles_n)
