"""The consumer that adds the tensor cores' sums up in float32, k-tile by k-tile.

Hopper's wgmma keeps 14 digits of sums of 8-bit floats. Here it sums one k-tile at a time, in
accumulators of its own, which are then added to those of the tile. No wgmma of this warpgroup runs
meanwhile; that of the other one does.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from .ss import SharedConsumer


class PromotedConsumer(SharedConsumer):
    """Math warpgroups with two sets of accumulators."""

    def make_accumulators(self, shape):
        acc, sums = (cute.make_rmem_tensor(shape, self.acc_dtype) for _ in range(2))
        return acc, sums

    @cute.jit
    def _accumulate(
        self, view, ring, state, k_tiles, blocks: cutlass.Constexpr,
        on_issued: cutlass.Constexpr,
    ):  # fmt: skip
        view.acc.fill(0.0)
        for _ in cutlass.range(k_tiles, unroll=1):
            ring.consumer_wait(state)
            tiled_mma = self.make_tiled_mma(self.atom_layout_m)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
            warpgroup.fence()
            self._multiply_stage(tiled_mma, view, state.index, blocks)
            warpgroup.wait_group(0)
            ring.consumer_release(state)
            state.advance()
            for v in cutlass.range_constexpr(blocks * cute.size(view.acc, mode=[0])):
                view.acc[v] = view.acc[v] + view.sums[v]
        on_issued()
        return state
