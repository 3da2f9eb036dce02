"""The operands of an epilogue that arrive in shared memory: a ring of tiles a math warpgroup.

    barrier             arrivals                    waited on by
    operands full       1 + bytes of a subtile      the math warpgroup
    operands empty      its four warps              the loader warp that serves it

One slot of a ring holds what a subtile (64, epi_tile_n) of D needs: a tile of each matrix, a
piece of each row and column, all counted by one barrier. The loader runs ahead by as many slots
as there are, across tiles: those of the next tile arrive while it is multiplied.

A slot is read with ordinary loads and refilled by TMA, of another proxy: a fence between them keeps
the refill from overtaking reads that were issued before it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint8
from cutlass.cute.nvgpu import cpasync, warp

from ...gemm.spec import EPI_TILE_M, SMEM_VECTOR
from ..dtypes import CUTE_DTYPE
from .matrix_store import check_order, staged_layout


class LoadedMatrix:
    """An operand with an element for each of D."""

    def __init__(self, spec, operand, number):
        self.spec = spec
        self.number = number  # of the value
        self.dtype = CUTE_DTYPE[operand.dtype]
        self.subtile = (EPI_TILE_M, spec.epi_tile_n)
        self.nbytes = EPI_TILE_M * spec.epi_tile_n * self.dtype.width // 8

    def setup_layouts(self, buffers):
        self.layout = staged_layout(self.dtype, self.spec.epi_tile_n, buffers)

    def make_tma_atom(self, mC):
        one_stage = cute.slice_(self.layout, (None, None, 0))
        op = cpasync.CopyBulkTensorTileG2SOp()
        return cpasync.make_tiled_tma_atom(op, mC, one_stage, self.subtile)[0]

    def allocate(self, memory):
        self.sC = memory.tensor(self.dtype, self.layout)  # (64, epi_tile_n, buffers)

    def partition_for_load(self, tma_c, coordinates, place):
        """Args: tma_c: tensor map; coordinates: those of the tile at `place`."""
        self.tma_c = tma_c
        tiles, at = coordinates.matrix(place)
        self.tCsC, tCgC = cpasync.tma_partition(
            tma_c, 0, cute.make_layout(1), cute.group_modes(self.sC, 0, 2),
            cute.group_modes(cute.flat_divide(tiles, self.subtile), 0, 2),
        )  # fmt: skip
        self.tCgC = tCgC[None, None, None, *at]

    def load(self, full, buffer, block_m, block_n):
        source = self.tCgC[None, block_m, block_n]
        cute.copy(self.tma_c, source, self.tCsC[None, buffer], tma_bar_ptr=full)

    def partition_for_math(self, by_acc, thread):
        # A thread's two adjacent columns at once; for 16-bit elements ldmatrix brings four pairs.
        if self.dtype.width == 16:
            atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype)
        else:
            pair = 2 * self.dtype.width
            universal = cute.nvgpu.CopyUniversalOp()
            atom = cute.make_copy_atom(universal, self.dtype, num_bits_per_copy=pair)
        self.s2r = cute.make_tiled_copy_S(atom, by_acc)
        check_order(self.s2r.get_slice(0).partition_D, self.spec.epi_tile_n)
        thr_s2r = self.s2r.get_slice(thread)
        self.tSR_sC = thr_s2r.partition_S(self.sC)  # (S2R, S2R_M, S2R_N, buffers)
        self.fragment = cute.make_layout(cute.shape(thr_s2r.partition_D(self.sC))[:3]).shape

    def begin_tile(self, place):
        """Called by math warps before they read what a tile at `place` needs."""

    def read(self, buffer):
        """Returns a thread's values of a subtile, in the operand's dtype."""
        values = cute.make_rmem_tensor(self.fragment, self.dtype)
        cute.copy(self.s2r, self.tSR_sC[None, None, None, buffer], values)
        return values

    def place_of(self, v):
        """Returns where in what `read` returned a thread's v-th element finds its value."""
        return v


