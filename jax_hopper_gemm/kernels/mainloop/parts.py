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

The tensor cores cut sums off and do not round them. Those of the largest products are added up in
float32 every `PROMOTED_K`. Of more than 3 terms, the others are summed apart and added at the end.

A fragment of A stored (M, K) is read 16 bytes at a time, without bank conflicts: of 32 elements of
K thread q of 4 reads 8q to 8q + 7. So the tensor cores see K in another order, `place_of`, and B's
parts are written in that order.
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

from ...gemm.bf16_parts import PROMOTED_K, num_parts, products
from ...gemm.spec import PART_BUFFERS
from ..shared_memory import WARPGROUP, BarrierId
from .ss import MathView, SharedConsumer

TILE_K = 32  # elements of K in a stage: 128 bytes
STEPS = 2  # wgmmas along K of a stage
STEP_K = TILE_K // STEPS
ROW = 32  # float32 in a row of the swizzle's pattern, eight of which repeat
VECTOR = 4  # float32 of 16 bytes


def place_of(k, is_permuted):
    """Returns where the tensor cores have an element of a stage's K."""
    if not is_permuted:
        return k
    pair, half, step, thread = k % 2, k // 2 % 2, k // 4 % 2, k // 8
    return pair + 2 * thread + 8 * half + 16 * step


@dataclass(frozen=True)
class PartsView(MathView):
    """A `MathView`; tCrA is in registers."""

    small: Any  # accumulators of all products but the largest; `sums` where they have none
    sA: Any  # pointers to the stages as they lie in memory
    sB: Any
    parts: Any
    a_offsets: tuple  # of a thread's fragments of A, in elements
    b_offsets: tuple  # of what it reads of B, for each of its rows
    part_offsets: tuple  # of what it writes of a part


