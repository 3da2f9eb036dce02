"""The consumers that add the tensor cores' sums up in float32, k-tile by k-tile.

Hopper's wgmma keeps 14 digits of sums of 8-bit floats. Here it sums one k-tile at a time, in
registers of its own, which are then added to the tile's accumulators: as they are, or times the
scales of the blocks that were multiplied. No wgmma of this warpgroup runs meanwhile; that of the
other one does. A tile whose sums do not fit beside its accumulators has several pieces, of 64 rows
and `GemmSpec.sum_columns`, which take turns in the registers for sums.
"""

from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import T, select_
from cutlass.cutlass_dsl import min as smaller

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

AHEAD = 2  # k-tiles that scales are loaded ahead


class PromotedConsumer(SharedConsumer):
    """Math warpgroups with accumulators of a tile, and others of a piece of it for a k-tile."""

    def make_accumulators(self):
        s = self.spec
        acc = self.make_registers(self.acc_dtype, s.rows_per_warpgroup, s.tile_n)
        return acc, self.make_registers(self.sum_dtype, 64, self.columns)

    @cute.jit
    def _accumulate(
        self, view, ring, state, k_tiles, blocks: cutlass.Constexpr,
        on_issued: cutlass.Constexpr,
    ):  # fmt: skip
        view.acc.fill(0.0)
        ahead = self.first_scales(view.scales, k_tiles)
        for k_tile in cutlass.range(k_tiles, unroll=1):
            scales = self.next_scales(view.scales, ahead, k_tile, k_tiles)
            ring.consumer_wait(state)
            self._multiply_pieces(view, ring, state, blocks, scales)
            state.advance()
        on_issued()
        return state

    def _multiply_pieces(self, view, ring, state, blocks, scales):
        parts = self.spec.tile_n // self.columns
        for piece in range(blocks * parts):
            warpgroup.fence()
            self._multiply_piece(view, *divmod(piece, parts), state.index)
            own = self.piece_scales(view, scales, *divmod(piece, parts), state.index)
            warpgroup.wait_group(0)
            last = piece == blocks * parts - 1
            release = partial(ring.consumer_release, state) if last else _nothing
            self.finish_piece(view, *divmod(piece, parts), own, release)

    def _multiply_piece(self, view, block, part, stage):
        tiled_mma = self.make_tiled_mma(1, self.columns)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
        self.before_read()
        for k_block in range(cute.size(view.tCrA, mode=[2])):
            at = (None, None, k_block, stage)
            a = cute.logical_divide(view.tCrA[at], (None, 1))[None, (None, block)]
            b = cute.logical_divide(view.tCrB[at], (None, 1))[None, (None, part)]
            cute.gemm(tiled_mma, view.sums, a, b, view.sums)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    def first_scales(self, scales, k_tiles):
        """Returns where scales of the next k-tiles are held; here none are."""

    def next_scales(self, scales, ahead, k_tile, k_tiles):
        """Returns what the sums of a k-tile are multiplied by; here by nothing."""

    def piece_scales(self, view, scales, block, part, stage):
        """Returns what those of a piece are multiplied by, of `next_scales`."""
        return scales

    def finish_piece(self, view, block, part, scales, release):
        """Promotes a piece; `release` frees the stage, where it is the last one."""
        release()
        self.promote(view, block, part, scales)

    def promote(self, view, block, part, scales):
        """Adds the sums of a piece to the tile's accumulators."""
        for v, at in self.places(block, part):
            view.acc[at] = _in_order("add.rn.f32 $0, $1, $2;", view.sums[v], view.acc[at])

    def places(self, block, part):
        """Yields the number of each sum of a piece, and of its accumulator."""
        columns = self.columns // 2  # of 64 rows a thread has half as many elements
        first = block * (self.spec.tile_n // 2) + part * columns
        return ((v, first + v) for v in range(columns))


def _nothing():
    pass


def scaled_sum(value, scale, total):
    return _in_order("fma.rn.f32 $0, $1, $2, $3;", value.to(Float32), scale, total)


def _in_order(instruction, *operands):
    """Returns the float32 of an instruction that stays in its place among others and wgmmas.

    Else the additions of one piece mix with the products of the next, which then take other
    registers for their sums.
    """
    values = [Float32(x).ir_value() for x in operands]
    constraints = ",".join(["=f"] + ["f"] * len(values))
    options = {"has_side_effects": True, "is_align_stack": False}
    return Float32(llvm.inline_asm(T.f32(), values, instruction, constraints, **options))


class BlocksConsumer(PromotedConsumer):
    """Sums are multiplied by the scales of their rows of A and columns of B, a k-tile's own."""

    def __init__(self, spec, atom_layout_m, before_read):
        super().__init__(spec, atom_layout_m, before_read)
        assert spec.tile_k == PROMOTION_K
        self.shared = gcd(spec.tile_n, spec.b_block)  # columns that have one scale in every tile

    def multiply(self, view, ring, state, coords, on_issued):
        located = replace(view, scales=self.locate(view, coords))
        state = super().multiply(located, ring, state, coords, on_issued)
        # A tile of no group is zero: zeros times scales may be infinite or NaN.
        counts = coords.filled if coords.belongs is None else coords.belongs
        if counts is not None:
            for v in range(cute.size(view.acc)):
                view.acc[v] = Float32(select_(counts, view.acc[v], Float32(0.0)))
        return state


@dataclass(frozen=True)
class TileScales:
    """Where the scales of a thread's rows and columns of a tile lie, at its first k-tile."""

    a: tuple  # pointers, for each 64-row block: to those of the thread's rows, or of the block
    b: tuple  # pointers, for each block of columns that the tile has a part of
    a_stride: Any  # elements to the next k-tile's
    b_stride: Any


class ScaledConsumer(BlocksConsumer):
    """A thread loads its scales, those of B of blocks, two k-tiles before they are used.

    From L2 they take as long as the tensor cores take for a k-tile.
    """

    def __init__(self, spec, atom_layout_m, before_read):
        super().__init__(spec, atom_layout_m, before_read)
        self.row_blocks = spec.rows_per_warpgroup // 64
        self.rows = 2 if spec.a_block == 1 else 1  # scales of a 64-row block

    def locate(self, view, coords):
        """Returns the `TileScales` of a tile. What lies outside of D has the last one's."""
        s, (of_a, of_b) = self.spec, view.scales
        position = DividedPosition(cute.arch.thread_idx()[0] % WARPGROUP)
        lines = []
        for i in range(self.row_blocks):
            row = coords.m * s.tile_m + view.first_row + 64 * self.atom_layout_m * i
            if s.a_block == 1:
                row = first_row(position, row)
                lines.append(tuple(smaller(nth_row(row, j), of_a.last) for j in range(2)))
            else:
                lines.append((smaller(row // s.a_block, of_a.last),))
        # NOTE: those of the thread's own columns, although all threads have the same. Scales that
        # are seen to be the same go to uniform registers as soon as they are loaded, and the warp
        # waits for them before it issues its wgmmas.
        own = first_column(position, coords.n * s.tile_n)
        starts = (own + i for i in range(0, s.tile_n, self.shared))
        columns = tuple(smaller(start // s.b_block, of_b.last) for start in starts)
        return TileScales(
            a=tuple(tuple(self.at(of_a, coords, x) for x in pair) for pair in lines),
            b=tuple(self.at(of_b, coords, x) for x in columns),
            a_stride=of_a.k_stride, b_stride=of_b.k_stride,
        )  # fmt: skip

    def at(self, scales, coords, line):
        """Returns a pointer to the scale of a line at the tile's first k-tile."""
        matrix = Int64(coords.batch) * scales.batch_stride
        return scales.scales + (matrix + Int64(coords.k_first) * scales.k_stride + line)

    def first_scales(self, scales, k_tiles):
        held = []
        for k_tile in range(AHEAD):
            loaded = self.load_scales(scales, smaller(Int32(k_tile), k_tiles - 1))
            held.append(cute.make_rmem_tensor((len(loaded),), Float32))
            _write(held[-1], loaded)
        return held

    def next_scales(self, scales, ahead, k_tile, k_tiles):
        loaded = self.load_scales(scales, smaller(k_tile + AHEAD, k_tiles - 1))
        queue = [[x[i] for i in range(len(loaded))] for x in ahead]
        for target, values in zip(ahead, [*queue[1:], loaded], strict=True):
            _write(target, values)
        return queue[0]

    def load_scales(self, scales, k_tile):
        """Returns those of a k-tile: of each 64-row block its rows', then those of the columns."""
        down, along = (k_tile * stride for stride in (scales.a_stride, scales.b_stride))
        rows = [cute.arch.load(p + down, Float32) for pair in scales.a for p in pair]
        return rows + [cute.arch.load(p + along, Float32) for p in scales.b]

    def promote(self, view, block, part, scales):
        rows = scales[self.rows * block : self.rows * (block + 1)]
        columns = scales[self.rows * self.row_blocks :]
        for v, at in self.places(block, part):
            row, column = line_of(at - block * (self.spec.tile_n // 2))
            scale = rows[row % self.rows] * columns[nth_column(0, column) // self.shared]
            view.acc[at] = scaled_sum(view.sums[v], scale, view.acc[at])


def _write(registers, values):
    for i, value in enumerate(values):
        registers[i] = value
