"""The consumer that adds the tensor cores' sums up in float32, k-tile by k-tile.

Hopper's wgmma keeps 14 digits of sums of 8-bit floats. Here it sums one k-tile at a time, in
registers of its own, which are then added to the tile's accumulators: as they are, or times the
scales of the blocks that were multiplied (`block_scales`). No wgmma of this warpgroup runs
meanwhile; those of the others do. A tile whose sums do not fit beside its accumulators has several
pieces, of 64 rows and `GemmSpec.sum_columns`, which take turns in the registers for sums.
"""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import T

from .ss import SharedConsumer, nothing


class PromotedConsumer(SharedConsumer):
    """Math warpgroups with accumulators of a tile, and others of a piece of it for a k-tile."""

    def make_accumulators(self):
        s = self.spec
        acc = self.make_registers(self.acc_dtype, s.rows_per_warpgroup, s.tile_n)
        return acc, self.make_registers(self.sum_dtype, 64, self.columns), acc

    @cute.jit
    def _accumulate(
        self, view, ring, state, k_tiles, blocks: cutlass.Constexpr,
        on_issued: cutlass.Constexpr,
    ):  # fmt: skip
        view.totals.fill(0.0)
        for _ in cutlass.range(k_tiles, unroll=1):
            ring.consumer_wait(state)
            self._multiply_pieces(view, ring, state, blocks)
            state = self.after(state)
        on_issued()
        return state

    def _multiply_pieces(self, view, ring, state, blocks):
        parts = self.spec.tile_n // self.columns
        for piece in range(blocks * parts):
            warpgroup.fence()
            self._multiply_piece(view, *divmod(piece, parts), state.index)
            scales = self.piece_scales(view, *divmod(piece, parts), state.index)
            warpgroup.wait_group(0)
            last = piece == blocks * parts - 1
            release = partial(ring.consumer_release, state) if last else nothing
            self.finish_piece(view, *divmod(piece, parts), scales, release)

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

    def piece_scales(self, view, block, part, stage):
        """Returns what the sums of a piece are multiplied by; here by nothing."""

    def finish_piece(self, view, block, part, scales, release):
        """Promotes a piece; `release` frees the stage, where it is the last one."""
        release()
        self.promote(view, block, part, scales)

    def promote(self, view, block, part, scales):
        """Adds the sums of a piece to the tile's accumulators."""
        for v, at in self.places(block, part):
            total = view.totals[at]
            view.totals[at] = in_order("add.rn.f32 $0, $1, $2;", view.sums[v], total)

    def places(self, block, part):
        """Yields the number of each sum of a piece, and of its accumulator."""
        columns = self.columns // 2  # of 64 rows a thread has half as many elements
        first = block * (self.spec.tile_n // 2) + part * columns
        return ((v, first + v) for v in range(columns))


def in_order(instruction, *operands):
    """Returns the float32 of an instruction that stays in its place among others and wgmmas.

    Else the additions of one piece mix with the products of the next, which then take other
    registers for their sums.
    """
    values = [Float32(x).ir_value() for x in operands]
    constraints = ",".join(["=f"] + ["f"] * len(values))
    options = {"has_side_effects": True, "is_align_stack": False}
    return Float32(llvm.inline_asm(T.f32(), values, instruction, constraints, **options))
