"""The consumer of float32 operands: it cuts them into bfloat16 parts, which wgmma multiplies.

Each math warpgroup reads its rows of A and cuts them up in registers, from which wgmma takes them.
All warpgroups together cut B up, a k-tile ahead of what they multiply, into shared memory.

    k-tile i     for each 16 of K: wait for wgmmas that read the registers that A's parts go to;
                 A: stage -> registers -> parts; issue its wgmmas
                 free the stage
                 B of k-tile i + 1: stage -> registers -> parts -> buffer (i + 1) % PART_BUFFERS
                 barrier of all math threads: that buffer is full

A thread that passes the barrier of k-tile i + 1 knows that the wgmmas of k-tile i - 1 are done in
all warpgroups, and these read the last buffer but one. So there are three, and one barrier.

The tensor cores cut sums off and do not round them. So these are added up in float32 every
`PROMOTED_K`. Of more than 3 terms, the largest products and the others are summed apart until then.

Parts may also have been cut before the launch, and lie in memory. Each k-tile then is a run of K,
of one part of A and one of B: an ordinary one of bfloat16.

    for each `PROMOTED_K` of K
        for each product of parts, the largest last
            for each run of K: load it; multiply and add to the sums
        add the sums to the accumulators, while the other warpgroup multiplies

The products of an interval read the same few runs one after the other, so but for the first each
finds its operands in L2.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Boolean, Float32, Int32, Uint32
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import min as smaller

from ...gemm.bf16_parts import (
    BLOCK_N,
    PROMOTED_K,
    RUN_K,
    STEP_K,
    STEPS,
    TILE_K,
    VECTOR,
    Cutter,
    accumulator_sets,
    num_parts,
    products,
)
from ...gemm.smem import PART_BUFFERS
from ..shared_memory import WARPGROUP, BarrierId
from .ss import MathView, SharedConsumer, nothing
from .tma import TmaProducer


@dataclass(frozen=True)
class PartsView(MathView):
    """A `MathView`; tCrA is registers, for each part (wgmma, 1, steps)."""

    small: Any  # accumulators of all products but the largest; None: `sums` are
    sA: Any  # pointers to the stages as they lie in memory
    sB: Any
    parts: Any  # the same of words of two


class PartsConsumer(SharedConsumer):
    """Math warpgroups that cut float32 operands into bfloat16 parts."""

    def __init__(self, spec, atom_layout_m, before_read):
        super().__init__(spec, atom_layout_m, before_read)
        s = spec
        assert (s.tile_k, s.rows_per_warpgroup, s.tile_n % BLOCK_N) == (TILE_K, 64, 0)
        self.cutter = Cutter(s.a_major == "k", s.b_major == "k", WARPGROUP * s.math_warpgroups)
        self.num_parts, self.products = num_parts(s.bf16_terms), products(s.bf16_terms)
        self.last_of_others = [pair for pair in self.products if pair[0]][-1]
        self.sums_apart = accumulator_sets(s.bf16_terms) > 2
        self.interval = PROMOTED_K[s.bf16_terms] // TILE_K  # k-tiles between promotions
        self.barrier = pipeline.NamedBarrier(BarrierId.MATH, self.cutter.threads)

    def make_tiled_mma(self, warpgroups):
        mode = cute.nvgpu.OperandMajorMode
        return sm90.make_trivial_tiled_mma(
            BFloat16, BFloat16, mode.K, mode.K if self.spec.b_major == "k" else mode.MN, Float32,
            (warpgroups, 1, 1), tiler_mn=(64, self.spec.tile_n),
            a_source=warpgroup.OperandSource.RMEM,
        )  # fmt: skip

    def partition_for_math(self, stages, warpgroup, args):
        tiled_mma = self.make_tiled_mma(1)
        thr_mma = tiled_mma.get_slice(0)
        tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(stages.parts))
        # Of the first part there is each step's fragment, of the others one, soon multiplied.
        extents = [TILE_K] + [STEP_K] * (self.num_parts - 1)
        shapes = [thr_mma.partition_shape_A((64, extent)) for extent in extents]
        tCrA = tuple(cute.make_rmem_tensor(shape, BFloat16) for shape in shapes)
        shape = thr_mma.partition_shape_C((64, self.spec.tile_n))
        acc, sums = (cute.make_rmem_tensor(shape, Float32) for _ in range(2))
        small = cute.make_rmem_tensor(shape, Float32) if self.sums_apart else None
        return PartsView(
            tCrA, tCrB, acc, sums, acc, first_row=warpgroup * 64, scales=None, small=small,
            sA=_pointer(stages.sA, Float32), sB=_pointer(stages.sB, Float32),
            parts=_pointer(stages.parts, Uint32),
        )  # fmt: skip

    @cute.jit
    def multiply(self, view, ring, state, coords, on_issued: cutlass.Constexpr):
        k_tiles = coords.k_tiles
        release = state.clone()
        view.acc.fill(0.0)
        # NOTE: slower warps may still multiply the tile before by the buffer that is written first.
        self.barrier.arrive_and_wait()
        self.cut_b(view, ring, state, Int32(0))
        state.advance()
        for first in cutlass.range(0, k_tiles, self.interval, unroll=1):
            end = smaller(first + self.interval, k_tiles)
            for k_tile in cutlass.range(first, end, unroll=1):
                buffer = k_tile % PART_BUFFERS
                for step in cutlass.range_constexpr(STEPS):
                    warpgroup.wait_group(1)
                    self.cut_a(view, release.index, step)
                    warpgroup.fence()
                    self.multiply_step(view, buffer, step, k_tile == first)
                ring.consumer_release(release)
                release.advance()
                if k_tile + 1 < k_tiles:
                    self.cut_b(view, ring, state, (k_tile + 1) % PART_BUFFERS)
                    state.advance()
            warpgroup.wait_group(0)
            _promote(view, view.small)
        on_issued()
        return state

    def multiply_step(self, view, buffer, step, is_first):
        """Issues the products of 16 of K: a group of those with A's smaller parts, then the others.

        In step 0 sums begin if the k-tile `is_first` since they were promoted.
        """
        begin = [True, self.sums_apart] if step == 0 else [False, False]
        for i, j in self.products:
            tiled_mma = self.make_tiled_mma(1)
            of_others = self.sums_apart and i + j > 0
            sums = view.small if of_others else view.sums
            accumulate = Boolean(is_first) == Boolean(False) if begin[of_others] else True
            begin[of_others] = False
            tiled_mma.set(warpgroup.Field.ACCUMULATE, accumulate)
            tCrA = view.tCrA[i]
            a = tCrA[None, None, step % cute.size(tCrA, mode=[2])]
            b = view.tCrB[None, None, step, buffer * self.num_parts + j]
            cute.gemm(tiled_mma, sums, a, b, sums)
            if (i, j) in (self.products[-1], self.last_of_others):
                warpgroup.commit_group()

    def cut_a(self, view, stage, step):
        """Puts the parts of a thread's 8 elements of A of a step into registers.

        A fragment has for each half of the step's K a pair of its row and one of 8 rows below.
        """
        at = stage * (self.spec.tile_m * TILE_K)
        lines = [
            _load(view.sA, at + offset, count)[i]
            for offset, count in self.cutter.a_words(math_thread(), step)
            for i in range(count)
        ]
        for word, (half, below) in enumerate(product(range(2), range(2))):
            first = 4 * below + 2 * half
            parts = parts_of(lines[first], lines[first + 1], self.num_parts)
            for tCrA, part in zip(view.tCrA, parts, strict=True):
                words = cute.recast_tensor(tCrA, Uint32)
                words[(4 * step + word) % cute.size(words)] = part

    def cut_b(self, view, ring, state, buffer):
        """Writes the parts of a k-tile of B; returns when all of it is written."""
        ring.consumer_wait(state)
        elements = self.spec.tile_n * TILE_K
        source, target = state.index * elements, buffer * (self.num_parts * elements // 2)
        vectors = self.cutter.b_vectors(math_thread())
        for block, (n, k) in product(range(self.spec.tile_n // BLOCK_N), vectors):
            beyond = block * (BLOCK_N * TILE_K)
            x = _load(view.sB, source + self.cutter.b_offset(n, k) + beyond, VECTOR)
            pairs = [parts_of(x[i], x[i + 1], self.num_parts) for i in (0, 2)]
            offsets = self.cutter.part_offsets(n, k)
            for number, words in enumerate(zip(*pairs, strict=True)):
                place = target + (number * elements + beyond) // 2
                for i, offset in enumerate(offsets):
                    _store(view.parts, place + (offset >> 1), words[i :: len(offsets)])
        # NOTE: these are ordinary writes, which wgmma reads by another proxy.
        cute.arch.fence_proxy("async.shared", space="cta")
        self.barrier.arrive_and_wait()


# Rounds two float32 to bfloat16, the first one in the low bits, and takes them off.
_CUT = """{
    .reg .b32 low, high;
    cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};
    shl.b32 low, {$w0}, 16;
    and.b32 high, {$w0}, 0xffff0000;
    sub.rn.f32 {$w1}, {$r0}, low;
    sub.rn.f32 {$w2}, {$r1}, high;
}"""
_ROUND = "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};"


def parts_of(first, second, count):
    """Returns the parts of two float32 numbers, the largest first; each two bfloat16 as a word."""
    parts = []
    for _ in range(count - 1):
        part, first, second = cute.arch.inline_ptx(
            _CUT, read_only_args=[first, second], write_only_types=[Uint32, Float32, Float32]
        )
        parts.append(part)
    last = cute.arch.inline_ptx(_ROUND, read_only_args=[first, second], write_only_types=[Uint32])
    return [*parts, last]


def _promote(view, small=None):
    """Adds the sums since the last time, and `small` ones, to the tile's accumulators."""
    for v in range(cute.size(view.acc)):
        sums = view.sums[v] if small is None else view.sums[v] + small[v]
        view.acc[v] = view.acc[v] + sums


