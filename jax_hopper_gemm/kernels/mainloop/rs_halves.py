"""The consumer that converts B where a tile has 64 columns: two warpgroups halve each k-tile.

Both multiply the same columns, each by its half of K. At the end of a tile each writes all of its
sums to shared memory, and adds up those of both of half the columns, which it stores. So a product
with few columns of a long K keeps as many SMs busy as have a tile, and no SM waits for another.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32

from ...gemm.spec import EXCHANGE_COLUMNS, EXCHANGE_PITCH
from ...gemm.wgmma_fragment import first_column, first_row, nth_column, nth_row
from ..shared_memory import WARPGROUP, BarrierId
from .rs import BLOCK, RegisterConsumer


class HalvesConsumer(RegisterConsumer):
    """Math warpgroups that have the same columns, and halves of each k-tile."""

    def __init__(self, spec, atom_layout_m, before_read):
        super().__init__(spec, atom_layout_m, before_read)
        self.chunk = spec.tile_m * EXCHANGE_PITCH  # floats of `EXCHANGE_COLUMNS` of all rows
        self.sums = spec.tile_n // EXCHANGE_COLUMNS * self.chunk  # of a warpgroup

    def own_part(self, stages, warpgroup_index):
        tile = self.spec.tile_m, self.spec.converted_k
        halves = cute.flat_divide(stages.sA, tile)  # (bM, half of bK, 1, 2, stages)
        nbytes, behind = self.loads.half(warpgroup_index)
        base = Int32(stages.sB.iterator.toint()) + nbytes
        return halves[None, None, 0, warpgroup_index, None], base, behind

    def place_of(self, warpgroup_index, block):
        return block, 0

    def exchange_of(self, stages, warpgroup_index, position):
        """As its parent: sums of the first half come first. A warp has columns of one chunk."""
        column = self.held.column(position, 0, 0)
        chunk, inside = column // EXCHANGE_COLUMNS, column % EXCHANGE_COLUMNS
        written = warpgroup_index * self.sums + chunk * self.chunk + inside
        read = warpgroup_index * self.chunk + first_row(position) * EXCHANGE_PITCH
        return (
            stages.exchange + self.aligned(written + first_column(position) * EXCHANGE_PITCH),
            stages.exchange + (read + first_column(position)),
        )

    def exchange_barrier(self, warpgroup_index):
        return pipeline.NamedBarrier(BarrierId.MATH, self.spec.math_warpgroups * WARPGROUP)

    def _turn(self, view):
        of_block = BLOCK // EXCHANGE_COLUMNS * self.chunk
        for block in range(self.blocks):
            self._write_span(view, view.written + block * of_block, 0, block)
        view.barrier.arrive_and_wait()
        view.acc.fill(0.0)
        self._add_halves(view, of_block)
        view.barrier.arrive_and_wait()

    @cute.jit
    def _add_halves(self, view, of_block: cutlass.Constexpr):
        """Reads what a warp has of the tile's rows: 16 of 64."""
        if view.raw.position.warp < self.spec.tile_m // 16:
            values = EXCHANGE_COLUMNS // 2
            for block in range(self.blocks):
                for v in range(values):
                    row, column = nth_row(0, v // 2 % 2), nth_column(0, v // 4 * 2 + v % 2)
                    at = view.read + (block * of_block + row * EXCHANGE_PITCH + column)
                    first, second = (cute.arch.load(at + i * self.sums, Float32) for i in range(2))
                    view.acc[block * values + v] = first + second