class PartsConsumer(SharedConsumer):
    """Math warpgroups that cut float32 operands into bfloat16 parts."""

    def __init__(self, spec, atom_layout_m, before_read):
        super().__init__(spec, atom_layout_m, before_read)
        s = spec
        assert (s.tile_k, s.rows_per_warpgroup, s.tile_n % 64) == (TILE_K, 64, 0)
        self.threads = WARPGROUP * s.math_warpgroups
        self.is_permuted = s.a_major == "k"
        self.num_parts, self.products = num_parts(s.bf16_terms), products(s.bf16_terms)
        self.last_of_others = [pair for pair in self.products if pair[0]][-1]
        self.interval = PROMOTED_K[s.bf16_terms] // TILE_K  # k-tiles between promotions
        self.b_elements = s.tile_n * TILE_K  # of a stage
        self.part_words = self.b_elements // 2

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
        # For each part (wgmma, 1, steps): of the first those of a stage, of others one.
        extents = [TILE_K] + [STEP_K] * (self.num_parts - 1)
        shapes = [thr_mma.partition_shape_A((64, extent)) for extent in extents]
        tCrA = tuple(cute.make_rmem_tensor(shape, BFloat16) for shape in shapes)
        shape = thr_mma.partition_shape_C((64, self.spec.tile_n))
        acc, sums = (cute.make_rmem_tensor(shape, Float32) for _ in range(2))
        apart = self.spec.bf16_terms > 3
        small = cute.make_rmem_tensor(shape, Float32) if apart else sums
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        return PartsView(
            tCrA, tCrB, acc, sums, first_row=warpgroup * 64, scales=None, small=small,
            sA=_pointer(stages.sA, Float32), sB=_pointer(stages.sB, Float32),
            parts=_pointer(stages.parts, Uint32), a_offsets=self.a_offsets(thread),
            b_offsets=self.b_offsets(thread), part_offsets=self.part_offsets(thread),
        )  # fmt: skip

    # Where a thread's elements lie in shared memory, the swizzle applied.

    def a_offsets(self, thread):
        """Returns those of a thread's fragment, but for the multiples of a pattern's bytes.

        K-major: for each step. M-major: for each half of the rows and each of a pair along K.
        """
        row, quad = thread // 32 * 16 + thread % 32 // 4, thread % 4
        if self.is_permuted:
            chunks = (2 * quad + step for step in range(STEPS))
            return tuple(row * ROW + (chunk ^ row % 8) * VECTOR for chunk in chunks)
        offsets = []
        for half, pair in product(range(2), range(2)):
            k, m = 2 * quad + pair, row + 8 * half
            chunk = m % ROW // VECTOR ^ k
            offsets.append((m // ROW * TILE_K + k) * ROW + chunk * VECTOR + m % VECTOR)
        return tuple(offsets)

    def b_rows(self, thread):
        """Returns (n, k) of the first elements of the vectors that a thread cuts up."""
        if self.spec.b_major == "k":
            apart = self.threads // 8
            return [(thread // 8 + apart * i, thread % 8 * VECTOR) for i in range(64 // apart)]
        apart = self.threads // 16
        return [(thread % 16 * VECTOR, thread // 16 + apart * i) for i in range(TILE_K // apart)]

    def b_offsets(self, thread):
        if self.spec.b_major == "k":
            rows = self.b_rows(thread)
            return tuple(n * ROW + (k // VECTOR ^ n % 8) * VECTOR for n, k in rows)
        return tuple(
            (n // ROW * TILE_K + k) * ROW + (n % ROW // VECTOR ^ k % 8) * VECTOR
            for n, k in self.b_rows(thread)
        )

    def part_offsets(self, thread):
        """Returns the words at which the elements of each vector go; where pairs part, each pair."""
        offsets = []
        for n, k in self.b_rows(thread):
            if self.spec.b_major == "k":  # rows of 64 bytes, whose pattern is as wide
                firsts = (k, k + 2) if self.is_permuted else (k,)
                places = [place_of(first, self.is_permuted) for first in firsts]
                offsets += [n * TILE_K + (p // 8 ^ n // 2 % 4) * 8 + p % 8 for p in places]
            else:
                p = place_of(k, self.is_permuted)
                offsets.append(p * 64 + (n // 8 ^ p % 8) * 8 + n % 8)
        return tuple(offset // 2 for offset in offsets)

    # The main loop.

    @cute.jit
    def multiply(self, view, ring, state, coords, on_issued: cutlass.Constexpr):
        k_tiles = coords.k_tiles
        release = state.clone()
        view.acc.fill(0.0)
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
                    self.multiply_step(view, buffer, step, k_tile == first, k_tile == 0)
                ring.consumer_release(release)
                release.advance()
                if k_tile + 1 < k_tiles:
                    self.cut_b(view, ring, state, (k_tile + 1) % PART_BUFFERS)
                    state.advance()
            warpgroup.wait_group(0)
            for v in range(cute.size(view.acc)):
                view.acc[v] = view.acc[v] + view.sums[v]
        if cutlass.const_expr(self.spec.bf16_terms > 3):
            for v in range(cute.size(view.acc)):
                view.acc[v] = view.acc[v] + view.small[v]
        on_issued()
        return state

    def multiply_step(self, view, buffer, step, is_first, is_first_of_tile):
        """Issues the products of 16 of K: those of A's smaller parts, and a group of the others."""
        begun = {id(view.sums): is_first}
        begun.setdefault(id(view.small), is_first_of_tile)
        for i, j in self.products:
            sums = view.small if i + j else view.sums
            tiled_mma = self.make_tiled_mma(1)
            first = begun.pop(id(sums), None) if step == 0 else None
            accumulate = True if first is None else Boolean(first) == Boolean(False)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, accumulate)
            tCrA = view.tCrA[i]
            a = tCrA[None, None, step % cute.size(tCrA, mode=[2])]
            b = view.tCrB[None, None, step, buffer * self.num_parts + j]
            cute.gemm(tiled_mma, sums, a, b, sums)
            if (i, j) in (self.products[-1], self.last_of_others):
                warpgroup.commit_group()

    def cut_a(self, view, stage, step):
        """Puts the parts of a thread's 8 elements of A of a step into registers."""
        at = stage * (self.spec.tile_m * TILE_K)
        if self.is_permuted:
            lines = [
                _load(view.sA, at + view.a_offsets[step] + 8 * ROW * row, VECTOR)
                for row in range(2)
            ]
        for i, (half, row) in enumerate(product(range(2), range(2))):
            if self.is_permuted:
                pair = lines[row][2 * half], lines[row][2 * half + 1]
            else:
                k = at + (STEP_K * step + 8 * half) * ROW
                offsets = view.a_offsets[2 * row : 2 * row + 2]
                pair = [_load(view.sA, k + offset, 1)[0] for offset in offsets]
            for tCrA, part in zip(view.tCrA, parts_of(*pair, self.num_parts), strict=True):
                words = cute.recast_tensor(tCrA, Uint32)
                words[(4 * step + i) % cute.size(words)] = part

    def cut_b(self, view, ring, state, buffer):
        """Writes the parts of a k-tile of B; returns when all of it is written."""
        ring.consumer_wait(state)
        source = state.index * self.b_elements
        target = buffer * (self.num_parts * self.part_words)
        pieces = len(view.part_offsets) // len(view.b_offsets)  # of a vector
        for block, i in product(range(self.spec.tile_n // 64), range(len(view.b_offsets))):
            beyond = block * (64 * TILE_K)
            x = _load(view.sB, source + view.b_offsets[i] + beyond, VECTOR)
            pairs = [parts_of(x[j], x[j + 1], self.num_parts) for j in (0, 2)]
            for number, vector in enumerate(zip(*pairs, strict=True)):
                place = target + number * self.part_words + beyond // 2
                for j in range(pieces):
                    offset = place + view.part_offsets[pieces * i + j]
                    _store(view.parts, offset, vector[j :: pieces])
        # NOTE: these are ordinary writes, which wgmma reads by another proxy.
        cute.arch.fence_proxy("async.shared", space="cta")
        pipeline.NamedBarrier(BarrierId.PARTS, self.threads).arrive_and_wait()


# Rounds two float32 to bfloat16 and returns them, the first one in the low bits, and what is left.
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
    """Stores words of two adjacent bfloat16."""
    count = len(words)
    stored = cute.make_rmem_tensor(count, Uint32)
    for i, word in enumerate(words):
        stored[i] = word
    target = pointer + cute.assume(offset, divby=count)
    cute.autovec_copy(stored, cute.make_tensor(target, cute.make_layout(count)))
