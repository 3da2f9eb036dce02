"""Views of an epilogue: the device's values, each made where its reader's role begins.

An operand warp's view of a tile is `operand_ring.RingLoader`. Policy objects (`FusedEpilogue`, its
matrices, operands and reductions) hold constants of the trace alone. So a view is the only way from
one role to another, and no value made inside one role's branch is used in another's.

A `Subtile`, (64, epi_tile_n), has a place in a tile and in D. The rows of a tile are those of one
math warpgroup or of all, in blocks of 64.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from ...gemm.smem import EPI_TILE_M
from ...gemm.wgmma_fragment import DividedPosition, first_column, first_row, nth_column, nth_row
from .operand_ring import RingBarriers, RingReader


@dataclass(frozen=True)
class Parameters:
    """The kernel's parameters of an epilogue, by kind, in the graph's order."""

    stores: tuple  # of the matrices among the results; tensor maps if TMA stores them
    pointers: tuple  # global pointers to the other results
    loads: tuple  # tensor maps of the operands that are no scalars
    scalars: dict  # by the number of its value, each scalar's global pointer and batch stride
    k_tiles: Any  # an int32 of at least 0 that is not known while compiling
    extents: tuple | None  # (M, N) of D if the graph needs them

    @classmethod
    def of(cls, graph, args):
        numbered = enumerate(graph.operands, graph.accumulators)
        results = list(zip(graph.results, args.results, strict=True))
        operands = list(zip(numbered, args.operands or (), strict=True))
        return cls(
            stores=tuple(atom for result, atom in results if result.kind == "matrix"),
            pointers=tuple(pointer for result, pointer in results if result.kind != "matrix"),
            loads=tuple(atom for (_, operand), atom in operands if operand.kind != "scalar"),
            scalars={n: scalar for (n, operand), scalar in operands if operand.kind == "scalar"},
            k_tiles=args.k_tiles,
            extents=args.extents,
        )


@dataclass(frozen=True)
class SharedTensors:
    """An epilogue's shared memory, of all math warpgroups."""

    matrices: tuple  # staged tiles (64, epi_tile_n, buffers) of each matrix of results
    operands: tuple  # slots of each loaded operand
    scratch: tuple  # of each reduction, a pointer to its floats; None where it needs none


@dataclass(frozen=True)
class CtaView:
    """The view that all warps of a CTA begin with."""

    parameters: Parameters
    shared: SharedTensors
    barriers: RingBarriers
    tma_coords: Any  # `TmaCoords`


@dataclass(frozen=True)
class MathView:
    """One math thread's view."""

    cta: CtaView
    acc: Any  # ((2, 2, tile_n / 8), row blocks, 1)
    warpgroup: Any  # index of the math warpgroup
    thread: Any  # index in the warpgroup
    first_buffer: Any  # of the warpgroup's staged tiles
    barrier: Any  # the warpgroup's named barrier
    matrices: tuple  # a `StagingView` for each matrix of results
    ring: RingReader
    reductions: tuple  # a `ThreadView` for each reduction


@dataclass(frozen=True)
class TileView:
    """A math thread's view of one tile."""

    math: MathView
    coords: Any  # `TileCoords`
    scalars: dict  # by the number of the value
    is_store_warp: Any  # whether this warp issues its warpgroup's TMA stores
    ring: RingReader
    stores: tuple  # a `StoreView` or `LooseView` for each matrix of results
    folds: tuple  # a `Fold` for each reduction; they alone change while the tile is traced


class RowBlocks:
    """Blocks of 64 rows of a tile, by warpgroup. A cooperative tile's alternate between those.

    Where they share its columns instead, each has all of the rows, and columns side by side.
    """

    def __init__(self, spec):
        self.grouped_rows = spec.grouped == "m"
        self.act_together = spec.cuts_operands  # warpgroups, with rows or without
        self.count = spec.rows_per_warpgroup // EPI_TILE_M  # of a tile, of one warpgroup
        self.shares_tile = spec.warp_schedule == "cooperative"
        self.shares_rows = self.shares_tile and spec.warpgroups_n == 1
        self.step = spec.math_warpgroups if self.shares_rows else 1
        # Subtiles along N of a tile, of one warpgroup.
        self.subtiles_n = spec.d_tile_n // spec.warpgroups_n // spec.epi_tile_n

    def any_of(self, coords, warpgroup):
        """Returns whether a warpgroup works on a tile, all of whose rows a group may not have."""
        if not (self.grouped_rows and self.shares_rows) or self.act_together:
            return True
        return coords.left > warpgroup * EPI_TILE_M

    def block_m(self, i_m, warpgroup):
        """Returns which 64 rows of a tile a warpgroup's i_m-th row block is."""
        return i_m * self.step + (warpgroup if self.shares_rows else 0)

    def block(self, i_m, i_n, warpgroup):
        """Returns which row block and which subtile along N of a tile a warpgroup's are."""
        if self.shares_tile and not self.shares_rows:
            i_n = i_n + warpgroup * self.subtiles_n
        return self.block_m(i_m, warpgroup), i_n


class SubtileCoords(NamedTuple):
    """One subtile's coordinates."""

    rows: Any  # of D
    m: Any  # the end of its rows: that of D, or of a group
    n: Any  # columns of D
    row0: Any  # its first row
    column0: Any  # its first column
    batch: Any  # its matrix
    tile_n: Any  # its tile along N
    tiles_n: Any  # tiles of D along N

    def inside(self, thread, columns):
        """Returns which of a thread's two rows, and of its columns, lie in D."""
        position = DividedPosition(thread)
        row = first_row(position, self.row0)
        column = first_column(position, self.column0)
        rows_inside = [nth_row(row, i) < self.m for i in range(2)]
        columns_inside = [column + nth_column(0, i) < self.n for i in range(columns)]
        return rows_inside, columns_inside


class Subtile(NamedTuple):
    """A subtile of a warpgroup's rows of a tile."""

    i_m: int
    i_n: int
    count: Any  # subtiles of operands that the warpgroup has read before
    block_coords: SubtileCoords | None  # of the first of its rows; None where the graph needs none
    block: Any = None  # its row block and column block in the tile
    buffer: Any = None  # the shared buffers of its matrices; None where it is not stored

    def coords(self, epi_tile_n):
        """Returns its coordinates, computed anew by each call; None where the graph needs none."""
        first = self.block_coords
        return first and first._replace(column0=first.column0 + self.i_n * epi_tile_n)


def first_coords(spec, extents, coords, row_block):
    """Returns the coordinates of a row block's first subtile; None without `extents` of D."""
    if not extents:
        return None
    rows, n = extents
    columns = spec.d_tile_n
    tiles_n = (n + columns - 1) // columns
    if spec.grouped == "m":
        m, batch, row0 = coords.end, 0, coords.first + row_block * EPI_TILE_M
    else:
        m, batch = rows, coords.batch
        row0 = (coords.m * (spec.d_tile_m // EPI_TILE_M) + row_block) * EPI_TILE_M
    return SubtileCoords(rows, m, n, row0, coords.n * columns, batch, coords.n, tiles_n)