def math_thread():
    """Returns the number of a math thread, computed anew.

    NOTE: what follows from it is held in registers from one use to the next if it is known to be
    the same, and none is left.
    """
    thread = cute.arch.thread_idx()[0] - WARPGROUP
    code = "mov.b32 {$w0}, {$r0};"
    return cute.arch.inline_ptx(code, read_only_args=[thread], write_only_types=[Int32])


def _pointer(tensor, dtype):
    """Returns a pointer to shared memory as it lies, without the tensor's swizzle."""
    address = tensor.iterator.toint()
    return cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=16)


def _load(pointer, offset, count):
    """Returns `count` adjacent float32."""
    loaded = cute.make_rmem_tensor(count, Float32)
    source = pointer + cute.assume(offset, divby=count)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(count)), loaded)
    return loaded


def _store(pointer, offset, words):
    """Stores adjacent words."""
    count = len(words)
    stored = cute.make_rmem_tensor(count, Uint32)
    for i, word in enumerate(words):
        stored[i] = word
    target = pointer + cute.assume(offset, divby=count)
    cute.autovec_copy(stored, cute.make_tensor(target, cute.make_layout(count)))


# Parts in memory.


def interval_of(spec):
    """Returns the runs of K after which sums are promoted."""
    return PROMOTED_K[spec.bf16_terms] // RUN_K


