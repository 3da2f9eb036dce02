"""The operands of an epilogue, by kind: how each is loaded into a slot of the ring, and read.

CuTe's names: mC is an operand in global memory and sC its slots in shared memory; bGS_gC, bGS_sC
are the boxes of the **b**ulk copy from **G**lobal to **S**hared memory, on either side; tSR_sC,
tSR_rC a thread's parts in the copy from **S**hared memory to **R**egisters.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

from ...gemm.smem import EPI_TILE_M, SMEM_VECTOR, column_elements, loaded_bytes
from ...gemm.wgmma_fragment import (
    DividedPosition,
    first_column,
    first_row,
    line_of,
    nth_column,
    nth_row,
)
from ..copies import boxes_of, load_atom
from ..dtypes import CUTE_DTYPE
from ..panels import of_panels, own_map
from .matrix_store import check_order, staged_layout


@dataclass(frozen=True)
class LoadView:
    """An operand's part of one tile of D, for the warp that loads it."""

    tma_c: Any
    bGS_gC: Any  # (box, row blocks, column blocks) of a matrix, (box, pieces) of a vector
    bGS_sC: Any  # (box, buffers)
    options: dict  # of the copy

    def load(self, full, buffer, block):
        """Loads a block into a buffer; its bytes arrive on the barrier `full`."""
        source, target = self.bGS_gC[None, *block], self.bGS_sC[None, buffer]
        cute.copy(self.tma_c, source, target, tma_bar_ptr=full, **self.options)


@dataclass(frozen=True)
class MatrixView:
    """A math thread's view of a loaded matrix."""

    dtype: Any
    s2r: Any
    tSR_sC: Any  # (S2R, S2R_M, S2R_N, buffers)
    registers: Any  # the shape of its values of a subtile: (S2R, S2R_M, S2R_N)

    def read(self, buffer):
        """Returns a thread's values of a subtile, in the operand's dtype."""
        tSR_rC = cute.make_rmem_tensor(self.registers, self.dtype)  # (S2R, S2R_M, S2R_N)
        cute.copy(self.s2r, self.tSR_sC[None, None, None, buffer], tSR_rC)
        return tSR_rC


@dataclass(frozen=True)
class VectorView:
    """A math thread's view of a loaded row or column."""

    dtype: Any
    tSR_sC: Any  # (2, columns / 8, buffers) of a row, (2, 1, buffers) of a column
    skipped: Any = None  # elements before the first of the tile; None if there never are any

    def read(self, buffer):
        source = self.tSR_sC[None, None, buffer]
        if self.skipped is not None:
            source = cute.make_tensor(source.iterator + self.skipped, source.layout)
        tSR_rC = cute.make_rmem_tensor(source.shape, self.dtype)
        cute.autovec_copy(source, tSR_rC)
        return tSR_rC


class LoadedOperand:
    """The protocol of a loaded operand, with what all kinds have in common.

    `box` has the extents of a subtile's part of it.
    """

    def __init__(self, spec, operand, number):
        self.spec = spec
        self.kind = operand.kind
        self.number = number  # of its value in the graph
        self.dtype = CUTE_DTYPE[operand.dtype]
        self.buffers = spec.math_warpgroups * spec.epi_load_stages
        self.box = self.box_of(operand)
        checked = self.kind == "matrix" and not spec.loose_d
        self.tma_box = spec.epi_box(operand.dtype) if checked else None
        self.nbytes = math.prod(self.box) * self.dtype.width // 8  # of a slot, as TMA counts them
        self.blocks = (None,) * (len(self.box) + 1)

    def along(self, m, n):
        """Returns which of a pair, for M and for N, the operand varies along."""
        return {"matrix": (m, n), "row": (n,), "column": (m,)}[self.kind]

    def box_of(self, operand):
        return self.along(EPI_TILE_M, self.spec.epi_tile_n)

    def make_tma_atom(self, mC):
        one_stage = cute.slice_(self.staged_layout(), (*self.blocks[1:], 0))
        return of_panels(mC, lambda mC: load_atom(mC, one_stage, self.box, self.tma_box))

    def pieces(self, tma_coords, coords):
        """Returns a tile's part in boxes, (box, blocks ..., tiles ...), and the tile's index."""
        tiles, index = getattr(tma_coords, self.kind)(coords)
        return cute.flat_divide(tiles, self.box), index

    def load_view(self, tma_c, sC, tma_coords, coords):
        pieces, index = self.pieces(tma_coords, coords)
        modes, (tma_c, options) = len(self.box), own_map(tma_c, coords.panel)
        bGS_sC, bGS_gC = boxes_of(tma_c, sC, pieces, modes)
        return LoadView(tma_c, bGS_gC[*self.blocks, *index], bGS_sC, options)

    def tile_view(self, view, coords):
        """Returns a math thread's view for the tile at `coords`."""
        return view


