"""The protocol of a fold: how one thread adds up one reduction's values of one tile.

    fold = reduction.begin_tile(view)
    for i_m in row blocks:
      for i_n in column blocks:
        fold.add(value, v, i_m, i_n)          of every v of the subtile
        -- barrier of the warpgroup --        only where `needs_barrier`
        fold.end_subtile(i_m, i_n, coords)
      fold.end_rows(i_m, coords)

A fold is an object of the trace: it names the registers that hold values between `begin_tile` and
the last `end_rows`. So all of it runs in all 128 threads of a warpgroup and outside of dynamic
branches. `coords` are the subtile's `SubtileCoords`.

Values are added in an order that depends on nothing but their place in D, and combined by shuffles.
A tile's part of a row or column is written as a partial result, see `grid.result_shapes`. There are
no atomics: a kernel has the same bits on every run.
"""

import math
from dataclasses import dataclass
from typing import Any

from cutlass import Int64

from ...gemm.offsets import element_offset
from ...gemm.smem import EPI_TILE_M
from ...gemm.wgmma_fragment import ROW_LANES, first_row, line_of, nth_row, over_lanes
from . import instructions as gpu


@dataclass(frozen=True)
class ThreadView:
    """A math thread's view of one reduction; also its position in the warpgroup."""

    pointers: tuple  # global, to the reduction's results
    thread: Any  # index in the warpgroup
    warp: Any
    lane: Any
    quad: Any
    quad_lane: Any
    scratch: Any  # (2, 4, epi_tile_n) float32 in shared memory; None without `needs_barrier`
    barrier: Any  # the warpgroup's named barrier
    columns: tuple = ()  # of a subtile, those of which this lane keeps the sums


class Fold:
    """One thread's partial results of one tile."""

    identity = 0.0  # takes the place of elements outside of D and changes no result
    # Whether rows past M, and columns past N, must be replaced by it; where not, their results are
    # written nowhere.
    rows_count = False
    columns_count = True
    # Whether the warpgroup's threads must meet between the last `add` of a subtile and
    # `end_subtile`. A barrier that is there for another reason serves.
    needs_barrier = False

    def __init__(self, spec, results, view):
        self.spec = spec
        self.results = results  # of the graph, in the order of the view's pointers
        self.view = view
        self.value = results[0].value  # the number of the graph's value that is reduced
        self.values = EPI_TILE_M * spec.epi_tile_n // 128  # of a thread's subtile
        self.subtiles_n = spec.d_tile_n // spec.epi_tile_n
        self.subtiles_m = spec.rows_per_warpgroup // EPI_TILE_M
        self.restart()

    @classmethod
    def thread_view(cls, spec, pointers, thread, scratch, barrier):
        warp, lane = thread >> 5, thread & 31
        quad, quad_lane = lane >> 2, lane & 3
        return ThreadView(pointers, thread, warp, lane, quad, quad_lane, scratch, barrier)

    def masked(self, value, v, inside):
        """Returns the thread's v-th value, or the identity where it is not `inside` and counts."""
        rows, columns = inside
        row, column = line_of(v)
        if self.rows_count:
            value = gpu.select(rows[row], value, gpu.as_float(self.identity))
        if self.columns_count:
            value = gpu.select(columns[column], value, gpu.as_float(self.identity))
        return value

    def restart(self):
        """Begins a block of 64 rows or, of some kinds, a subtile, with no values."""

    def add(self, value, v, i_m, i_n):
        """Takes the thread's v-th value of subtile (i_m, i_n)."""
        raise NotImplementedError

    def end_subtile(self, i_m, i_n, coords):
        """Follows the last `add` of a subtile."""

    def end_rows(self, i_m, coords):
        """Follows the last subtile of a block of 64 rows."""

    def row(self, coords, of_two):
        """Returns the row of D that the first or second of the thread's rows is."""
        return nth_row(first_row(self.view, coords.row0), of_two)

    def write_row(self, coords, of_two, value, part=0, parts=1):
        """Writes one of `parts` values of a row to result[batch, tile_n, (parts,) row]."""
        row = self.row(coords, of_two)
        index = coords.batch, coords.tile_n, part, row
        at = element_offset(index, (coords.tiles_n, parts, coords.rows), Int64)
        # A cluster may reach past D by whole tiles.
        inside = (row < coords.m) & (coords.tile_n < coords.tiles_n) & (self.view.quad_lane == 0)
        gpu.write_where(inside, self.view.pointers[0], at, lambda: value)


class RowStatistic:
    """The sum or largest value of one of a thread's rows; also for a graph whose rows fit a tile.

    `add` takes the thread's values in the order of columns; all lanes of the quad get `value`.
    """

    IDENTITY = {"row_sum": 0.0, "row_max": -math.inf}

    def __init__(self, operation):
        self.combine = {"row_sum": gpu.plus, "row_max": gpu.maximum}[operation]
        self.identity = self.IDENTITY[operation]
        self.so_far = None

    def add(self, value, counts=None):
        """Takes a value; `counts` says whether it lies in D, None that it does or is `identity`.

        A conditional addition holds fewer registers than one of a masked value: that the compiler
        computes long before it is added.
        """
        first = self.so_far is None
        after = value if first else self.combine(self.so_far, value)
        if counts is not None:
            before = gpu.as_float(self.identity) if first else self.so_far
            after = gpu.select(counts, after, before)
        self.so_far = after

    def value(self):
        return over_lanes(self.so_far, ROW_LANES, gpu.shuffle, self.combine)
