"""One matrix of the results: registers of its dtype → staged shared tile → TMA store.

Where its rows begin and end anywhere, threads store it in place of TMA, each warp whole rows of a
staged tile, an element a thread.

A warpgroup's rows leave in subtiles of (64, epi_tile_n) that pass through its own ring of
shared buffers, so converting one overlaps the stores of those before it. Warpgroups share
nothing here: two that work on one tile drift apart, and one multiplies while the other stores.

CuTe's names: tRS_rD, tRS_sD are a thread's parts of D in the copy from **R**egisters to **S**hared
memory, on either side; bSG_sD, bSG_gD the boxes of the **b**ulk copy from **S**hared to **G**lobal.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.tensor_utils as tensor_utils
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int16, Int32, Int64
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.cutlass_dsl import select_

from ...gemm.dtypes import QUANTIZED, names
from ...gemm.smem import EPI_TILE_M
from ...gemm.wgmma_fragment import column_of, row_of
from ..copies import boxes_of, store_atom
from ..dtypes import CUTE_DTYPE
from ..panels import of_panels, own_map
from ..shared_memory import WARPGROUP
from . import instructions as gpu
from .quantize import pack_pairs

BITS = {16: Int16, 32: Int32}  # of an element


def staged_matrix(spec, result):
    """Returns the `StagedMatrix` of a result, by who stores it."""
    return (LooseMatrix if spec.loose_d else StagedMatrix)(spec, result)


def stored_along(spec):
    """Returns how D and matrices of the epilogue are stored."""
    layouts = tensor_utils.LayoutEnum
    return layouts.ROW_MAJOR if spec.d_major == "n" else layouts.COL_MAJOR


def staged_layout(spec, dtype, buffers):
    """Returns the swizzled layout (64, epi_tile_n, buffers) of tiles that lie as D does."""
    columns, along = spec.epi_tile_n, stored_along(spec)
    along_n = spec.d_major == "n"
    kind = sm90.get_smem_layout_atom(along, dtype, columns if along_n else EPI_TILE_M)
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    order = (0, 1, 2) if along_n else (1, 0, 2)
    return cute.tile_to_shape(atom, (EPI_TILE_M, columns, buffers), order=order)


def copy_by_accumulator(warpgroup_mma):
    """Returns the tiled copy whose fragments have the order of one warpgroup's accumulator."""
    stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), cutlass.Float16)
    return cute.make_tiled_copy_C_atom(stmatrix, warpgroup_mma)


