"""The consumer that converts B where a tile has 64 columns: two warpgroups take turns at k-tiles.

Both multiply the same columns, each every other k-tile of a tile. In the end each writes its sums
to shared memory, and adds up those of both of half the columns (of each slice, where CTAs share K),
which it stores. So a product of few columns has a tile, or a part of its K, for each SM.
"""

import cutlass
import cutlass.cute as cute

from ...gemm.smem import EXCHANGE_COLUMNS, EXCHANGE_PITCH
from ...gemm.wgmma_fragment import first_column, first_row
from .in_turns import InTurns
from .rs import BLOCK, RegisterConsumer, even


def clear(registers):
    """Makes zeros of registers. NOTE: `fill` does not compile behind a branch."""
    for v in range(cute.size(registers)):
        registers[v] = 0.0


class RegisterInTurnsConsumer(InTurns, RegisterConsumer):
    """Math warpgroups that convert the same columns of B, each of every other k-tile."""

    def __init__(self, spec, atom_layout_m, before_read):
        super().__init__(spec, atom_layout_m, before_read)
        self.of_chunk = spec.tile_m * EXCHANGE_PITCH  # floats of `EXCHANGE_COLUMNS`, of all rows
        self.of_warpgroup = spec.tile_n // EXCHANGE_COLUMNS * self.of_chunk
        self.columns = BLOCK // spec.slices // self.step  # of a slice that a warpgroup stores

    def place_of(self, warpgroup_index, block):
        return block, 0

    def exchange_of(self, stages, warpgroup_index, position):
        """As its parent. Sums of the first warpgroup come first; a warp has those of one chunk."""
        column = self.held.column(position, 0, 0)
        chunk, inside = column // EXCHANGE_COLUMNS, column % EXCHANGE_COLUMNS
        written = warpgroup_index * self.of_warpgroup + chunk * self.of_chunk + inside
        first = warpgroup_index * self.columns
        read = first // EXCHANGE_COLUMNS * self.of_chunk + first % EXCHANGE_COLUMNS
        read += first_row(position) * EXCHANGE_PITCH + first_column(position)
        return (
            stages.exchange + self.aligned(written + first_column(position) * EXCHANGE_PITCH),
            stages.exchange + even(read),
        )

    def exchange_barrier(self, warpgroup_index):
        return self.barrier()

    @cute.jit
    def _accumulate(self, view, ring, state, k_tiles, on_issued: cutlass.Constexpr):
        clear(view.totals)
        if k_tiles > 0:
            state = super()._accumulate(view, ring, state, k_tiles, on_issued)
        return state

    def settle(self, view):
        of_block = BLOCK // EXCHANGE_COLUMNS * self.of_chunk
        for block in range(self.blocks):
            self._write_span(view, view.written + block * of_block, 0, block)
        view.barrier.arrive_and_wait()
        clear(view.acc)
        self._add(view, of_block)
        view.barrier.arrive_and_wait()

    @cute.jit
    def _add(self, view, of_block: cutlass.Constexpr):
        """Adds up what a warp has of the tile's rows: 16 of 64."""
        if view.raw.position.warp < self.spec.tile_m // 16:
            values, slices = self.columns // 2, self.spec.slices
            for part in range(self.blocks * slices):
                for v in range(0, values, 2):
                    read = view.read + part * of_block // slices
                    pairs = [self.read_pair(read + i * self.of_warpgroup, v) for i in range(2)]
                    for i in range(2):
                        total = (pairs[0][i] + pairs[1][i]) * (1 / self.conversion.unit)
                        view.acc[part * values + v + i] = total
