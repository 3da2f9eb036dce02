"""Column sums, and the largest value of all: over the rows of a tile, so over lanes and warps."""

import math
from dataclasses import replace

from cutlass import Int64

from ...gemm.offsets import element_offset
from ...gemm.wgmma_fragment import (
    WARP_LANES,
    add_columns,
    kept_columns,
    line_of,
    nth_column,
    over_lanes,
)
from . import instructions as gpu
from .fold import Fold


class Max(Fold):
    """The largest value, a part for each warp's 16 rows of a tile."""

    identity = -math.inf
    rows_count = True

    def restart(self):
        self.so_far = [None, None]  # two chains that do not wait for each other

    def add(self, value, v, i_m, i_n):
        chain = v % 2
        before = self.so_far[chain]
        self.so_far[chain] = value if before is None else gpu.maximum(before, value)

    def end_rows(self, i_m, coords):
        top = over_lanes(gpu.maximum(*self.so_far), WARP_LANES, gpu.shuffle, gpu.maximum)
        block = (coords.row0 >> 4) + self.view.warp
        blocks = (coords.m + 15) >> 4
        index = coords.batch, block, coords.tile_n
        at = element_offset(index, (blocks, coords.tiles_n), Int64)
        inside = (block < blocks) & (coords.tile_n < coords.tiles_n) & (self.view.lane == 0)
        gpu.write_where(inside, self.view.pointers[0], at, lambda: top)
        self.restart()


class ColumnSum(Fold):
    """Of each column the sum of each 64 rows; over warps through scratch in shared memory.

    The two turns of the scratch alternate by subtile: a subtile's barrier comes after the reads of
    the subtile before it, and so before the next writes to the same turn.
    """

    rows_count = True
    columns_count = False
    needs_barrier = True

    @classmethod
    def thread_view(cls, spec, *args):
        view = super().thread_view(spec, *args)
        kept = kept_columns(view.lane, spec.epi_tile_n // 4)
        return replace(view, columns=tuple(nth_column(view.quad_lane, i) for i in kept))

    def restart(self):
        self.sums = {}
        self.added = 0

    def add(self, value, v, i_m, i_n):
        _, column = line_of(v)
        so_far = self.sums.get(column)
        self.sums[column] = value if so_far is None else gpu.plus(so_far, value)
        self.added += 1
        if self.added == self.values:
            sums = [self.sums[i] for i in range(self.spec.epi_tile_n // 4)]
            sums = add_columns(sums, self.view.lane, gpu.shuffle, gpu.select, gpu.plus)
            row = self.turn(i_m, i_n) + self.view.warp * self.spec.epi_tile_n
            for column, partial in zip(self.view.columns, sums, strict=True):
                gpu.write_scratch(self.view.scratch, row + column, partial)
            self.restart()

    def turn(self, i_m, i_n):
        """Returns where the scratch of a subtile starts, in elements."""
        return (i_m * self.subtiles_n + i_n) % 2 * 4 * self.spec.epi_tile_n

    def end_subtile(self, i_m, i_n, coords):
        turn, width, thread = self.turn(i_m, i_n), self.spec.epi_tile_n, self.view.thread

        def over_warps():
            rows = [turn + warp * width for warp in range(4)]
            a, b, c, d = (gpu.read_scratch(self.view.scratch, row + thread) for row in rows)
            return gpu.plus(gpu.plus(a, b), gpu.plus(c, d))

        column = coords.column0 + thread
        inside = (thread < width) & (coords.row0 < coords.m) & (column < coords.n)
        blocks = (coords.m + 63) >> 6
        at = element_offset((coords.batch, coords.row0 >> 6, column), (blocks, coords.n), Int64)
        gpu.write_where(inside, self.view.pointers[0], at, over_warps)
        if self.subtiles_m * self.subtiles_n % 2:
            if (i_m, i_n) == (self.subtiles_m - 1, self.subtiles_n - 1):
                # NOTE: the next tile's first subtile takes the same turn.
                self.view.barrier.arrive_and_wait()
