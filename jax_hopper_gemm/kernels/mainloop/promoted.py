"""The consumers that add the tensor cores' sums up in float32, k-tile by k-tile.

Hopper's wgmma keeps 14 digits of sums of 8-bit floats. Here it sums one k-tile at a time, in
accumulators of its own, which are then added to those of the tile: as they are, or times the scales
of the blocks that were multiplied. No wgmma of this warpgroup runs meanwhile; that of the other one
does.
"""

from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import min as smaller
from cutlass.cutlass_dsl import select_

from ...gemm.spec import PROMOTION_K
from ...gemm.wgmma_fragment import (
    DividedPosition,
    first_column,
    first_row,
    line_of,
    nth_column,
    nth_row,
)
from ..shared_memory import WARPGROUP
from .ss import SharedConsumer

COLUMNS_OF_TILE = 16  # tiles along N are whole multiples


class PromotedConsumer(SharedConsumer):
    """Math warpgroups with two sets of accumulators."""

    def make_accumulators(self, shape):
        dtypes = self.acc_dtype, self.sum_dtype
        acc, sums = (cute.make_rmem_tensor(shape, dtype) for dtype in dtypes)
        return acc, sums

    @cute.jit
    def _accumulate(
        self, view, ring, state, k_tiles, blocks: cutlass.Constexpr,
        on_issued: cutlass.Constexpr,
    ):  # fmt: skip
        view.acc.fill(0.0)
        for k_tile in cutlass.range(k_tiles, unroll=1):
            ring.consumer_wait(state)
            tiled_mma = self.make_tiled_mma(self.atom_layout_m)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
            warpgroup.fence()
            self._multiply_stage(tiled_mma, view, state.index, blocks)
            scales = self.load_scales(view.scales, k_tile)  # they arrive meanwhile
            warpgroup.wait_group(0)
            ring.consumer_release(state)
            state.advance()
            self.promote(view, scales, blocks)
        on_issued()
        return state

    def load_scales(self, scales, k_tile):
        """Returns what the sums of a k-tile are multiplied by; here by nothing."""

    def promote(self, view, scales, blocks):
        """Adds the sums of the first `blocks` of 64 rows to the tile's accumulators."""
        for v in range(blocks * cute.size(view.acc, mode=[0])):
            view.acc[v] = view.acc[v] + view.sums[v]


@dataclass(frozen=True)
class TileScales:
    """Where the scales of a thread's rows and columns of a tile lie, at its first k-tile."""

    a: tuple  # pointers, for each 64-row block: to those of the thread's rows, or of the block
    b: Any  # to the first of its columns, or for each block of columns
    a_stride: Any  # elements to the next k-tile's
    b_stride: Any


class ScaledConsumer(PromotedConsumer):
    """Sums are multiplied by the scales of their rows of A and columns of B, a k-tile's own."""

    def __init__(self, spec, atom_layout_m, before_read):
        super().__init__(spec, atom_layout_m, before_read)
        assert spec.tile_k == PROMOTION_K
        self.row_blocks = spec.rows_per_warpgroup // 64
        # Columns that share a scale in every tile, and how many such there are in one.
        self.columns = gcd(spec.tile_n, spec.b_block)
        self.column_blocks = spec.tile_n // self.columns

    def multiply(self, view, ring, state, coords, on_issued):
        scales = self.locate(view, coords)
        located = replace(view, scales=scales)
        state = super().multiply(located, ring, state, coords, on_issued)
        counts = coords.filled if coords.belongs is None else coords.belongs
        if counts is not None:  # zeros times scales that may be infinite or NaN
            for v in range(cute.size(view.acc)):
                view.acc[v] = Float32(select_(counts, view.acc[v], Float32(0.0)))
        return state

    def locate(self, view, coords):
        """Returns the `TileScales` of a tile. What lies outside of D has the last one's."""
        s, (of_a, of_b) = self.spec, view.scales
        position = DividedPosition(cute.arch.thread_idx()[0] % WARPGROUP)
        tile_row = coords.first if s.grouped == "m" else coords.m * s.tile_m
        lines = []
        for i in range(self.row_blocks):
            row = tile_row + view.first_row + 64 * self.atom_layout_m * i
            if s.a_block == 1:
                row = first_row(position, row)
                lines.append(tuple(smaller(nth_row(row, j), of_a.last) for j in range(2)))
            else:
                lines.append((smaller(row // s.a_block, of_a.last),))
        column = coords.n * s.tile_n
        if s.b_block == 1:
            column = smaller(column, of_b.last // COLUMNS_OF_TILE * COLUMNS_OF_TILE)
            columns = (first_column(position, column),)
        else:
            starts = (column + self.columns * i for i in range(self.column_blocks))
            columns = tuple(smaller(start // s.b_block, of_b.last) for start in starts)
        a_batch = 0 if s.grouped == "m" else coords.batch
        return TileScales(
            a=tuple(tuple(self.at(of_a, a_batch, coords, x) for x in pair) for pair in lines),
            b=tuple(self.at(of_b, coords.batch, coords, x) for x in columns),
            a_stride=of_a.k_stride, b_stride=of_b.k_stride,
        )  # fmt: skip

    def at(self, scales, batch, coords, line):
        """Returns a pointer to the scale of a line at the tile's first k-tile."""
        matrix = Int64(batch) * scales.batch_stride
        return scales.scales + (matrix + Int64(coords.k_first) * scales.k_stride + line)

    def load_scales(self, scales, k_tile):
        """Returns those of a k-tile: of each 64-row block its rows', and those of the columns."""
        down, along = (k_tile * stride for stride in (scales.a_stride, scales.b_stride))
        rows = [[cute.arch.load(p + down, Float32) for p in pair] for pair in scales.a]
        if self.spec.b_block == 1:
            (first,) = scales.b
            offsets = [nth_column(0, i) for i in range(self.spec.tile_n // 4)]
            return rows, [cute.arch.load(first + along + x, Float32) for x in offsets]
        return rows, [cute.arch.load(p + along, Float32) for p in scales.b]

    def promote(self, view, scales, blocks):
        rows, columns = scales
        for i in range(blocks):
            for v in range(self.spec.tile_n // 2):
                row, column = line_of(v)
                own = column if self.spec.b_block == 1 else nth_column(0, column) // self.columns
                at = i * (self.spec.tile_n // 2) + v
                scale = rows[i][row % len(rows[i])] * columns[own]
                view.acc[at] = cute.math.fma(view.sums[at].to(Float32), scale, view.acc[at])
