"""Accumulator → registers of D's dtype → staged shared tile (stmatrix) → TMA store.

A tile leaves in subtiles of (epi_tile_m, epi_tile_n) that pass through a ring of shared
buffers, so converting one overlaps the store of those before it.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from ..dtypes import CUTE_DTYPE


class StagedStore:
    """The protocol of an epilogue: layouts and atom on the host, `store_tile` on the GPU."""

    def __init__(self, spec, schedule):
        self.spec, self.schedule = spec, schedule
        self.dtype = CUTE_DTYPE[spec.d_dtype]
        self.subtile = (spec.epi_tile_m, spec.epi_tile_n)
        self.subtiles_n = spec.tile_n // spec.epi_tile_n
        self.num_subtiles = spec.tile_m // spec.epi_tile_m * self.subtiles_n
        if spec.warp_schedule == "pingpong":
            self.num_subtiles = spec.tile_m // 64 * self.subtiles_n

    def setup_layouts(self):
        atom = warpgroup.make_smem_layout_atom(
            sm90.get_smem_layout_atom(
                utils.LayoutEnum.ROW_MAJOR, self.dtype, self.spec.epi_tile_n
            ),
            self.dtype,
        )
        self.layout = cute.tile_to_shape(
            atom, (*self.subtile, self.spec.epi_stages), order=(0, 1, 2)
        )

    def make_tma_atom(self, mD):
        one_stage = cute.slice_(self.layout, (None, None, 0))
        op = cpasync.CopyBulkTensorTileS2GOp()
        return cpasync.make_tiled_tma_atom(op, mD, one_stage, self.subtile)[0]

    def partition(self, tma_d, tiled_mma, thread, acc, sD, gD_mnl):
        """Makes one math thread's views.

        Args:
          thread: index among the threads that work on the tile.
          acc: its accumulator.
          sD: (epi_tile_m, epi_tile_n, stages).
          gD_mnl: coordinates (bM, bN, tiles_m, tiles_n, L).
        """
        self.tma_d = tma_d
        stmatrix = warp.StMatrix8x8x16bOp(False, 4)
        # The copy that follows the accumulator's layout, and the instruction it is made of.
        by_acc = cute.make_tiled_copy_C_atom(
            cute.make_copy_atom(stmatrix, cutlass.Float16), tiled_mma
        )
        store = sm90.sm90_get_smem_store_op(utils.LayoutEnum.ROW_MAJOR, self.dtype, Float32)
        self.r2s = cute.make_tiled_copy_S(store, by_acc)
        thr_r2s = self.r2s.get_slice(thread)
        self.tRS_sD = thr_r2s.partition_D(sD)  # (R2S, R2S_M, R2S_N, stages)
        self.tRS_rAcc = self.r2s.retile(acc)  # (R2S, R2S_M, R2S_N)
        self.fragment = cute.make_layout(cute.shape(thr_r2s.partition_S(sD))[:3]).shape
        # (bM, bN, ...) → ((subtile), (subtiles_m, subtiles_n), tiles_m, tiles_n, L)
        gD = cute.flat_divide(gD_mnl, self.subtile)
        self.bSG_sD, self.bSG_gD = cpasync.tma_partition(
            tma_d, 0, cute.make_layout(1), cute.group_modes(sD, 0, 2), cute.group_modes(gD, 0, 2)
        )

    @cute.jit
    def store_tile(self, is_store_warp, written, tile_m, tile_n, batch):
        """Stores the accumulator to tile (tile_m, tile_n, batch) of D.

        Args:
          is_store_warp: whether this warp issues the TMA stores.
          written: subtiles that this warp has written before; selects the buffer.

        Returns:
          `written`, advanced.
        """
        stages = self.spec.epi_stages
        values = cute.size(self.fragment)
        for i in cutlass.range_constexpr(self.num_subtiles):
            rAcc = cute.make_rmem_tensor(self.fragment, Float32)
            for v in cutlass.range_constexpr(values):
                rAcc[v] = self.tRS_rAcc[i * values + v]
            rD = cute.make_rmem_tensor(self.fragment, self.dtype)
            rD.store(rAcc.load().to(self.dtype))
            buffer = (written + i) % stages
            cute.copy(self.r2s, rD, self.tRS_sD[None, None, None, buffer])
            cute.arch.fence_proxy("async.shared", space="cta")
            # One barrier a subtile: the store warp arrives here only after all but the newest
            # `stages - 2` stores have been read out, so the next buffer is free behind it.
            self.schedule.sync_epilogue()
            if is_store_warp:
                at = (None, i // self.subtiles_n, i % self.subtiles_n, tile_m, tile_n, batch)
                cute.copy(self.tma_d, self.bSG_sD[None, buffer], self.bSG_gD[at])
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(stages - 2, read=True)
        return written + self.num_subtiles

    @cute.jit
    def drain(self, is_store_warp):
        """Waits until the shared buffers of this warp's stores may be written again."""
        if is_store_warp:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
