"""Block scales: they arrive in stages, with the operands whose lines they belong to.

A stage ends with the scales of a tile's rows, then of its columns, for its k-tile. Math warps read
them while the tensor cores multiply. Held in registers from k-tile to k-tile they would leave too
few for accumulators, and their loads delay wgmmas, which wait for registers that loads' addresses
are in.
"""

from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass.cutlass_dsl import min as smaller
from cutlass.cutlass_dsl import select_

from ...gemm.smem import scale_stage_bytes
from ...gemm.spec import PROMOTION_K, SCALES_ALIGNMENT
from ...gemm.wgmma_fragment import (
    DividedPosition,
    first_column,
    first_row,
    line_of,
    nth_column,
    nth_row,
)
from ..copies import adjacent
from ..shared_memory import WARPGROUP
from .promoted import PromotedConsumer, in_order
from .ring import kept_in_register
from .tma import TmaProducer


def _first_lines(spec, coords):
    """Returns a tile's first row and its first column."""
    return coords.first if spec.grouped == "m" else coords.m * spec.tile_m, coords.n * spec.tile_n


def _aligned(scale):
    """Returns the scale that a copy begins at for it to have this one."""
    return scale // SCALES_ALIGNMENT * SCALES_ALIGNMENT


@dataclass(frozen=True)
class Source:
    """Where the scales of a tile's lines lie."""

    address: Any  # bytes, at the tile's first k-tile
    k_bytes: Any  # to the next k-tile's
    nbytes: int


class ScalesProducer(TmaProducer):
    """Loads both operands and their scales; every CTA of a cluster all scales of its own."""

    def __init__(self, spec, a, b):
        super().__init__(spec, a, b)
        self.tma_bytes += spec.scale_bytes

    def partition_for_load(self, args, stages, tma_coords, cta):
        view = super().partition_for_load(args, stages, tma_coords, cta)
        return *view, (args.scales, stages.scales)

    def partition(self, view, coords):
        slices = super().partition(view, coords)
        s, (scales, _), sources = self.spec, view[2], []
        batches = 0 if s.grouped == "m" else coords.batch, coords.batch
        sides = zip(scales, (s.a_block, s.b_block), batches, s.scales_of_lines, strict=True)
        for (of, block, batch, count), first in zip(sides, _first_lines(s, coords), strict=True):
            # NOTE: a tile outside of D gets the last scales, of which it makes nothing.
            start = _aligned(smaller(first // block, of.last))
            at = Int64(batch) * of.batch_stride + Int64(coords.k_first) * of.k_stride
            address = (of.scales + (at + start)).toint()
            sources.append(Source(address, Int64(of.k_stride) * 4, 4 * count))
        return *slices, sources

    @cute.jit
    def load_beside(self, view, slices, i, stage, full):
        at = view[2][1].toint() + stage * scale_stage_bytes(self.spec)
        with cute.arch.elect_one():
            for source in slices[2]:
                cute.arch.inline_ptx(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                    f" [{{$r0}}], [{{$r1}}], {source.nbytes}, [{{$r2}}];",
                    read_only_args=[at, source.address + i * source.k_bytes, full.toint()],
                )
                at = at + source.nbytes


@dataclass(frozen=True)
class TilePointers:
    """Pointers to scales of a tile in the first stage."""

    rows: list  # for each 64-row block: to that of the thread's first row
    columns: list  # to that of each of the tile's columns, or blocks of `shared` ones


class ScaledConsumer(PromotedConsumer):
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
            for v in range(cute.size(view.totals)):
                view.totals[v] = Float32(select_(counts, view.totals[v], Float32(0.0)))
        return state

    def partition_for_math(self, stages, warpgroup, args):
        view = super().partition_for_math(stages, warpgroup, args)
        return replace(view, scales=stages.scales)

    def locate(self, view, coords):
        """Returns the `TilePointers` of a tile."""
        s, position = self.spec, DividedPosition(cute.arch.thread_idx()[0] % WARPGROUP)
        row, column = _first_lines(s, coords)
        own_row = kept_in_register(first_row(position, view.first_row))
        own_column = kept_in_register(first_column(position))
        blocks = range(s.rows_per_warpgroup // 64)
        lines = [own_row + 64 * self.atom_layout_m * i for i in blocks]
        if s.a_block == 1:
            before = row % SCALES_ALIGNMENT if s.grouped == "m" else 0
            rows = [before + line for line in lines]
        else:
            rows = [(row + line) // s.a_block - _aligned(row // s.a_block) for line in lines]
        # NOTE: of blocks, too, those of the thread's own columns, although all threads have the
        # same: what is seen to be the same goes to uniform registers, for which the warp waits.
        if s.b_block == 1:
            columns = [own_column + nth_column(0, i) for i in range(s.tile_n // 4)]
        else:
            starts = [column + own_column + i for i in range(0, s.tile_n, self.shared)]
            columns = [x // s.b_block - _aligned(column // s.b_block) for x in starts]
        behind = view.scales + s.scales_of_lines[0]
        return TilePointers([view.scales + x for x in rows], [behind + x for x in columns])

    def piece_scales(self, view, block, part, stage):
        """Returns those of a thread's rows, of columns by their numbers, and where others lie."""
        s, offset = self.spec, stage * (scale_stage_bytes(self.spec) // 4)
        rows = [
            _read(view.scales.rows[block] + (offset + nth_row(0, i)), 1)[0]
            for i in range(2 if s.a_block == 1 else 1)
        ]
        mine = sorted({self.column_of(part, v) for v, _ in self.places(block, part)})
        at = {i: view.scales.columns[i] + offset for i in mine}
        if s.b_block > 1:
            return rows, {i: _read(pointer, 1)[0] for i, pointer in at.items()}, {}
        # NOTE: there are registers for half of the columns of a piece.
        half = mine[: len(mine) // 4 * 2]
        return rows, _read_pairs({i: at.pop(i) for i in half}), at

    def finish_piece(self, view, block, part, scales, release):
        rows, columns, others = scales
        if not others:
            release()
        self.promote(view, block, part, (rows, columns))
        if others:
            columns = _read_pairs(others)
            cute.arch.sync_warp()  # one thread releases what all have read
            release()
            self.promote(view, block, part, (rows, columns))

    def promote(self, view, block, part, scales):
        """Adds the sums of those columns that scales are given of."""
        rows, columns = scales
        for v, at in self.places(block, part):
            if (column := self.column_of(part, v)) in columns:
                scale = rows[line_of(v)[0] % len(rows)] * columns[column]
                total, value = view.totals[at], view.sums[v].to(Float32)
                view.totals[at] = in_order("fma.rn.f32 $0, $1, $2, $3;", value, scale, total)

    def column_of(self, part, v):
        """Returns which of `TilePointers.columns` is that of a sum of a piece."""
        column = line_of(v)[1]
        if self.spec.b_block == 1:
            return part * self.columns // 4 + column
        return (part * self.columns + nth_column(0, column)) // self.shared


def _read_pairs(pointers):
    """Returns what pointers by number point to, neighbours two at a time."""
    numbers, found = list(pointers), {}
    for i, j in zip(numbers[::2], numbers[1::2], strict=True):
        found[i], found[j] = _read(pointers[i], 2)
    return found


def _read(pointer, count):
    """Returns adjacent float32 of shared memory."""
    held = cute.make_rmem_tensor(count, Float32)
    cute.autovec_copy(adjacent(Float32, pointer.toint(), count, cute.AddressSpace.smem), held)
    return [held[i] for i in range(count)]