def check_order(thr_partition, columns):
    """Asserts that the fragments of thread 0 hold a subtile in the accumulator's order."""
    identity = cute.make_identity_tensor((EPI_TILE_M, columns))
    fragment = thr_partition(identity)
    held = [tuple(fragment[v]) for v in range(cute.size(fragment))]
    expected = [(row_of(0, v), column_of(0, v)) for v in range(columns // 2)]
    assert held == expected, f"a fragment holds {held}, the accumulator {expected}"


class StagedMatrix:
    """The staged tiles of one matrix, for all math warpgroups of a CTA."""

    def __init__(self, spec, result):
        self.spec = spec
        self.result = result
        self.dtype = CUTE_DTYPE[result.dtype]
        self.subtile = (EPI_TILE_M, spec.epi_tile_n)
        self.keeps_sums = result.dtype in names("sum")  # stores accumulators as they are
        self.value_dtype = self.dtype if self.keeps_sums else Float32  # before it is converted

    def staged_layout(self):
        """Returns the layout (64, epi_tile_n, buffers) of all warpgroups' buffers."""
        buffers = self.spec.math_warpgroups * self.spec.epi_stages
        return staged_layout(self.spec, self.dtype, buffers)

    def make_tma_atom(self, mD):
        """Returns the tensor map of a result mD, of panels a tuple.

        NOTE: where the contiguous extent is no multiple of 16 bytes, a TMA store writes up to the
        next multiple, past the end of the line. `dispatch/legality.py` refuses such products.
        """
        one_stage = cute.slice_(self.staged_layout(), (None, None, 0))
        box = self.spec.epi_box(self.result.dtype)
        return of_panels(mD, lambda mD: store_atom(mD, one_stage, self.subtile, box))

    def allocate(self, memory):
        return memory.tensor(self.dtype, self.staged_layout())  # (64, epi_tile_n, buffers)

    def thread_view(self, tma_d, sD, by_acc, thread):
        """Returns one math thread's `StagingView`; `by_acc` is a `copy_by_accumulator`."""
        store = sm90.sm90_get_smem_store_op(stored_along(self.spec), self.dtype, Float32)
        if self.dtype.width == 8:  # a thread's two adjacent columns at once
            universal = cute.nvgpu.CopyUniversalOp()
            store = cute.make_copy_atom(universal, self.dtype, num_bits_per_copy=16)
        r2s = cute.make_tiled_copy_S(store, by_acc)
        check_order(r2s.get_slice(0).partition_S, self.spec.epi_tile_n)
        thr_r2s = r2s.get_slice(thread)
        tRS_sD = thr_r2s.partition_D(sD)  # (R2S, R2S_M, R2S_N, buffers)
        registers = cute.make_layout(cute.shape(thr_r2s.partition_S(sD))[:3]).shape
        return StagingView(self, tma_d, r2s, sD, tRS_sD, registers)


@dataclass(frozen=True)
class StagingView:
    """A math thread's view of one matrix."""

    matrix: StagedMatrix
    tma_d: Any  # of panels a tuple
    r2s: Any
    sD: Any  # (64, epi_tile_n, buffers)
    tRS_sD: Any  # (R2S, R2S_M, R2S_N, buffers)
    registers: Any  # the shape of its values of a subtile: (R2S, R2S_M, R2S_N)

    def write(self, values, buffer):
        """Writes a thread's values of a subtile to a shared buffer, in the matrix's dtype."""
        tRS_rD = cute.make_rmem_tensor(self.registers, self.matrix.dtype)  # (R2S, R2S_M, R2S_N)
        if self.matrix.result.dtype in QUANTIZED:
            pack_pairs(self.matrix.result.dtype, values, tRS_rD)
        else:
            tRS_rD.store(values.load().to(self.matrix.dtype))
        cute.copy(self.r2s, tRS_rD, self.tRS_sD[None, None, None, buffer])

    def tile_view(self, tiles, index, panel):
        """Returns the view of the tile that has this index among `tiles` (bM, bN, ...)."""
        tma_d, options = own_map(self.tma_d, panel)
        # (64, epi_tile_n, row blocks, column blocks, tiles ...)
        subtiles = cute.flat_divide(tiles, self.matrix.subtile)
        bSG_sD, bSG_gD = boxes_of(tma_d, self.sD, subtiles)
        return StoreView(tma_d, bSG_sD, bSG_gD, index, options)


class LooseMatrix(StagedMatrix):
    """One that threads store; in place of the tensor map it has a `Strided`."""

    def make_tma_atom(self, mD):
        return mD

    def thread_view(self, strided, sD, by_acc, thread):
        staging = super().thread_view(strided, sD, by_acc, thread)
        columns = self.spec.epi_tile_n
        return LooseView(**vars(staging), row=thread // columns, column=thread % columns)


@dataclass(frozen=True)
class LooseView(StagingView):
    """The same for a matrix that threads store; `tma_d` is its `Strided`."""

    row: Any  # that the thread stores first, of a staged tile
    column: Any

    def tile_view(self, tiles, index, panel):
        return self

    def scatter(self, buffer, coords):
        """Stores a thread's part of a shared buffer to where it lies in D; `SubtileCoords`."""
        d, width, rows = self.tma_d, self.matrix.dtype.width, WARPGROUP // self.matrix.subtile[1]
        row, column = coords.row0 + self.row, coords.column0 + self.column
        left = select_(column < coords.n, coords.m - row, Int32(0))  # rows from the thread's first
        at = Int64(coords.batch) * d.batch_stride + Int64(row) * d.stride + column
        address, step = d.pointer.toint() + at * (width // 8), Int64(d.stride) * (rows * width // 8)
        # NOTE: `cute.recast_tensor` forgets how a pointer swizzles.
        swizzle = self.matrix.staged_layout().inner
        pointer = cute.recast_ptr(self.sD.iterator, swizzle, BITS[width])
        bits = cute.make_tensor(pointer, self.sD.layout)
        for i in range(0, EPI_TILE_M, rows):
            gpu.store_where(left > i, address, bits[self.row + i, self.column, buffer])
            address = address + step


@dataclass(frozen=True)
class StoreView:
    """One matrix's part of a tile, for the warp that stores it."""

    tma_d: Any
    bSG_sD: Any  # (box, buffers)
    bSG_gD: Any  # (box, row blocks, column blocks, tiles ...)
    index: Any  # of the tile
    options: dict  # of the copy

    def store(self, buffer, block):
        """Sends a shared buffer to a block (row block, column block) of the tile; one warp."""
        shared = self.bSG_sD[None, buffer]
        box = self.bSG_gD[None, *block, *self.index]
        cute.copy(self.tma_d, shared, box, **self.options)
