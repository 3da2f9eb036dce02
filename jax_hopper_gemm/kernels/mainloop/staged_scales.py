"""Block scales that arrive in stages, with the operands whose lines they belong to.

A stage ends with the scales of a tile's rows, then of its columns, for its k-tile. Math warps read
them while the tensor cores multiply. Held in registers from k-tile to k-tile, as `promoted` has
them, those of columns would leave too few for accumulators, and their loads delay wgmmas, which
wait for registers that loads' addresses are in.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass.cutlass_dsl import min as smaller

from ...gemm.wgmma_fragment import (
    DividedPosition,
    first_column,
    first_row,
    line_of,
    nth_column,
    nth_row,
)
from ..shared_memory import WARPGROUP
from .promoted import PromotedConsumer, scaled_sum, without_zeros
from .tma import TmaOperand, TmaProducer

ALIGNED_LINES = 16  # float32 that a copy may begin at are multiples


@dataclass(frozen=True)
class Source:
    """Where the scales of a tile's lines lie."""

    address: Any  # bytes, at the tile's first k-tile
    k_bytes: Any  # to the next k-tile's
    nbytes: int


class StagingProducer(TmaProducer):
    """Loads both operands and their scales; every CTA of a cluster all scales of its own."""

    def __init__(self, spec):
        super().__init__(spec, TmaOperand(spec, "a"), TmaOperand(spec, "b"))
        self.tma_bytes += spec.scale_bytes

    def partition_for_load(self, args, stages, tma_coords, cta):
        view = super().partition_for_load(args, stages, tma_coords, cta)
        return *view, (args.scales, stages.scales)

    def partition(self, view, coords):
        slices = super().partition(view, coords)
        s, (scales, _), sources = self.spec, view[2], []
        firsts = (coords.m * s.tile_m, s.tile_m), (coords.n * s.tile_n, s.tile_n)
        for of, (first, lines) in zip(scales, firsts, strict=True):
            # NOTE: behind the last line is as much padding as a tile has lines, and no more.
            first = smaller(first, (of.last // ALIGNED_LINES + 1) * ALIGNED_LINES)
            at = Int64(coords.batch) * of.batch_stride + Int64(coords.k_first) * of.k_stride
            address = (of.scales + (at + first)).toint()
            sources.append(Source(address, Int64(of.k_stride) * 4, 4 * lines))
        return *slices, sources

    @cute.jit
    def load_beside(self, view, slices, i, stage, full):
        at = view[2][1].toint() + stage * self.spec.scale_stage_bytes
        with cute.arch.elect_one():
            for source in slices[2]:
                cute.arch.inline_ptx(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                    f" [{{$r0}}], [{{$r1}}], {source.nbytes}, [{{$r2}}];",
                    read_only_args=[at, source.address + i * source.k_bytes, full.toint()],
                )
                at = at + source.nbytes


class StagedConsumer(PromotedConsumer):
    """Sums are multiplied by the scales of their row and column, a k-tile's own."""

    def partition_for_math(self, stages, warpgroup, args):
        view = super().partition_for_math(stages, warpgroup, args)
        position = DividedPosition(cute.arch.thread_idx()[0] % WARPGROUP)
        rows = stages.scales + first_row(position, view.first_row)
        return replace(
            view, scales=(rows, stages.scales + first_column(position, self.spec.tile_m))
        )

    def multiply(self, view, ring, state, coords, on_issued):
        state = super().multiply(view, ring, state, coords, on_issued)
        without_zeros(view, coords)
        return state

    def piece_scales(self, view, scales, block, part, stage):
        """Returns those of a thread's rows and of half of its columns, and pointers to the rest."""
        of_rows, of_columns = (x + stage * (self.spec.scale_stage_bytes // 4) for x in view.scales)
        first = 64 * self.atom_layout_m * block
        rows = [_read(of_rows + (first + nth_row(0, j)), 1) for j in range(2)]
        pairs = [
            of_columns + (part * self.columns + nth_column(0, i))
            for i in range(0, self.columns // 4, 2)
        ]
        half = len(pairs) // 2
        return [x for (x,) in rows], _read_pairs(pairs[:half]), pairs[half:]

    def finish_piece(self, view, block, part, scales, release):
        rows, columns, others = scales
        self.promote(view, block, part, (rows, 0, columns))
        rest = _read_pairs(others)
        release()
        self.promote(view, block, part, (rows, len(columns), rest))

    def promote(self, view, block, part, scales):
        """Adds the sums of those columns that scales are given of."""
        rows, first, columns = scales
        for v, at in self.places(block, part):
            row, column = line_of(v)
            if first <= column < first + len(columns):
                scale = rows[row % 2] * columns[column - first]
                view.acc[at] = scaled_sum(view.sums[v], scale, view.acc[at])


def _read_pairs(pointers):
    return [x for pointer in pointers for x in _read(pointer, 2)]


def _read(pointer, count):
    """Returns adjacent float32 of shared memory."""
    source = cute.make_ptr(
        Float32, pointer.toint(), cute.AddressSpace.smem, assumed_align=4 * count
    )
    held = cute.make_rmem_tensor(count, Float32)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(count)), held)
    return [held[i] for i in range(count)]
