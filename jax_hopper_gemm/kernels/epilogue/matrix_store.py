"""One matrix of the results: registers of its dtype → staged shared tile → TMA store.

A warpgroup's rows leave in subtiles of (64, epi_tile_n) that pass through its own ring of
shared buffers, so converting one overlaps the stores of those before it. Warpgroups share
nothing here: two that work on one tile drift apart, and one multiplies while the other stores.
"""

import cutlass
import cutlass.cute as cute
import cutlass.tensor_utils as tensor_utils
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from ...gemm.spec import EPI_TILE_M
from ..dtypes import CUTE_DTYPE


def staged_layout(dtype, columns, buffers):
    """Returns the swizzled layout (64, columns, buffers) of row-major tiles."""
    row_major = tensor_utils.LayoutEnum.ROW_MAJOR
    kind = sm90.get_smem_layout_atom(row_major, dtype, columns)
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, (EPI_TILE_M, columns, buffers), order=(0, 1, 2))


def copy_by_accumulator(warpgroup_mma):
    """Returns the tiled copy whose fragments have the order of one warpgroup's accumulator."""
    stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), cutlass.Float16)
    return cute.make_tiled_copy_C_atom(stmatrix, warpgroup_mma)


def check_order(thr_partition, columns):
    """Asserts that the fragments of thread 0 hold a subtile in the accumulator's order."""
    identity = cute.make_identity_tensor((EPI_TILE_M, columns))
    coordinates = thr_partition(identity)
    found = [tuple(coordinates[v]) for v in range(cute.size(coordinates))]
    expected = [(8 * (v // 2 % 2), 8 * (v // 4) + v % 2) for v in range(columns // 2)]
    assert found == expected, f"a fragment holds {found}, the accumulator {expected}"


class StagedMatrix:
    """The staged tiles of one matrix, for all math warpgroups of a CTA."""

    def __init__(self, spec, result):
        self.spec = spec
        self.result = result
        self.dtype = CUTE_DTYPE[result.dtype]
        self.subtile = (EPI_TILE_M, spec.epi_tile_n)

    def setup_layouts(self):
        buffers = self.spec.math_warpgroups * self.spec.epi_stages
        self.layout = staged_layout(self.dtype, self.spec.epi_tile_n, buffers)

    def make_tma_atom(self, mD):
        one_stage = cute.slice_(self.layout, (None, None, 0))
        op = cpasync.CopyBulkTensorTileS2GOp()
        return cpasync.make_tiled_tma_atom(op, mD, one_stage, self.subtile)[0]

    def allocate(self, memory):
        self.sD = memory.tensor(self.dtype, self.layout)  # (64, epi_tile_n, buffers)

    def partition(self, tma_d, by_acc, thread):
        """Makes one math thread's views.

        Args:
          tma_d: the tensor map of the matrix.
          by_acc: see `copy_by_accumulator`.
          thread: index in its warpgroup.
        """
        self.tma_d = tma_d
        row_major = tensor_utils.LayoutEnum.ROW_MAJOR
        store = sm90.sm90_get_smem_store_op(row_major, self.dtype, Float32)
        self.r2s = cute.make_tiled_copy_S(store, by_acc)
        check_order(self.r2s.get_slice(0).partition_S, self.spec.epi_tile_n)
        thr_r2s = self.r2s.get_slice(thread)
        self.tRS_sD = thr_r2s.partition_D(self.sD)  # (R2S, R2S_M, R2S_N, buffers)
        self.fragment = cute.make_layout(cute.shape(thr_r2s.partition_S(self.sD))[:3]).shape

    def begin_tile(self, coordinates):
        """Takes the coordinates of a tile."""
        tiles, at = coordinates
        # (64, epi_tile_n, row blocks, column blocks, tiles ...)
        subtiles = cute.flat_divide(tiles, self.subtile)
        self.bSG_sD, self.bSG_gD = cpasync.tma_partition(
            self.tma_d, 0, cute.make_layout(1),
            cute.group_modes(self.sD, 0, 2), cute.group_modes(subtiles, 0, 2),
        )  # fmt: skip
        self.at = at

    def make_fragment(self):
        """Returns float32 registers for a thread's values of a subtile."""
        return cute.make_rmem_tensor(self.fragment, Float32)

    def write(self, values, buffer):
        """Writes a thread's values of a subtile to a shared buffer, in the matrix's dtype."""
        rD = cute.make_rmem_tensor(self.fragment, self.dtype)
        rD.store(values.load().to(self.dtype))
        cute.copy(self.r2s, rD, self.tRS_sD[None, None, None, buffer])

    def store(self, buffer, subtile):
        """Sends a shared buffer to a subtile (row block, column block) of the tile; one warp."""
        cute.copy(self.tma_d, self.bSG_sD[None, buffer], self.bSG_gD[None, *subtile, *self.at])
