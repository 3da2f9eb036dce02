"""The ring in which operand warps bring an epilogue's operands: one a math warpgroup.

    barrier             arrivals                    waited on by
    operands full       1 + bytes of a subtile      the math warpgroup
    operands empty      its four warps              the operand warp that serves it

One slot of a ring holds the operands of a subtile (64, epi_tile_n) of D: a tile of each matrix, a
piece of each row and column, all counted by one barrier. The operand warp runs ahead by as many
slots as there are, across tiles: those of the next tile arrive while it is multiplied.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint8

from .operand_loads import LoadedMatrix, make_operand


@dataclass(frozen=True)
class RingBarriers:
    """Shared memory pointers to the first of the rings' mbarriers: one of each kind a buffer."""

    full: Any
    empty: Any


class OperandRing:
    """The rings of all math warpgroups."""

    def __init__(self, spec):
        numbered = enumerate(spec.graph.operands, spec.graph.accumulators)
        loaded = [(number, operand) for number, operand in numbered if operand.kind != "scalar"]
        self.operands = [make_operand(spec, operand, number) for number, operand in loaded]
        self.stages = spec.epi_load_stages
        self.buffers = spec.math_warpgroups * self.stages
        # One for each math warpgroup or, where the other gathers rows, one for all.
        warps = 1 if spec.gathered else spec.math_warpgroups
        self.loader_warps = warps if self.operands else 0
        self.smem_words = 2 * self.buffers if self.operands else 0  # int64 words of barriers
        self.nbytes = sum(operand.nbytes for operand in self.operands)

    def allocate(self, memory):
        """Returns the operands' slots in shared memory, in the operands' order."""
        matrices_first = sorted(self.operands, key=lambda o: not isinstance(o, LoadedMatrix))
        slots = {operand.number: operand.allocate(memory) for operand in matrices_first}
        return tuple(slots[operand.number] for operand in self.operands)

    @cute.jit
    def setup(self, words):
        """Returns the `RingBarriers` at `words`; called by all threads while barriers are made."""
        barriers = RingBarriers(words, words + self.buffers)
        if cutlass.const_expr(self.buffers > 0):
            if cute.arch.warp_idx() == 0:
                with cute.arch.elect_one():
                    for buffer in cutlass.range_constexpr(self.buffers):
                        cute.arch.mbarrier_init(barriers.full + buffer, 1)
                        cute.arch.mbarrier_init(barriers.empty + buffer, 4)
        return barriers

    def slot(self, warpgroup, count):
        """Returns buffer and phase of the `count`-th subtile of a warpgroup."""
        return warpgroup * self.stages + count % self.stages, count // self.stages % 2

    def load_view(self, cta, coords):
        slots = zip(self.operands, cta.parameters.loads, cta.shared.operands, strict=True)
        parts = tuple(
            operand.load_view(tma_c, sC, cta.tma_coords, coords) for operand, tma_c, sC in slots
        )
        return RingLoader(self, cta.barriers, parts)

    def thread_view(self, cta, by_acc, warpgroup, thread):
        slots = zip(self.operands, cta.shared.operands, strict=True)
        parts = tuple(operand.thread_view(sC, by_acc, thread) for operand, sC in slots)
        return RingReader(self, cta.barriers, warpgroup, parts)


@dataclass(frozen=True)
class RingLoader:
    """An operand warp's view of the rings, for one tile."""

    ring: OperandRing
    barriers: RingBarriers
    parts: tuple  # a `LoadView` for each operand

    def load(self, warpgroup, count, block_m, block_n):
        """Fills the slot of a warpgroup's `count`-th subtile once it is free; one warp."""
        buffer, phase = self.ring.slot(warpgroup, count)
        full = self.barriers.full + buffer
        cute.arch.mbarrier_wait(self.barriers.empty + buffer, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.ring.nbytes)
        for operand, part in zip(self.ring.operands, self.parts, strict=True):
            part.load(full, buffer, operand.along(block_m, block_n))


@dataclass(frozen=True)
class RingReader:
    """A math thread's view of its warpgroup's ring."""

    ring: OperandRing
    barriers: RingBarriers
    warpgroup: Any
    parts: tuple  # a `MatrixView` or `VectorView` for each operand

    def tile_view(self, coords):
        both = zip(self.ring.operands, self.parts, strict=True)
        return replace(self, parts=tuple(operand.tile_view(part, coords) for operand, part in both))

    def read(self, count):
        """Waits for the warpgroup's `count`-th subtile, reads it and frees its slot.

        Returns (an operand's number, v) -> the thread's v-th value: float32, or true or false.
        """
        buffer, phase = self.ring.slot(self.warpgroup, count)
        cute.arch.mbarrier_wait(self.barriers.full + buffer, phase)
        loaded = {
            operand.number: (operand, part.read(buffer))
            for operand, part in zip(self.ring.operands, self.parts, strict=True)
        }
        self.free(buffer)

        def value(number, v):
            operand, values = loaded[number]
            element = values[operand.index_of(v)]
            return element != Uint8(0) if operand.dtype is Uint8 else element.to(Float32)

        return value

    @cute.jit
    def free(self, buffer):
        # NOTE: a slot is read with ordinary loads and refilled by TMA, of another proxy. Without
        # the fence the refill overtakes reads: now and then a later subtile's operand was added.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()  # one lane arrives for the reads of all
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.barriers.empty + buffer)


class OperandWarp:
    """The order in which a tile's subtiles are loaded: that in which `FusedEpilogue` reads them."""

    def __init__(self, spec, ring, row_blocks):
        self.ring = ring
        self.row_blocks = row_blocks
        self.subtiles_n = row_blocks.subtiles_n
        self.steps_of_rows = spec.graph.passes * self.subtiles_n
        self.steps = row_blocks.count * self.steps_of_rows

    @cute.jit
    def load_tile(self, cta, warpgroup, loaded, coords):
        """Sends a tile's operands to a math warpgroup; returns the subtiles `loaded` so far."""
        tile = self.ring.load_view(cta, coords)
        steps = self.steps
        if not self.row_blocks.any_of(coords, warpgroup):
            steps = 0
        for step in cutlass.range(steps, unroll=1):
            i_m, i_n = step // self.steps_of_rows, step % self.subtiles_n
            tile.load(warpgroup, loaded + step, *self.row_blocks.block(i_m, i_n, warpgroup))
        return loaded + steps

    @cute.jit
    def load_tile_of_both(self, cta, loaded, coords, turn):
        """The same for both math warpgroups; where they alternate, for the one in `turn`."""
        if cutlass.const_expr(self.row_blocks.shares_tile):
            tile = self.ring.load_view(cta, coords)
            both = self.row_blocks.any_of(coords, 1)
            for step in cutlass.range(self.steps, unroll=1):
                i_m, i_n = step // self.steps_of_rows, step % self.subtiles_n
                tile.load(0, loaded[0] + step, *self.row_blocks.block(i_m, i_n, 0))
                if both:
                    tile.load(1, loaded[1] + step, *self.row_blocks.block(i_m, i_n, 1))
            loaded = [loaded[0] + self.steps, loaded[1] + (self.steps if both else 0)]
        elif turn == 0:
            loaded = [self.load_tile(cta, 0, loaded[0], coords), loaded[1]]
        else:
            loaded = [loaded[0], self.load_tile(cta, 1, loaded[1], coords)]
        return loaded
