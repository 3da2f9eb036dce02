"""The finish of a tile: the step between its multiplication and its epilogue. One policy a class.

Where K is split, several CTAs each multiply some k-tiles of one tile (`gemm/k_split.py`). The one
that has the last adds the others' partial sums, in global memory, to its own and stores the tile.
Where CTAs of a cluster share the k-tiles, they add up and store it together.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..gemm.k_split import begin_of
from ..gemm.legality import MATH_REGISTERS, OTHER_REGISTERS
from ..gemm.smem import EPI_TILE_M, SMEM_VECTOR
from . import flags
from .shared_memory import WARPGROUP

VECTOR = 4  # float32 of 16 bytes


class NoFinish:
    """The protocol of a finish; here one CTA multiplies all k-tiles of a tile."""

    smem_words = 0  # int64 of shared memory for barriers
    settled = False  # whether it adds up accumulators as the epilogue reads them, or raw sums

    def __init__(self, spec):
        self.spec = spec

    def allocate(self, memory):
        """Returns a pointer to its `slot_bytes` of shared memory, if it has any."""

    def setup(self, barrier, cta):
        """Makes its barriers; called by all threads."""

    def cta_view(self, args, cta, slots, barrier):
        """Returns what `combine` takes of a CTA; called by its math threads."""

    def slice_registers(self, acc):
        """Returns a thread's accumulators of what this CTA stores of a tile."""
        return acc

    def slice_coords(self, coords):
        """Returns the coordinates of what this CTA stores of a tile, for `GemmSpec.of_slice`."""
        return coords

    def stores(self, coords):
        """Returns whether this CTA stores the tile. True folds away; the GPU evaluates others."""
        return True

    def combine(self, view, acc, stored, coords):
        """Adds what other CTAs have of the tile, or of the slice that this one stores, to
        a thread's accumulators; returns `stores`."""
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

    def cta_view(self, args, cta, slots, barrier):
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
    def combine(self, view, acc, stored, coords):
        part = coords.part
        if part.is_last:
            first = part.item
            while self.begins(view, first) > part.start:
                first = first - 1
                self.wait(view, first)
            if first < part.item:
                self.add(view, acc, first, part.item)
        else:
            self.leave_sums(view, acc, part.item)
        return part.is_last

    def begins(self, view, item):
        return begin_of(view.args.split_k.tape, view.args.k_tiles, item, Int64, Int32)

    @cute.jit
    def leave_sums(self, view, acc, item):
        cute.autovec_copy(_vectors(acc, self.vectors), self.slot_of(view, item))
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
        sums = _vectors(acc, self.vectors)
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

    def slot_of(self, view, item):
        floats = self.spec.cluster_size * self.spec.d_tile_m * self.spec.tile_n
        return cute.domain_offset((Int64(item) * floats, 0), view.slot)

    def flag_of(self, view, item):
        return view.flag + item * (self.spec.cluster_size * self.spec.tile_warps)


@dataclass(frozen=True)
class Slots:
    """Where a thread finds the sums of its slice that each CTA of the cluster has sent."""

    sums: Any  # (vector, vectors, CTA), in shared memory
    barrier: Any  # pointer to the mbarrier that the bytes of all slots complete
    has_rows: Any  # whether the thread's warp has rows of the tile; others have no sums


class ClusterSum(NoFinish):
    """Adds the sums of a cluster's CTAs, in the order of K; each CTA stores a slice of the tile.

    A CTA that stores has a slot for each CTA of the cluster. A thread sends its sums to the same
    thread of other CTAs, in vectors of 16 bytes that lie side by side over a warp.

        accumulators of each slice -> own slot of the CTA that stores it, by `st.async`
        all slots have their bytes: their sums, in the order of K -> epilogue

    So no CTA waits before it sends, and one that has sent all and stored its slice may leave.
    """

    smem_words = 1
    settled = True

    def __init__(self, spec):
        super().__init__(spec)
        self.threads = spec.slot_threads
        self.vectors = spec.tile_registers // VECTOR
        self.slice_vectors = self.vectors // spec.slices
        self.blocks = spec.rows_per_warpgroup // EPI_TILE_M
        self.floats = VECTOR * self.threads * self.slice_vectors  # of a slot

    def allocate(self, memory):
        return memory.pointer(Float32, self.spec.slot_bytes, SMEM_VECTOR)

    @cute.jit
    def setup(self, barrier, cta):
        if cute.arch.warp_idx() == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(barrier, 1)
                if self.has_slice(cta.k):
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.spec.slot_bytes)

    def cta_view(self, args, cta, slots, barrier):
        thread, has_rows = cute.arch.thread_idx()[0] - WARPGROUP, True
        rows = self.threads // self.spec.math_warpgroups  # threads of a warpgroup that have rows
        if rows < WARPGROUP:
            has_rows = thread % WARPGROUP < rows
            thread = thread // WARPGROUP * rows + thread % WARPGROUP
        first = slots + cute.assume(thread * VECTOR, divby=VECTOR)
        shape = VECTOR, self.slice_vectors, self.spec.cluster_k
        layout = cute.make_layout(shape, stride=(1, VECTOR * self.threads, self.floats))
        return Slots(cute.make_tensor(first, layout), barrier, has_rows)

    def slice_registers(self, acc):
        if self.spec.slices == 1:
            return acc
        of_block = self.slice_vectors // self.blocks
        return cute.make_rmem_tensor(((2, 2, of_block), self.blocks, 1), Float32)

    def slice_coords(self, coords):
        return coords._replace(n=coords.n * self.spec.slices + coords.part)

    def has_slice(self, rank):
        if self.spec.slices == self.spec.cluster_k:
            return True
        return rank < self.spec.slices

    def stores(self, coords):
        return self.has_slice(coords.part)

    @cute.jit
    def combine(self, view, acc, stored, coords):
        if view.has_rows:
            self.send(view, _vectors(acc, self.vectors), coords.part)
        stores = self.stores(coords)
        if stores:
            cute.arch.mbarrier_wait(view.barrier, 0)
            if view.has_rows:
                self.add(view, _vectors(stored, self.slice_vectors))
        return stores

    def send(self, view, sums, rank):
        """Sends a thread's accumulators of each slice to the CTA that stores it."""
        slices, of_block = self.spec.slices, self.slice_vectors // self.blocks
        bits = cute.recast_tensor(sums, Int32)
        # All CTAs send at once: each spreads what it sends over those that store.
        for block, column, cta in product(range(self.blocks), range(of_block), range(slices)):
            vector = (block * slices + cta) * of_block + column
            slot = view.sums[None, block * of_block + column, rank].iterator
            values = tuple(bits[i, vector] for i in range(VECTOR))
            cute.arch.store_async_dsmem(slot, values, view.barrier, cta)

    def add(self, view, sums):
        """Adds up the slots of all CTAs."""
        cute.autovec_copy(view.sums[None, None, 0], sums)
        for cta in range(1, self.spec.cluster_k):
            loaded = cute.make_rmem_tensor((VECTOR, self.slice_vectors), Float32)
            cute.autovec_copy(view.sums[None, None, cta], loaded)
            sums.store(sums.load() + loaded.load())


def _vectors(registers, count):
    """Returns a thread's sums as (VECTOR, vectors)."""
    return cute.make_tensor(registers.iterator, cute.make_layout((VECTOR, count)))


def make_finish(spec):
    """Returns the finish of `spec`'s tiles."""
    if spec.cluster_k > 1:
        return ClusterSum(spec)
    return (OrderedSum if spec.split_k else NoFinish)(spec)