class LoadedMatrix(LoadedOperand):
    """An element for each of D: a tile (64, epi_tile_n) a slot."""

    def staged_layout(self):
        """Returns the layout (64, epi_tile_n, buffers) of all warpgroups' slots."""
        return staged_layout(self.spec, self.dtype, self.buffers)

    def allocate(self, memory):
        return memory.tensor(self.dtype, self.staged_layout())  # (64, epi_tile_n, buffers)

    def thread_view(self, sC, by_acc, thread):
        # A thread's two adjacent columns at once, unless these are no neighbours in memory; for
        # 16-bit elements ldmatrix brings four pairs.
        along_n = self.spec.d_major == "n"
        if self.dtype.width == 16:
            atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(not along_n, 4), self.dtype)
        else:
            bits = (2 if along_n else 1) * self.dtype.width
            universal = cute.nvgpu.CopyUniversalOp()
            atom = cute.make_copy_atom(universal, self.dtype, num_bits_per_copy=bits)
        s2r = cute.make_tiled_copy_S(atom, by_acc)
        check_order(s2r.get_slice(0).partition_D, self.spec.epi_tile_n)
        thr_s2r = s2r.get_slice(thread)
        tSR_sC = thr_s2r.partition_S(sC)  # (S2R, S2R_M, S2R_N, buffers)
        registers = cute.make_layout(cute.shape(thr_s2r.partition_D(sC))[:3]).shape
        return MatrixView(self.dtype, s2r, tSR_sC, registers)

    def index_of(self, v):
        """Returns the index of a thread's v-th element among the values that `read` returns."""
        return v


class LoadedVector(LoadedOperand):
    """An operand that varies along one axis of D."""

    def __init__(self, spec, operand, number):
        super().__init__(spec, operand, number)
        self.stride = loaded_bytes(spec, operand) * 8 // self.dtype.width  # of a buffer

    def staged_layout(self):
        """Returns the layout (elements, buffers) of all warpgroups' slots."""
        return cute.make_layout((*self.box, self.buffers), stride=(1, self.stride))

    def allocate(self, memory):
        nbytes = self.buffers * self.stride * self.dtype.width // 8
        pointer = memory.pointer(self.dtype, nbytes, SMEM_VECTOR)
        return cute.make_tensor(pointer, self.staged_layout())  # (elements, buffers)


class LoadedRow(LoadedVector):
    """An element for each column of D."""

    def thread_view(self, sC, by_acc, thread):
        (columns,) = self.box
        shape = 2, columns // 8, self.buffers
        layout = cute.make_layout(shape, stride=(nth_column(0, 1), nth_column(0, 2), self.stride))
        first = first_column(DividedPosition(thread))
        return VectorView(self.dtype, cute.make_tensor(sC.iterator + first, layout))

    def index_of(self, v):
        _, i = line_of(v)
        return i % 2, i // 2


class LoadedColumn(LoadedVector):
    """An element for each row of D."""

    def thread_view(self, sC, by_acc, thread):
        shape = 2, 1, self.buffers
        layout = cute.make_layout(shape, stride=(nth_row(0, 1), 0, self.stride))
        first = first_row(DividedPosition(thread))
        return VectorView(self.dtype, cute.make_tensor(sC.iterator + first, layout))

    def index_of(self, v):
        return line_of(v)[0], 0


class LoadedSpanColumn(LoadedColumn):
    """An element for each row of D, where tiles begin at any row.

    NOTE: TMA faults, and launches fail, where a copy along the contiguous index begins between
    multiples of 16 bytes. So a piece begins at the multiple before its first row, and is longer.
    """

    def box_of(self, operand):
        elements = column_elements(self.spec, operand.dtype)
        self.step = elements - EPI_TILE_M  # elements of 16 bytes
        return (elements,)

    def pieces(self, tma_coords, coords):
        first = coords.first - coords.first % self.step
        return tma_coords.pieces_of_column(first, *self.box), ()

    def tile_view(self, view, coords):
        return replace(view, skipped=coords.first % self.step)


def make_operand(spec, operand, number):
    column = LoadedSpanColumn if spec.grouped == "m" else LoadedColumn
    kinds = {"matrix": LoadedMatrix, "row": LoadedRow, "column": column}
    return kinds[operand.kind](spec, operand, number)
