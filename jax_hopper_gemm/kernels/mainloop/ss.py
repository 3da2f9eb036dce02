"""The consumer that multiplies by wgmma with both operands in shared memory ("SS")."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import max as larger

from ..dtypes import CUTE_DTYPE
from ..shared_memory import WARPGROUP
from .tf32 import make_tiled_mma


@dataclass(frozen=True)
class MathView:
    """What a thread of a math warpgroup multiplies with, whatever the tile.

    tCrA, tCrB are descriptors of the operands' stages (`r`: wgmma takes them as registers),
    partitioned (`t`) for the accumulator (`C`).
    """

    tCrA: Any  # (wgmma, 64-row blocks, bK / mma_k, stages)
    tCrB: Any  # (wgmma, parts of the columns, bK / mma_k, stages)
    acc: Any  # (wgmma, 64-row blocks, 1); of the whole tile, once it is multiplied
    sums: Any  # where wgmma adds up: `acc`, or others like it that are promoted to `totals`
    totals: Any  # `acc`, or of which it is made in the end
    first_row: Any  # of a tile, at which the warpgroup's first 64 rows begin
    scales: Any  # `Scales` of A and of B; None without


class SharedConsumer:
    """Math warpgroups that read A and B where the producer put them."""

    step = 1  # stages from one of a warpgroup to its next

    def __init__(self, spec, atom_layout_m, before_read):
        self.spec = spec
        self.atom_layout_m = atom_layout_m  # warpgroups side by side along a tile's rows
        self.before_read = before_read  # the producer's
        self.columns = spec.sum_columns if spec.promoted else spec.tile_n  # of one wgmma
        self.acc_dtype, self.sum_dtype = CUTE_DTYPE[spec.acc_dtype], CUTE_DTYPE[spec.sum_dtype]

    def make_tiled_mma(self, warpgroups, columns=None):
        s, mode = self.spec, cute.nvgpu.OperandMajorMode
        a_mode, b_mode = (mode.K if x == "k" else mode.MN for x in (s.a_major, s.b_major))
        dtypes = CUTE_DTYPE[s.a_dtype], CUTE_DTYPE[s.b_dtype]
        return make_tiled_mma(
            *dtypes, a_mode, b_mode, self.sum_dtype, warpgroups, columns or s.columns_per_warpgroup
        )

    def partition_for_math(self, stages, warpgroup, args):
        tiled_mma = self.make_tiled_mma(self.atom_layout_m, self.columns)
        # One thread stands for its warpgroup.
        thread = warpgroup * WARPGROUP if self.atom_layout_m > 1 else 0
        thr_mma = tiled_mma.get_slice(thread)
        tCrA = tiled_mma.make_fragment_A(thr_mma.partition_A(stages.sA))
        tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(stages.sB))
        return MathView(
            tCrA, tCrB, *self.make_accumulators(),
            first_row=warpgroup * 64 if self.atom_layout_m > 1 else 0,
            scales=args.scales,
        )  # fmt: skip

    def after(self, state, stages=None):
        """Returns a state so many stages later: a warpgroup's next one."""
        after = state.clone()
        for _ in range(stages or self.step):
            after.advance()
        return after

    def sums(self, view):
        return view.acc

    def settle(self, view):
        """Nothing: `acc` are the accumulators that the epilogue reads."""

    def make_accumulators(self):
        """Returns `acc`, `sums` and `totals` of a `MathView`."""
        acc = self.make_registers(self.acc_dtype, self.spec.rows_per_warpgroup, self.spec.tile_n)
        return acc, acc, acc

    def make_registers(self, dtype, rows, columns):
        """Returns a thread's accumulators of so much of a tile."""
        thr_mma = self.make_tiled_mma(1, columns).get_slice(0)
        return cute.make_rmem_tensor(thr_mma.partition_shape_C((rows, columns)), dtype)

    @cute.jit
    def multiply(self, view, ring, state, coords, on_issued: cutlass.Constexpr):
        blocks = self.spec.rows_per_warpgroup // 64
        k_tiles = coords.k_tiles
        if cutlass.const_expr(self.spec.grouped == "m" and blocks == 2):
            # Behind the end of a group, 64 rows that nobody wants are left out.
            if coords.left > view.first_row + 64 * self.atom_layout_m:
                state = self._accumulate(view, ring, state, k_tiles, 2, on_issued)
            else:
                state = self._accumulate(view, ring, state, k_tiles, 1, on_issued)
        elif cutlass.const_expr(self.spec.spans_k):
            last = coords.left - (coords.k_first + k_tiles - 1) * self.spec.tile_k
            state = self._accumulate(view, ring, state, k_tiles, blocks, on_issued, last)
        else:
            state = self._accumulate(view, ring, state, k_tiles, blocks, on_issued)
        return state

    @cute.jit
    def _accumulate(
        self, view, ring, state, k_tiles, blocks: cutlass.Constexpr,
        on_issued: cutlass.Constexpr, last_elements=None,
    ):  # fmt: skip
        """Accumulates the first `blocks` of 64 rows.

        One wgmma group stays in flight: a stage is released one k-tile late, when the group
        that read it has retired.

        Args:
          last_elements: elements of K in the last k-tile where it is not the first; None: all.
        """
        release = state.clone()
        tiled_mma = self.make_tiled_mma(self.atom_layout_m)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
        ring.consumer_wait(state)
        warpgroup.fence()
        self._multiply_stage(tiled_mma, view, state.index, blocks)
        state.advance()
        whole = k_tiles if last_elements is None else k_tiles - 1
        for _ in cutlass.range(1, whole, unroll=1):
            ring.consumer_wait(state)
            self._multiply_stage(tiled_mma, view, state.index, blocks)
            warpgroup.wait_group(1)
            ring.consumer_release(release)
            state.advance()
            release.advance()
        if cutlass.const_expr(last_elements is not None):
            for _ in cutlass.range(larger(whole, Int32(1)), k_tiles, unroll=1):  # one, or none
                ring.consumer_wait(state)
                self._multiply_part(view, state.index, last_elements)
                warpgroup.wait_group(1)
                ring.consumer_release(release)
                state.advance()
                release.advance()
        on_issued()
        warpgroup.wait_group(0)
        ring.consumer_release(release)
        return state

    def _multiply_stage(self, tiled_mma, view, stage, blocks):
        tCrA, tCrB, acc = view.tCrA, view.tCrB, view.sums
        self.before_read()
        for k_block in range(cute.size(tCrA, mode=[2])):
            at = (None, None, k_block, stage)
            if blocks == cute.size(tCrA, mode=[1]):
                cute.gemm(tiled_mma, acc, tCrA[at], tCrB[at], acc)
            else:
                first = (None, (None, 0))
                rows = cute.logical_divide(acc, (None, blocks))[None, (None, 0), None]
                a = cute.logical_divide(tCrA[at], (None, blocks))[first]
                cute.gemm(tiled_mma, rows, a, tCrB[at], rows)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def _multiply_part(self, view, stage, elements):
        """Multiplies the first elements of a stage along K, in steps of an instruction's."""
        self.before_read()
        tiled_mma = self.make_tiled_mma(self.atom_layout_m)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        mma_k = self.spec.mma_k
        for k_block in cutlass.range((elements + (mma_k - 1)) // mma_k, unroll=1):
            at = (None, None, k_block, stage)
            cute.gemm(tiled_mma, view.sums, view.tCrA[at], view.tCrB[at], view.sums)
        warpgroup.commit_group()


def nothing():
    pass
