"""The finish of a tile: the step between its multiplication and its epilogue. One policy a class.

Where K is split, several CTAs each multiply some k-tiles of one tile (`gemm/k_split.py`). The one
that has the last adds the others' partial sums to its own and stores the tile.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..gemm.k_split import begin_of
from ..gemm.legality import MATH_REGISTERS, OTHER_REGISTERS
from . import flags
from .shared_memory import WARPGROUP

VECTOR = 4  # float32 of 16 bytes


class NoFinish:
    """The protocol of a finish; here one CTA multiplies all k-tiles of a tile."""

    def __init__(self, spec):
        self.spec = spec

    def cta_view(self, args, cta):
        """Returns what `combine` takes of a CTA; called by its math threads."""

    def stores(self, coords):
        """Returns whether this CTA stores the tile. True folds away; the GPU evaluates others."""
        return True

    def combine(self, view, acc, coords):
        """Adds to a thread's accumulators what other CTAs have of the tile; returns `stores`."""
        return True


@dataclass(frozen=True)
class PartialSums:
    """The partial sums that a thread reads and writes, and its warp's flags."""

    args: Any  # `KernelArgs`
    slot: Any  # of the first item, (vector, vectors) with a stride of its CTA's threads
    flag: Any  # pointer to int64, of the first item


class OrderedSum(NoFinish):
    """Adds partial sums in a fixed order, so that the bits do not depend on who is done first.

    Each thread leaves its accumulators where the same thread of another CTA finds them, in vectors
    of 16 bytes that lie side by side over a warp. So the warps of a tile need not wait for each
    other: each has a flag of its own.

        every part but the last     accumulators -> slot of its item; release the warp's flag
        the last part               acquire the flags of all items before it that have k-tiles of
                                    the tile and free them; add their slots, in the order of K
    """

    def __init__(self, spec):
        super().__init__(spec)
        self.threads = 32 * spec.tile_warps
        self.vectors = spec.sum_registers // VECTOR
        # Registers for partial sums beside the accumulators: for two slots, or a part of one.
        free = MATH_REGISTERS[spec.math_warpgroups] - OTHER_REGISTERS - spec.sum_registers
        self.runs_ahead = free >= 2 * spec.sum_registers
        most = max(1, free // VECTOR)
        self.chunk = max(n for n in range(1, most + 1) if self.vectors % n == 0)

    def cta_view(self, args, cta):
        s = self.spec
        thread = (cute.arch.thread_idx()[0] - WARPGROUP) % self.threads
        rank = cta.m + s.cluster_m * cta.n
        tile = s.d_tile_m * s.tile_n
        slot = cute.make_tensor(
            args.split_k.partials + cute.assume(rank * tile + thread * VECTOR, divby=VECTOR),
            cute.make_layout((VECTOR, self.vectors), stride=(1, VECTOR * self.threads)),
        )
        first = cute.recast_ptr(args.split_k.flags, dtype=Int64)
        return PartialSums(args, slot, first + (rank * s.tile_warps + thread // 32))

    def stores(self, coords):
        return coords.part.is_last

    @cute.jit
    def combine(self, view, acc, coords):
        part = coords.part
        if part.is_last:
            first = part.item
            while self.begins(view, first) > part.start:
                first = first - 1
                self.wait(view, first)
            if first < part.item:
                self.add(view, acc, first, part.item)
        else:
            self.leave(view, acc, part.item)
        return part.is_last

    def begins(self, view, item):
        return begin_of(view.args.split_k.tape, view.args.k_tiles, item, Int64, Int32)

    @cute.jit
    def leave(self, view, acc, item):
        cute.autovec_copy(self.vectors_of(acc), self.slot_of(view, item))
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            flags.release(self.flag_of(view, item))

    @cute.jit
    def wait(self, view, item):
        """Waits for a warp's partial sums, and frees its flag."""
        flag = self.flag_of(view, item)
        flags.wait(flag)
        if cute.arch.lane_idx() == 0:
            flags.free(flag)

    @cute.jit
    def add(self, view, acc, first, end):
        """Adds the partial sums of the items from `first` to before `end`, one at least."""
        sums = self.vectors_of(acc)
        if cutlass.const_expr(self.runs_ahead):  # a slot is added while the next arrives
            arrived = self.load(view, first, 0)
            for item in cutlass.range(first + 1, end, unroll=1):
                following = self.load(view, item, 0)
                self.add_chunk(sums, 0, arrived)
                arrived.store(following.load())
            self.add_chunk(sums, 0, arrived)
        else:
            for item in cutlass.range(first, end, unroll=1):
                for chunk in cutlass.range_constexpr(self.vectors // self.chunk):
                    self.add_chunk(sums, chunk, self.load(view, item, chunk))

    def load(self, view, item, chunk):
        """Returns some vectors of a slot, in registers."""
        tiled = cute.flat_divide(self.slot_of(view, item), (VECTOR, self.chunk))
        loaded = cute.make_rmem_tensor((VECTOR, self.chunk), Float32)
        cute.autovec_copy(tiled[None, None, 0, chunk], loaded)
        return loaded

    def add_chunk(self, sums, chunk, loaded):
        for i, j in product(range(self.chunk), range(VECTOR)):
            at = j, chunk * self.chunk + i
            sums[at] = sums[at] + loaded[j, i]

    def vectors_of(self, acc):
        """Returns a thread's accumulators as (VECTOR, vectors)."""
        return cute.make_tensor(acc.iterator, cute.make_layout((VECTOR, self.vectors)))

    def slot_of(self, view, item):
        floats = self.spec.cluster_size * self.spec.d_tile_m * self.spec.tile_n
        return cute.domain_offset((Int64(item) * floats, 0), view.slot)

    def flag_of(self, view, item):
        return view.flag + item * (self.spec.cluster_size * self.spec.tile_warps)


def make_finish(spec):
    """Returns the finish of `spec`'s tiles."""
    return (OrderedSum if spec.split_k else NoFinish)(spec)
