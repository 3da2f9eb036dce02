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
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64

from ..gemm.k_split import begin_of
from ..gemm.legality import MATH_REGISTERS, OTHER_REGISTERS
from ..gemm.smem import EPI_TILE_M
from . import flags
from .shared_memory import WARPGROUP, BarrierId

VECTOR = 4  # float32 of 16 bytes


class NoFinish:
    """The protocol of a finish; here one CTA multiplies all k-tiles of a tile."""

    def __init__(self, spec):
        self.spec = spec

    def cta_view(self, args, cta, stages):
        """Returns what `combine` takes of a CTA; called by its math threads."""

    def slice_registers(self, acc):
        """Returns a thread's accumulators of what this CTA stores of a tile."""
        return acc

    def slice_coords(self, coords):
        """Returns the coordinates of what this CTA stores of a tile, for `GemmSpec.of_slice`."""
        return coords

    def leave(self):
        """Waits until this CTA may leave; called by its math threads."""

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

    def cta_view(self, args, cta, stages):
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


class ClusterSum(NoFinish):
    """Adds the sums of a cluster's CTAs, in the order of K; each CTA stores a slice of the tile.

    When a CTA has multiplied its k-tiles, its stages are free. Its threads leave their accumulators
    there, in vectors of 16 bytes that lie side by side over a warp. So each thread finds those of
    the same thread of the other CTAs, and reads the columns of its CTA's slice.

        accumulators -> stages, once all math warps have read them
        barrier of the cluster: all have left theirs
        sums of the slice, of all CTAs -> epilogue
        barrier of the cluster, before any CTA leaves: all have read
    """

    def __init__(self, spec):
        super().__init__(spec)
        self.threads = 32 * spec.tile_warps
        self.blocks = spec.rows_per_warpgroup // EPI_TILE_M
        # Of a thread's 64 rows: a vector for each 8 columns.
        self.vectors, self.slice_vectors = spec.tile_n // 8, spec.of_slice.tile_n // 8

    def cta_view(self, args, cta, stages):
        """Returns the address of the thread's first vector in stages."""
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        return stages.sA.iterator.toint() + thread * (4 * VECTOR)

    def slice_registers(self, acc):
        return cute.make_rmem_tensor(((2, 2, self.slice_vectors), self.blocks, 1), Float32)

    def slice_coords(self, coords):
        return coords._replace(n=coords.n * self.spec.slices + coords.part)

    def stores(self, coords):
        if self.spec.slices == self.spec.cluster_k:
            return True
        return coords.part < self.spec.slices

    @cute.jit
    def combine(self, view, acc, stored, coords):
        pipeline.NamedBarrier(BarrierId.MATH, self.threads).arrive_and_wait()
        count = self.blocks * self.vectors
        pointer = cute.make_ptr(Float32, view, cute.AddressSpace.smem, assumed_align=4 * VECTOR)
        layout = cute.make_layout((VECTOR, count), stride=(1, VECTOR * self.threads))
        cute.autovec_copy(_vectors(acc, count), cute.make_tensor(pointer, layout))
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        stores = self.stores(coords)
        if stores:
            self.add(view, stored, coords.part)
        cute.arch.cluster_arrive_relaxed()
        return stores

    def add(self, view, stored, rank):
        """Adds up a thread's vectors of the `rank`-th slice."""
        sums, pitch = _vectors(stored, self.blocks * self.slice_vectors), 4 * VECTOR * self.threads
        first = view + rank * (self.slice_vectors * pitch)
        for block, column in product(range(self.blocks), range(self.slice_vectors)):
            address = first + (block * self.vectors + column) * pitch
            for cta, i in product(range(self.spec.cluster_k), range(VECTOR)):
                if i == 0:
                    loaded = _load_of(cta, address)
                at = i, block * self.slice_vectors + column
                sums[at] = sums[at] + loaded[i] if cta else loaded[i]

    def leave(self):
        cute.arch.cluster_wait()


def _vectors(registers, count):
    """Returns a thread's sums as (VECTOR, vectors)."""
    return cute.make_tensor(registers.iterator, cute.make_layout((VECTOR, count)))


def _load_of(cta, address):
    """Returns the vector at an address of shared memory, of one of the cluster's CTAs."""
    return cute.arch.inline_ptx(
        f"{{ .reg .b32 there; mapa.shared::cluster.u32 there, {{$r0}}, {cta}; "
        "ld.shared::cluster.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [there]; }",
        write_only_types=[Float32] * VECTOR,
        read_only_args=[address],
    )


def make_finish(spec):
    """Returns the finish of `spec`'s tiles."""
    if spec.cluster_k > 1:
        return ClusterSum(spec)
    return (OrderedSum if spec.split_k else NoFinish)(spec)
