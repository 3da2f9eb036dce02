"""Zeros in the matrices of empty groups, where K is grouped, beside the tiles of the others.

All CTAs share them, a part of a matrix at a time. A warp writes one part for each tile that its
CTA multiplies, so that DRAM has time for both, and the rest when there are no more tiles.

NOTE: as tiles they would take turns with the others. With half of the groups empty, 400 MB of zeros
then cost 74 us; beside the tiles they cost 26 us.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cutlass_dsl import min as smaller
from cutlass.cutlass_dsl import select_

from ..gemm.group_search import LANES, Window, empty_before_end, is_last, part_in
from ..gemm.offsets import vectors_of_part
from .warp import Warp

VECTOR = 16  # bytes


def store_zeros(address):
    """Writes 16 bytes at a global address which nothing reads soon."""
    cute.arch.inline_ptx("st.global.cs.v4.b32 [{$r0}], {0, 0, 0, 0};", read_only_args=[address])


class ZeroFillWarp:
    """One warp of each CTA, a reader of the scheduler's mailbox."""

    def __init__(self, spec):
        self.spec = spec
        self.warps = int(spec.zero_fill_warp)  # of a CTA

    @cute.jit
    def run(self, tiles):
        raster, zero_fill = tiles.args.raster, tiles.args.zero_fill
        grid_m, grid_n, _ = cute.arch.grid_dim()
        cta_m, cta_n, _ = cute.arch.block_idx()
        parts_of_row = zero_fill.rows.parts_of_row(self.spec.zero_part)
        parts = zero_fill.rows.rows * parts_of_row
        index = cta_m * grid_n + cta_n
        tile, reader = tiles.first()
        window, before = tiles.scheduler.first_window(tiles.state), Int32(0)
        left = Int32(1)
        while left > 0:
            empty = empty_before_end(raster, Window(*window), before, Warp())
            before = Warp().of(empty, Int32(LANES - 1))
            while index < before * parts:
                part = part_in(raster, Window(*window), empty, index, parts, Warp())
                self.fill(zero_fill, parts_of_row, part)
                index = index + grid_m * grid_n
                if tiles.exists(tile):
                    tile, reader = tiles.next(tile, reader)
            left = select_(is_last(raster, Window(*window)), Int32(0), Int32(1))
            window = tuple(tiles.scheduler.next_window(tiles.state, window))
        while tiles.exists(tile):
            tile, reader = tiles.next(tile, reader)

    @cute.jit
    def fill(self, zero_fill, parts_of_row, part):
        start, first, end = vectors_of_part(
            zero_fill.rows, parts_of_row, self.spec.zero_part, part, Int64, smaller
        )
        address = zero_fill.d.toint() + start * VECTOR
        for vector in cutlass.range(first + cute.arch.lane_idx(), end, LANES, unroll=4):
            store_zeros(address + Int64(vector) * VECTOR)