class StoredPartsProducer(TmaProducer):
    """One warp loads, for each product of parts in turn, the runs of an interval."""

    @cute.jit
    def load(self, view, ring, state, coords):
        terms = self.spec.bf16_terms
        parts, interval = num_parts(terms), interval_of(self.spec)
        slices = self.partition(view, coords)
        runs = coords.k_tiles // terms
        for first in cutlass.range(0, runs, interval, unroll=1):
            end = smaller(first + interval, runs)
            for term in cutlass.range_constexpr(terms):
                a_part, b_part = products(terms)[term]
                for run in cutlass.range(first, end, unroll=1):
                    of_a, of_b = run * parts + a_part, run * parts + b_part
                    self.load_stage(view, slices, of_a, of_b, ring, state, coords)
                    state.advance()
        return state


class StoredPartsConsumer(SharedConsumer):
    """Math warpgroups with accumulators of a tile, and as many in which an interval is summed."""

    def make_accumulators(self):
        acc, *_ = super().make_accumulators()
        return acc, cute.make_rmem_tensor_like(acc), acc

    @cute.jit
    def multiply(self, view, ring, state, coords, on_issued: cutlass.Constexpr):
        k_tiles = coords.k_tiles
        blocks = self.spec.rows_per_warpgroup // 64
        step = interval_of(self.spec) * self.spec.bf16_terms
        view.acc.fill(0.0)
        for first in cutlass.range(0, k_tiles, step, unroll=1):
            count = smaller(k_tiles - first, step)
            state = self._accumulate(view, ring, state, count, blocks, nothing)
            _promote(view)
        on_issued()
        return state