class LoadedVector:
    """An operand that varies along one axis of D: the protocol is `LoadedMatrix`'s."""

    def __init__(self, spec, operand, number):
        self.number = number
        self.dtype = CUTE_DTYPE[operand.dtype]
        elements = self.extent(spec, operand)
        self.nbytes = elements * self.dtype.width // 8
        self.box = (elements,)
        self.distance = spec.loaded_bytes(operand) * 8 // self.dtype.width

    def setup_layouts(self, buffers):
        self.layout = cute.make_layout((*self.box, buffers), stride=(1, self.distance))
        self.smem_bytes = buffers * self.distance * self.dtype.width // 8

    def make_tma_atom(self, mC):
        one_stage = cute.slice_(self.layout, (None, 0))
        op = cpasync.CopyBulkTensorTileG2SOp()
        return cpasync.make_tiled_tma_atom(op, mC, one_stage, self.box)[0]

    def allocate(self, memory):
        self.pointer = memory.pointer(self.dtype, self.smem_bytes, SMEM_VECTOR)

    def partition_for_load(self, tma_c, coordinates, place):
        self.tma_c = tma_c
        sC = cute.make_tensor(self.pointer, self.layout)
        pieces, at = self.of_tile(coordinates, place)
        self.tCsC, tCgC = cpasync.tma_partition(
            tma_c, 0, cute.make_layout(1), cute.group_modes(sC, 0, 1),
            cute.group_modes(pieces, 0, 1),
        )  # fmt: skip
        self.tCgC = tCgC[None, None, *at]

    def load(self, full, buffer, block_m, block_n):
        source = self.tCgC[None, self.block_of(block_m, block_n)]
        cute.copy(self.tma_c, source, self.tCsC[None, buffer], tma_bar_ptr=full)

    def begin_tile(self, place):
        """Called by math warps before they read what a tile at `place` needs."""

    def read(self, buffer):
        source = self.tSR_sC[None, None, buffer]
        values = cute.make_rmem_tensor(source.shape, self.dtype)
        cute.autovec_copy(source, values)
        return values


