"""Accumulator → registers of D's dtype → staged shared tile (stmatrix) → TMA store.

A warpgroup's rows leave in subtiles of (64, epi_tile_n) that pass through its own ring of
shared buffers, so converting one overlaps the stores of those before it. Warpgroups share
nothing here: two that work on one tile drift apart, and one multiplies while the other stores.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.tensor_utils as tensor_utils
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from ...spec import EPI_TILE_M
from ..dtypes import CUTE_DTYPE

STORE_BARRIER = 1  # named barriers 1, 2, ...: one a math warpgroup; 0 is the CTA's


class StagedStore:
    """The protocol of an epilogue: layouts and atom on the host, `store_tile` on the GPU."""

    def __init__(self, spec):
        self.spec = spec
        self.dtype = CUTE_DTYPE[spec.d_dtype]
        self.subtile = (EPI_TILE_M, spec.epi_tile_n)
        self.subtiles_m = spec.rows_per_warpgroup // EPI_TILE_M
        self.subtiles_n = spec.tile_n // spec.epi_tile_n

    def setup_layouts(self):
        s = self.spec
        atom = warpgroup.make_smem_layout_atom(
            sm90.get_smem_layout_atom(tensor_utils.LayoutEnum.ROW_MAJOR, self.dtype, s.epi_tile_n),
            self.dtype,
        )
        buffers = s.math_warpgroups * s.epi_stages
        self.layout = cute.tile_to_shape(atom, (*self.subtile, buffers), order=(0, 1, 2))

    def make_tma_atom(self, mD):
        one_stage = cute.slice_(self.layout, (None, None, 0))
        op = cpasync.CopyBulkTensorTileS2GOp()
        return cpasync.make_tiled_tma_atom(op, mD, one_stage, self.subtile)[0]

    def partition(self, tma_d, warpgroup_mma, warpgroup, thread, acc, sD, gD_mnl):
        """Makes one math thread's views.

        Args:
          warpgroup_mma: the tiled MMA of one warpgroup.
          warpgroup, thread: index of the math warpgroup, and of the thread in it.
          acc: its accumulator.
          sD: (64, epi_tile_n, buffers of all warpgroups).
          gD_mnl: coordinates (bM, bN, tiles_m, tiles_n, L).
        """
        s = self.spec
        self.tma_d = tma_d
        self.first_buffer = warpgroup * s.epi_stages
        self.barrier = pipeline.NamedBarrier(STORE_BARRIER + warpgroup, 128)
        # A cooperative tile's row blocks alternate between its warpgroups.
        shared = s.warp_schedule == "cooperative"
        self.row_blocks = s.math_warpgroups if shared else 1
        self.first_row_block = warpgroup if shared else 0
        # The copy that follows the accumulator's layout, and the instruction it is made of.
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), cutlass.Float16)
        by_acc = cute.make_tiled_copy_C_atom(stmatrix, warpgroup_mma)
        store = sm90.sm90_get_smem_store_op(tensor_utils.LayoutEnum.ROW_MAJOR, self.dtype, Float32)
        self.r2s = cute.make_tiled_copy_S(store, by_acc)
        thr_r2s = self.r2s.get_slice(thread)
        self.tRS_sD = thr_r2s.partition_D(sD)  # (R2S, R2S_M, R2S_N, buffers)
        self.tRS_rAcc = self.r2s.retile(acc)  # (R2S, R2S_M, R2S_N)
        self.fragment = cute.make_layout(cute.shape(thr_r2s.partition_S(sD))[:3]).shape
        # (bM, bN, ...) → (subtile, subtile, subtiles_m, subtiles_n, tiles_m, tiles_n, L)
        gD = cute.flat_divide(gD_mnl, self.subtile)
        self.bSG_sD, self.bSG_gD = cpasync.tma_partition(
            tma_d, 0, cute.make_layout(1), cute.group_modes(sD, 0, 2), cute.group_modes(gD, 0, 2)
        )

    @cute.jit
    def store_tile(self, is_store_warp, written, tile_m, tile_n, batch):
        """Stores the accumulator to tile (tile_m, tile_n, batch) of D.

        Args:
          is_store_warp: whether this warp issues its warpgroup's TMA stores.
          written: subtiles that this warpgroup has written before; selects the buffer.

        Returns:
          `written`, advanced.
        """
        stages = self.spec.epi_stages
        values = cute.size(self.fragment)
        for i in cutlass.range_constexpr(self.subtiles_m * self.subtiles_n):
            rAcc = cute.make_rmem_tensor(self.fragment, Float32)
            for v in cutlass.range_constexpr(values):
                rAcc[v] = self.tRS_rAcc[i * values + v]
            rD = cute.make_rmem_tensor(self.fragment, self.dtype)
            rD.store(rAcc.load().to(self.dtype))
            buffer = self.first_buffer + (written + i) % stages
            cute.copy(self.r2s, rD, self.tRS_sD[None, None, None, buffer])
            cute.arch.fence_proxy("async.shared", space="cta")
            # One barrier a subtile: the store warp arrives here only after all but the newest
            # `stages - 2` stores have been read out, so the next buffer is free behind it.
            self.barrier.arrive_and_wait()
            if is_store_warp:
                row_block = i // self.subtiles_n * self.row_blocks + self.first_row_block
                at = (None, row_block, i % self.subtiles_n, tile_m, tile_n, batch)
                cute.copy(self.tma_d, self.bSG_sD[None, buffer], self.bSG_gD[at])
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(stages - 2, read=True)
        return written + self.subtiles_m * self.subtiles_n

    @cute.jit
    def drain(self, is_store_warp):
        """Waits until all stores of this warpgroup have been read from shared memory."""
        if is_store_warp:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
