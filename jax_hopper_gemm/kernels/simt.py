"""SGEMM: float32 products by the FMA units, a CTA a tile. `gemm/simt.py` has the arithmetic.

    stages      A and B, K by K, by cp.async. A k-tile is copied, some elements after each k, while
                the one `num_stages` - 1 before it is multiplied.
    registers   a thread's vectors of one k, read while those of the k before are multiplied

No copy reads outside of A and B. Threads of lines past the end copy the last ones again, for
results that are not stored. Where tile_k does not divide K, the first k-tile begins before K does,
with zeros: fma(0, 0, +0) is +0, so the sum begins as it should.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import min as smaller
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from ..gemm import simt
from ..gemm.raster import tile_at
from ..gemm.simt import ITEMSIZE, VECTOR, WARP_M, WARP_N, Copies

ALIGNMENT = 16  # bytes: of a vector


@dataclass(frozen=True)
class Source:
    """What a thread copies of an operand. Global addresses are in bytes."""

    copies: Copies
    address: Any  # of its first k in the first k-tile, of line 0
    lines: tuple  # that it copies, each an int64 distance in bytes
    k: Any  # its first in the first k-tile; negative if that is before K begins
    k_bytes: Any  # int64, from a k to the next
    target: Any  # shared address of its first copy in stage 0

    def parts(self):
        """Returns (distance of the line, k, shared bytes) of each copy, from the first one."""
        c, row = self.copies, simt.pitch(self.copies.lines, self.copies.along_k)
        return [
            (line, k, (step + k * row) * ITEMSIZE)
            for (step, line), k in product(zip(c.line_steps, self.lines, strict=True), c.k_steps)
        ]


class SimtKernel:
    """One kernel, for one `GemmSpec` with `simt_width`."""

    def __init__(self, spec):
        self.spec = s = spec
        self.a_along_k, self.b_along_k = s.a_major == "k", s.b_major == "k"
        self.a_pitch = simt.pitch(s.tile_m, self.a_along_k)
        self.b_pitch = simt.pitch(s.tile_n, self.b_along_k)
        self.stage_elements = s.stage_bytes // ITEMSIZE
        self.b_start = self.a_pitch * s.tile_k  # in a stage

    @cute.jit
    def launch(self, args, stream):
        """Host side, traced only to compile; `ffi/` launches for real."""
        s = self.spec
        self.kernel(args).launch(
            grid=(1, 1, 1), block=(s.threads, 1, 1), smem=s.smem_bytes, stream=stream
        )

    @cute.kernel
    def kernel(self, args):
        """Computes one tile; `args`: `SimtArgs`."""
        s = self.spec
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        m, n, batch = tile_at(args.raster, cute.arch.block_idx()[0], Int64, Int32)
        m, n = m * s.tile_m, n * s.tile_n
        stages = SmemAllocator().allocate(s.smem_bytes, ALIGNMENT)
        sAB = cute.recast_ptr(stages, dtype=Float32)

        e = args.extents
        whole = args.k_tiles, e.k
        a = self.source(args.a, whole, (m, e.m), batch, thread, sAB, of_b=False)
        b = self.source(args.b, whole, (n, e.n), batch, thread, sAB, of_b=True)
        row = warp % (s.tile_m // WARP_M) * WARP_M + simt.first_row(lane)
        column = warp // (s.tile_m // WARP_M) * WARP_N + simt.first_column(lane)
        acc = cute.make_rmem_tensor((1, simt.THREAD_M, simt.THREAD_N), Float32)
        acc.fill(0.0)
        self.multiply(a, b, sAB, row, column, args.k_tiles, acc)
        _hold_in_other_banks(acc, args.k_tiles, args.d.pointer)
        self.store(args.d, e, batch, m + row, n + column, acc)

    def source(self, operand, whole, lines, batch, thread, sAB, *, of_b):
        """Returns what a thread copies of A or B.

        `whole` are the k-tiles and K; `lines` the tile's first line and the number of all.
        """
        s, (k_tiles, k_extent) = self.spec, whole
        c = simt.copies(s, of_b)
        line, k = c.first(thread)
        k = k + k_extent - k_tiles * s.tile_k
        stride = Int64(operand.stride) * ITEMSIZE
        line_bytes, k_bytes = (stride, Int64(ITEMSIZE)) if c.along_k else (Int64(ITEMSIZE), stride)
        first, extent = lines
        last = extent - c.elements
        target = (self.b_start if of_b else 0) + c.first(thread)[1] * simt.pitch(c.lines, c.along_k)
        return Source(
            c,
            address=operand.pointer.toint() + _matrix(operand, batch) + k * k_bytes,
            lines=tuple(smaller(first + line + i, last) * line_bytes for i in c.line_steps),
            k=k,
            k_bytes=k_bytes,
            target=sAB.toint() + (target + line) * ITEMSIZE,
        )

    @cute.jit
    def multiply(self, a, b, sAB, row, column, k_tiles, acc):
        """Adds up the products of all k-tiles, in the order of K."""
        s, ahead = self.spec, self.spec.num_stages - 1
        for i in cutlass.range_constexpr(ahead):
            wanted = select_(i < k_tiles, Int32(1), Int32(0))
            for source in (a, b):
                for part in source.parts():
                    _copy(source, part, i, i * self.stage_elements, wanted, begins=i == 0)
            cute.arch.cp_async_commit_group()
        tCrA = cute.make_rmem_tensor((1, simt.THREAD_M, 2), Float32)
        tCrB = cute.make_rmem_tensor((1, simt.THREAD_N, 2), Float32)
        cute.arch.cp_async_wait_group(ahead - 1)
        cute.arch.barrier()
        self.read(sAB + row, sAB + (self.b_start + column), 0, tCrA, tCrB)

        parts = [(source, part) for source in (a, b) for part in source.parts()]
        read, write = Int32(0), Int32(ahead * self.stage_elements)
        for turn in cutlass.range(k_tiles, unroll=1):
            k_tile = turn + ahead
            wanted = select_(k_tile < k_tiles, Int32(1), Int32(0))
            following = _next(read, s.num_stages, self.stage_elements)
            for k in cutlass.range_constexpr(s.tile_k):
                stage = read
                if cutlass.const_expr(k == s.tile_k - 1):
                    cute.arch.cp_async_commit_group()
                    # NOTE: behind the barrier all threads have read the last of this stage, which
                    # the next turn of the loop overwrites.
                    cute.arch.cp_async_wait_group(ahead - 1)
                    cute.arch.barrier()
                    stage = following
                self.read(
                    sAB + stage + row, sAB + stage + (self.b_start + column),
                    (k + 1) % s.tile_k, tCrA, tCrB,
                )  # fmt: skip
                if cutlass.const_expr(k < s.tile_k - 1):
                    for i, (source, part) in enumerate(parts):
                        if i * (s.tile_k - 1) // len(parts) == k:
                            _copy(source, part, k_tile, write, wanted, begins=False)
                for x, y in simt.PRODUCTS:
                    a_value, b_value = tCrA[0, x, k % 2], tCrB[0, y, k % 2]
                    acc[0, x, y] = cute.math.fma(a_value, b_value, acc[0, x, y])
            read, write = following, read

    def read(self, sA, sB, k, tCrA, tCrB):
        """Reads a thread's vectors of one k of a stage."""
        tCrA, tCrB = tCrA[0, None, k % 2], tCrB[0, None, k % 2]
        for i, at in enumerate(simt.vectors(simt.THREAD_M, simt.LANES_M)):
            _read_vector(sA + (k * self.a_pitch + at), tCrA, i)
        for i, at in enumerate(simt.vectors(simt.THREAD_N, simt.LANES_N)):
            _read_vector(sB + (k * self.b_pitch + at), tCrB, i)

    @cute.jit
    def store(self, d, extents, batch, row, column, acc):
        """Writes what of a thread's elements lies in D."""
        width = self.spec.simt_width
        address = d.pointer.toint() + _matrix(d, batch) + Int64(column) * ITEMSIZE
        rows = simt.vectors(simt.THREAD_M, simt.LANES_M)
        columns = simt.vectors(simt.THREAD_N, simt.LANES_N)
        for i in cutlass.range_constexpr(simt.THREAD_M):
            line = row + (rows[i // VECTOR] + i % VECTOR)
            at_line = address + Int64(line) * (Int64(d.stride) * ITEMSIZE)
            for j in cutlass.range_constexpr(0, simt.THREAD_N, width):
                beyond = columns[j // VECTOR] + j % VECTOR
                if (line < extents.m) & (column + beyond < extents.n):
                    _write(at_line + beyond * ITEMSIZE, [acc[0, i, j + x] for x in range(width)])


def _hold_in_other_banks(acc, k_tiles, pointer):
    """Lets ptxas hold a sum in the other bank of registers than the row of A that it is of.

    An FFMA reads its sum and, in the order of `simt.PRODUCTS`, one operand; both from one bank take
    a cycle more. ptxas chooses the sums' registers by what follows the loop. So stores that no
    thread does ask for the bank of each, and behind an exclusive or with 0, which ptxas does not
    know, registers are free for the stores of adjacent columns.
    """
    negative = Int32(k_tiles) >> 31  # 0
    bits = cute.recast_tensor(acc, Int32)
    for y, x in product(range(simt.THREAD_N), range(0, simt.THREAD_M, VECTOR)):
        exchanged = [acc[0, x + i, y] for i in (1, 0, 3, 2)]
        cute.arch.inline_ptx(
            "{ .reg .pred never; setp.ne.s32 never, {$r0}, 0; "
            "@never st.global.v4.f32 [{$r1}], {{$r2}, {$r3}, {$r4}, {$r5}}; }",
            read_only_args=[negative, pointer.toint(), *exchanged],
        )
    for i in range(cute.size(bits)):
        bits[i] = bits[i] ^ negative


def _matrix(operand, batch):
    """Returns how many bytes a matrix lies behind the first one."""
    return Int64(batch) * (Int64(operand.batch_stride) * ITEMSIZE)


def _next(offset, num_stages, stage_elements):
    """Returns the offset of the stage that follows."""
    after = offset + stage_elements
    return select_(after == num_stages * stage_elements, Int32(0), after)


def _copy(source, part, k_tile, offset, wanted, *, begins):
    """Copies a part of a k-tile to a stage, if it is `wanted`; of the one that `begins` K, zeros
    where K has not begun."""
    line, k, shared = part
    c = source.copies
    address = source.address + line + (k_tile * c.tile_k + k) * source.k_bytes
    nbytes = c.elements * ITEMSIZE
    count = select_(source.k + k >= 0, Int32(nbytes), Int32(0)) if begins else Int32(nbytes)
    level = "cg" if nbytes == 16 else "ca"
    filled = ", {$r3}" if begins else ""
    code = (
        "{ .reg .pred wanted; setp.ne.s32 wanted, {$r2}, 0; "
        f"@wanted cp.async.{level}.shared.global [{{$r0}}], [{{$r1}}], {nbytes}{filled}; }}"
    )
    target = source.target + (offset * ITEMSIZE + shared)
    arguments = [target, address, wanted] + ([count] if begins else [])
    cute.arch.inline_ptx(code, read_only_args=arguments)


def _read_vector(pointer, fragment, index):
    source = cute.make_ptr(
        Float32, pointer.toint(), cute.AddressSpace.smem, assumed_align=ALIGNMENT
    )
    vector = cute.make_rmem_tensor(VECTOR, Float32)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(VECTOR)), vector)
    for i in range(VECTOR):
        fragment[VECTOR * index + i] = vector[i]


def _write(address, values):
    """Writes adjacent float32 to global memory."""
    count = len(values)
    stored = cute.make_rmem_tensor(count, Float32)
    for i, value in enumerate(values):
        stored[i] = value
    target = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=count * ITEMSIZE)
    cute.autovec_copy(stored, cute.make_tensor(target, cute.make_layout(count)))