class LoadedRow(LoadedVector):
    """An element for each column of D."""

    def extent(self, spec, operand):
        return spec.epi_tile_n

    def of_tile(self, coordinates, place):
        tiles, at = coordinates.row(place)
        return cute.flat_divide(tiles, self.box), at

    def block_of(self, block_m, block_n):
        return block_n

    def partition_for_math(self, by_acc, thread):
        (columns,), buffers = self.box, self.layout.shape[1]
        layout = cute.make_layout((2, columns // 8, buffers), stride=(1, 8, self.distance))
        self.tSR_sC = cute.make_tensor(self.pointer + thread % 4 * 2, layout)

    def place_of(self, v):
        return v % 2, v // 4


class LoadedColumn(LoadedVector):
    """An element for each row of D."""

    def extent(self, spec, operand):
        return EPI_TILE_M

    def of_tile(self, coordinates, place):
        tiles, at = coordinates.column(place)
        return cute.flat_divide(tiles, self.box), at

    def block_of(self, block_m, block_n):
        return block_m

    def partition_for_math(self, by_acc, thread):
        layout = cute.make_layout((2, 1, self.layout.shape[1]), stride=(8, 0, self.distance))
        first_row = thread // 32 * 16 + thread % 32 // 4
        self.tSR_sC = cute.make_tensor(self.pointer + first_row, layout)

    def place_of(self, v):
        return v // 2 % 2, 0


class LoadedSpanColumn(LoadedColumn):
    """An element for each row of D, where tiles begin at any row.

    TMA wants copies along the contiguous index to begin at multiples of 16 bytes: it faults at
    others, on an H200. So a piece begins up to that much before its first row, and is longer.
    """

    def extent(self, spec, operand):
        elements = spec.column_elements(operand.dtype)
        self.step = elements - EPI_TILE_M
        return elements

    def of_tile(self, coordinates, place):
        first = place.first - place.first % self.step
        return coordinates.pieces_of_column(first, *self.box), ()

    def begin_tile(self, place):
        self.skipped = place.first % self.step

    def read(self, buffer):
        source = self.tSR_sC[None, None, buffer]
        source = cute.make_tensor(source.iterator + self.skipped, source.layout)
        values = cute.make_rmem_tensor(source.shape, self.dtype)
        cute.autovec_copy(source, values)
        return values


def make_operand(spec, operand, number):
    """Returns what loads an operand that is no scalar."""
    if operand.kind == "matrix":
        return LoadedMatrix(spec, operand, number)
    if operand.kind == "row":
        return LoadedRow(spec, operand, number)
    return (LoadedSpanColumn if spec.grouped == "m" else LoadedColumn)(spec, operand, number)


class OperandRing:
    """The rings of all math warpgroups. Loader warps call `load`, math warps `read`.

    Attributes:
      loader_warps: warps of a CTA that load, one for each math warpgroup or, where the other is
        busy gathering rows, one for all; 0 if there is nothing.
      smem_words: int64 words of barriers.
    """

    def __init__(self, spec):
        graph = spec.graph
        numbered = enumerate(graph.operands, graph.accumulators)
        self.operands = [
            make_operand(spec, operand, number)
            for number, operand in numbered
            if operand.kind != "scalar"
        ]
        self.stages = spec.epi_load_stages
        self.buffers = spec.math_warpgroups * self.stages
        warps = 1 if spec.gathered else spec.math_warpgroups
        self.loader_warps = warps if self.operands else 0
        self.smem_words = 2 * self.buffers if self.operands else 0
        self.nbytes = sum(operand.nbytes for operand in self.operands)

    def setup_layouts(self):
        for operand in self.operands:
            operand.setup_layouts(self.buffers)

    def allocate(self, memory):
        matrices_first = sorted(self.operands, key=lambda o: not isinstance(o, LoadedMatrix))
        for operand in matrices_first:
            operand.allocate(memory)

    @cute.jit
    def setup(self, words):
        """Called once by all threads, before the barriers are made visible.

        Args:
          words: shared memory pointer to `smem_words` int64 words.
        """
        self.full, self.empty = words, words + self.buffers
        if cutlass.const_expr(self.buffers > 0):
            if cute.arch.warp_idx() == 0:
                with cute.arch.elect_one():
                    for buffer in cutlass.range_constexpr(self.buffers):
                        cute.arch.mbarrier_init(self.full + buffer, 1)
                        cute.arch.mbarrier_init(self.empty + buffer, 4)

    def place_of(self, warpgroup, count):
        """Returns buffer and phase of the `count`-th subtile of a warpgroup."""
        return warpgroup * self.stages + count % self.stages, count // self.stages % 2

    def partition_for_load(self, atoms, coordinates, place):
        """Takes the tensor maps, in order, and the coordinates of the tile at `place`."""
        for operand, atom in zip(self.operands, atoms, strict=True):
            operand.partition_for_load(atom, coordinates, place)

    def load(self, warpgroup, count, block_m, block_n):
        """Fills the slot of a warpgroup's `count`-th subtile, the tile's (block_m, block_n), once
        it is free; one warp."""
        buffer, phase = self.place_of(warpgroup, count)
        full = self.full + buffer
        cute.arch.mbarrier_wait(self.empty + buffer, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.nbytes)
        for operand in self.operands:
            operand.load(full, buffer, block_m, block_n)

    def begin_tile(self, place):
        """Called by math warps before they read what a tile at `place` needs."""
        for operand in self.operands:
            operand.begin_tile(place)

    def partition_for_math(self, by_acc, warpgroup, thread):
        self.warpgroup = warpgroup
        for operand in self.operands:
            operand.partition_for_math(by_acc, thread)

    def read(self, count):
        """Waits for the warpgroup's `count`-th subtile and frees its slot.

        Returns:
          A function of the number of a loaded operand and v: the thread's v-th value, a float32
          or, of a bool operand, a truth value.
        """
        buffer, phase = self.place_of(self.warpgroup, count)
        cute.arch.mbarrier_wait(self.full + buffer, phase)
        found = {operand.number: (operand, operand.read(buffer)) for operand in self.operands}
        self.free(buffer)

        def value(number, v):
            operand, values = found[number]
            element = values[operand.place_of(v)]
            return element != Uint8(0) if operand.dtype is Uint8 else element.to(Float32)

        return value

    @cute.jit
    def free(self, buffer):
        # Without the fence a kernel now and then added the operand of a later subtile, as seen on
        # an H200.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()  # one lane arrives for the reads of all
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.empty + buffer)
