"""The consumers that promote sums where a tile has 64 rows: two warpgroups take turns at k-tiles.

The same thread of either has the same elements of a tile. In the end it hands the other one its
sums of half the columns, by way of shared memory.
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cutlass_dsl import select_

from ...gemm.smem import EPI_TILE_M, EXCHANGE_COLUMNS, EXCHANGE_PITCH
from ..copies import adjacent
from ..shared_memory import WARPGROUP
from .block_scales import ScaledConsumer
from .in_turns import InTurns
from .promoted import PromotedConsumer
from .ss import MathView

VECTOR = 4  # float32 of 16 bytes
AT_A_TIME = EPI_TILE_M * EXCHANGE_COLUMNS // WARPGROUP  # of a thread's sums, handed over


@dataclass(frozen=True)
class InTurnsView(MathView):
    """A `MathView`; `totals` are of all columns of a tile, `acc` of those that are stored."""

    warpgroup: Any
    written: Any  # bytes: where a thread's sums are handed over
    read: Any  # where it gets the other's


class _PromotedInTurns(InTurns):
    """Either consumer, in turns."""

    def make_accumulators(self):
        _, sums, totals = super().make_accumulators()
        s = self.spec
        acc = self.make_registers(self.acc_dtype, s.rows_per_warpgroup, s.columns_per_warpgroup)
        return acc, sums, totals

    def partition_for_math(self, stages, warpgroup_index, args):
        view = super().partition_for_math(stages, warpgroup_index, args)
        own = stages.exchange.toint() + cute.arch.thread_idx()[0] % WARPGROUP * (4 * VECTOR)
        written, read = (
            own + i * (4 * EPI_TILE_M * EXCHANGE_PITCH)
            for i in (warpgroup_index, 1 - warpgroup_index)
        )
        return InTurnsView(**vars(view), warpgroup=warpgroup_index, written=written, read=read)

    def multiply(self, view, ring, state, coords, on_issued):
        state = super().multiply(view, ring, state, coords, on_issued)
        self._add_up(view)
        return state

    def _add_up(self, view):
        """Makes `acc` of the sums of both warpgroups."""
        parts = self.spec.graph.accumulators
        columns = cute.size(view.totals) // parts
        of_slice = columns // self.spec.slices
        half = of_slice // 2
        firsts = range(0, parts * columns, of_slice)
        left = [first + v for first in firsts for v in range(half)]
        first, barrier = view.warpgroup == 0, self.barrier()
        for start in range(0, len(left), AT_A_TIME):
            some = range(start, min(start + AT_A_TIME, len(left)))
            for i in some[::VECTOR]:
                vector = _vector(view.written, i - start)
                values = cute.make_rmem_tensor(VECTOR, Float32)
                for j in range(VECTOR):
                    at = left[i + j]
                    values[j] = select_(first, view.totals[at + half], view.totals[at])
                cute.autovec_copy(values, vector)
            barrier.arrive_and_wait()
            for i in some[::VECTOR]:
                values = cute.make_rmem_tensor(VECTOR, Float32)
                cute.autovec_copy(_vector(view.read, i - start), values)
                for j in range(VECTOR):
                    at = left[i + j]
                    own = select_(first, view.totals[at], view.totals[at + half])
                    view.acc[i + j] = own + values[j]
            barrier.arrive_and_wait()


class PromotedInTurnsConsumer(_PromotedInTurns, PromotedConsumer):
    """Math warpgroups that promote sums as they are."""


class ScaledInTurnsConsumer(_PromotedInTurns, ScaledConsumer):
    """Math warpgroups that promote sums times the scales of blocks."""


def _vector(address, i):
    """Returns a thread's `VECTOR` float32 from its i-th on; those of a warp are neighbours."""
    return adjacent(Float32, address + i * (4 * WARPGROUP), VECTOR, cute.AddressSpace.smem)
