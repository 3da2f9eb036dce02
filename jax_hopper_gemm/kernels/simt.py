"""SGEMM: float32 products by the FMA units, a CTA a tile. `gemm/simt.py` has the arithmetic.

    stages      A and B, K by K. A k-tile is copied while the one `num_stages` - 1 before it is
                multiplied: by TMA at once, by cp.async some elements with each block.
    blocks      of a k-tile: a loop, so that ptxas keeps what is read for the next block, and the
                order of products within one
    registers   a thread's vectors of one k, read while those of the k before are multiplied

No copy reads outside of A and B. TMA fills up with zeros, threads of lines past the end copy the
last ones again, for results that are not stored. Where tile_k does not divide K, the first k-tile
begins before K does, with zeros: fma(0, 0, +0) is +0, so the sum begins as it should.
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
from ..gemm.smem import SMEM_VECTOR
from ..gemm.tma_box import TmaBox
from .copies import adjacent, boxes_of, load_atom


@dataclass(frozen=True)
class Source:
    """What a thread copies of an operand. Global addresses are in bytes."""

    copies: Copies
    address: Any  # of its first k in the first k-tile, of line 0
    line: Any  # its first
    last: Any  # line that there is to copy
    line_bytes: Any  # int64, from a line to the next
    k: Any  # its first in the first k-tile; negative if that is before K begins
    k_bytes: Any  # int64, from a k to the next
    target: Any  # shared address of its first copy in stage 0

    def copy(self, step, k_tile, offset, wanted, *, begins=False):
        """Copies a step of a k-tile to the stage at an offset, if it is `wanted`; of the k-tile
        that `begins` K, zeros where K has not begun."""
        c = self.copies
        for lines, k in c.places(step):
            line = smaller(self.line + lines, self.last) * self.line_bytes
            source = self.address + (k_tile * c.tile_k + k) * self.k_bytes + line
            shared = (offset + lines + k * simt.pitch(c.lines, c.along_k)) * ITEMSIZE
            there = self.k + k >= 0 if begins else None
            _copy(self.target + shared, source, wanted, there)


@dataclass(frozen=True)
class Boxes:
    """What TMA copies of an operand: a box of each k-tile."""

    tensor_map: Any
    k_tiles: Any  # (lines, tile_k, k-tiles) of coordinates
    target: Any  # shared memory of stage 0

    def copy(self, k_tile, offset, full):
        """Copies a k-tile to the stage at an offset; its bytes arrive at the mbarrier `full`."""
        shape = self.k_tiles.shape[:2]
        stage = cute.make_tensor(self.target + offset, cute.make_layout(shape))
        target, boxes = boxes_of(self.tensor_map, stage, self.k_tiles)
        cute.copy(self.tensor_map, boxes[None, k_tile], target, tma_bar_ptr=full)


class SimtKernel:
    """One kernel, for one `GemmSpec` with `simt_width`."""

    def __init__(self, spec):
        self.spec = s = spec
        self.a_along_k, self.b_along_k = s.a_major == "k", s.b_major == "k"
        self.a_pitch = simt.pitch(s.tile_m, self.a_along_k)
        self.b_pitch = simt.pitch(s.tile_n, self.b_along_k)
        self.stage_elements = s.stage_bytes // ITEMSIZE
        self.b_start = self.a_pitch * s.tile_k  # in a stage
        self.block_k = simt.block_k(s)
        self.blocks = s.tile_k // self.block_k
        self.a_by_tma, self.b_by_tma = simt.by_tma(s, of_b=False), simt.by_tma(s, of_b=True)
        self.tma_bytes = (s.tile_m * self.a_by_tma + s.tile_n * self.b_by_tma) * s.tile_k * ITEMSIZE

    @cute.jit
    def launch(self, args, stream):
        """Host side, traced only to compile; `ffi/` launches for real."""
        s = self.spec
        a = _tma_atom(args.a, s.tile_m, s.tile_k) if self.a_by_tma else args.a
        b = _tma_atom(args.b, s.tile_n, s.tile_k) if self.b_by_tma else args.b
        self.kernel(args._replace(a=a, b=b)).launch(
            grid=(1, 1, 1), block=(s.threads, 1, 1), smem=s.smem_bytes, stream=stream,
            min_blocks_per_mp=1,  # NOTE: else ptxas saves registers, and reads stages late
        )  # fmt: skip

    @cute.kernel
    def kernel(self, args):
        """Computes one tile; `args`: `SimtArgs`."""
        s = self.spec
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        m, n, batch = tile_at(args.raster, cute.arch.block_idx()[0], Int64, Int32)
        m, n = m * s.tile_m, n * s.tile_n
        sAB = cute.recast_ptr(SmemAllocator().allocate(s.smem_bytes, SMEM_VECTOR), dtype=Float32)
        barriers = sAB + (self.b_start + self.b_pitch * s.tile_k)
        self.set_up(barriers, warp)

        e = args.extents
        whole = args.k_tiles, e.k
        sources = (
            self.source(args.a, whole, (m, e.m), batch, thread, sAB, of_b=False),
            self.source(args.b, whole, (n, e.n), batch, thread, sAB, of_b=True),
        )
        row = warp % (s.tile_m // WARP_M) * WARP_M + simt.first_row(lane)
        column = warp // (s.tile_m // WARP_M) * WARP_N + simt.first_column(lane)
        acc = cute.make_rmem_tensor((1, simt.THREAD_M, simt.THREAD_N), Float32)
        acc.fill(0.0)
        self.multiply(sources, sAB, barriers, warp, (row, column), args.k_tiles, acc)
        _hold_in_other_banks(acc, args.k_tiles, args.d.pointer)
        self.store(args.d, e, batch, m + row, n + column, acc)

    @cute.jit
    def set_up(self, barriers, warp):
        """Makes the mbarriers of stages that TMA fills."""
        if cutlass.const_expr(self.tma_bytes > 0):
            if warp == 0:
                with cute.arch.elect_one():
                    for i in cutlass.range_constexpr(self.spec.num_stages):
                        cute.arch.mbarrier_init(_barrier_of(barriers, i * self.stage_elements), 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.barrier()

    def boxes(self, tensor_map, lines, first, whole, batch, target):
        """Returns what TMA copies of an operand: `lines` of a tile, from the `first` on."""
        tile_k, (k_tiles, k_extent) = self.spec.tile_k, whole
        modes = cute.make_layout((k_extent,) * 3, stride=tuple(map(cute.E, range(3))))
        operand = cute.make_tensor(cute.make_identity_tensor((1, 1, 1)).iterator, modes)
        origin = cute.domain_offset((first, k_extent - k_tiles * tile_k, batch), operand).iterator
        strides = cute.E(0), cute.E(1), tile_k * cute.E(1)
        layout = cute.make_layout((lines, tile_k, k_tiles), stride=strides)
        return Boxes(tensor_map, cute.make_tensor(origin, layout), target)

    def source(self, operand, whole, lines, batch, thread, sAB, *, of_b):
        """Returns what TMA, or a thread, copies of A or B.

        `whole` are the k-tiles and K; `lines` the tile's first line and the number of all.
        """
        s, (k_tiles, k_extent) = self.spec, whole
        c = simt.copies(s, of_b)
        if simt.by_tma(s, of_b):
            target = sAB + (self.b_start if of_b else 0)
            return self.boxes(operand, c.lines, lines[0], whole, batch, target)
        line, k = c.first(thread)
        k = k + k_extent - k_tiles * s.tile_k
        stride = Int64(operand.stride) * ITEMSIZE
        line_bytes, k_bytes = (stride, Int64(ITEMSIZE)) if c.along_k else (Int64(ITEMSIZE), stride)
        first, last = lines[0], lines[1] - 1
        target = (self.b_start if of_b else 0) + c.first(thread)[1] * simt.pitch(c.lines, c.along_k)
        return Source(
            c,
            address=operand.pointer.toint() + _matrix(operand, batch) + k * k_bytes,
            line=first + line,
            last=last,
            line_bytes=line_bytes,
            k=k,
            k_bytes=k_bytes,
            target=sAB.toint() + (target + line) * ITEMSIZE,
        )

    @cute.jit
    def multiply(self, sources, sAB, barriers, warp, first, k_tiles, acc):
        """Adds up the products of all k-tiles, in the order of K.

        `first` are a thread's first row and column in the tile.
        """
        s, ahead, (row, column) = self.spec, self.spec.num_stages - 1, first
        boxes = [source for source in sources if isinstance(source, Boxes)]
        copied = [source for source in sources if isinstance(source, Source)]
        for i in cutlass.range_constexpr(ahead):
            self.load(boxes, barriers, warp, Int32(i), i * self.stage_elements, k_tiles)
            wanted = select_(i < k_tiles, Int32(1), Int32(0))
            for source in copied:
                for step in cutlass.range(source.copies.steps, unroll=1):
                    source.copy(step, i, i * self.stage_elements, wanted, begins=i == 0)
            self.commit()
        tCrA = cute.make_rmem_tensor((1, simt.THREAD_M, 2), Float32)
        tCrB = cute.make_rmem_tensor((1, simt.THREAD_N, 2), Float32)
        self.wait(barriers, Int32(0), Int32(0), k_tiles > 0)
        self.read(sAB + row, sAB + (self.b_start + column), 0, tCrA, tCrB)

        read, write, phase = Int32(0), Int32(ahead * self.stage_elements), Int32(0)
        for turn in cutlass.range(k_tiles, unroll=1):
            k_tile = turn + ahead
            self.load(boxes, barriers, warp, k_tile, write, k_tiles)
            wanted = select_(k_tile < k_tiles, Int32(1), Int32(0))
            following = _next(read, s.num_stages, self.stage_elements)
            phase = phase ^ select_(following == 0, Int32(1), Int32(0))
            sA, sB = sAB + read + row, sAB + read + (self.b_start + column)
            for block in cutlass.range(self.blocks - 1, unroll=1):
                self.copy(copied, block, k_tile, write, wanted)
                begin = block * self.block_k
                at_a, at_b = sA + begin * self.a_pitch, sB + begin * self.b_pitch
                for k in cutlass.range_constexpr(self.block_k):
                    self.read(at_a, at_b, k + 1, tCrA, tCrB)
                    self.add_products(k, tCrA, tCrB, acc)
            self.copy(copied, Int32(self.blocks - 1), k_tile, write, wanted)
            for k in cutlass.range_constexpr(s.tile_k - self.block_k, s.tile_k - 1):
                self.read(sA, sB, k + 1, tCrA, tCrB)
                self.add_products(k, tCrA, tCrB, acc)
            self.commit()
            # NOTE: behind the barrier all threads have read the last of this stage, which the next
            # turn of the loop overwrites.
            self.wait(barriers, following, phase, turn + 1 < k_tiles)
            self.read(
                sAB + following + row, sAB + following + (self.b_start + column), 0, tCrA, tCrB
            )
            self.add_products(s.tile_k - 1, tCrA, tCrB, acc)
            read, write = following, read

    def copy(self, copied, block, k_tile, offset, wanted):
        """Copies by cp.async what is due with a block of the k-tile that is multiplied."""
        for source in copied:
            steps = source.copies.steps
            due = max(1, steps // self.blocks)
            there = wanted if steps >= self.blocks else select_(block < steps, wanted, Int32(0))
            for i in range(due):
                source.copy(block * due + i, k_tile, offset, there)

    def add_products(self, k, tCrA, tCrB, acc):
        """Adds the products of one k."""
        for x, y in simt.PRODUCTS:
            a_value, b_value = tCrA[0, x, k % 2], tCrB[0, y, k % 2]
            acc[0, x, y] = cute.math.fma(a_value, b_value, acc[0, x, y])

    @cute.jit
    def load(self, boxes, barriers, warp, k_tile, offset, k_tiles):
        """Lets TMA copy a k-tile to a stage, if there is one."""
        if cutlass.const_expr(self.tma_bytes > 0):
            if (warp == 0) & (k_tile < k_tiles):
                full = _barrier_of(barriers, offset)
                with cute.arch.elect_one():
                    # NOTE: ordinary loads, behind the block's barrier, have read the stage, which
                    # TMA refills by another proxy.
                    cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.mbarrier_arrive_and_expect_tx(full, self.tma_bytes)
                for box in boxes:
                    box.copy(k_tile, offset, full)

    def commit(self):
        """Closes a group of copies by cp.async."""
        if not (self.a_by_tma and self.b_by_tma):
            cute.arch.cp_async_commit_group()

    @cute.jit
    def wait(self, barriers, stage, phase, there):
        """Waits until a stage is filled, if a k-tile is `there`, for all threads."""
        if cutlass.const_expr(self.tma_bytes > 0):
            if there:
                cute.arch.mbarrier_wait(_barrier_of(barriers, stage), phase)
        if cutlass.const_expr(not (self.a_by_tma and self.b_by_tma)):
            cute.arch.cp_async_wait_group(self.spec.num_stages - 2)
        cute.arch.barrier()

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


def _tma_atom(tensor, *tile):
    """Returns the atom that copies a box, (lines, tile_k)."""
    return load_atom(tensor, cute.make_layout(tile), tile, TmaBox(*tile, swizzle=0))


def _barrier_of(barriers, offset):
    """Returns the mbarrier of the stage at an offset."""
    address = (barriers + offset).toint()
    return cute.make_ptr(Int64, address, cute.AddressSpace.smem, assumed_align=8)


def _next(offset, num_stages, stage_elements):
    """Returns the offset of the stage that follows."""
    after = offset + stage_elements
    return select_(after == num_stages * stage_elements, Int32(0), after)


def _copy(target, source, wanted, there):
    """Copies a number, if it is `wanted`, or writes 0 where it is not `there`."""
    filled = "" if there is None else ", {$r3}"
    code = (
        "{ .reg .pred wanted; setp.ne.s32 wanted, {$r2}, 0; "
        f"@wanted cp.async.ca.shared.global [{{$r0}}], [{{$r1}}], {ITEMSIZE}{filled}; }}"
    )
    count = [] if there is None else [select_(there, Int32(ITEMSIZE), Int32(0))]
    cute.arch.inline_ptx(code, read_only_args=[target, source, wanted, *count])


def _read_vector(pointer, fragment, index):
    vector = cute.make_rmem_tensor(VECTOR, Float32)
    source = adjacent(Float32, pointer.toint(), VECTOR, cute.AddressSpace.smem)
    cute.autovec_copy(source, vector)
    for i in range(VECTOR):
        fragment[VECTOR * index + i] = vector[i]


def _write(address, values):
    """Writes adjacent float32 to global memory."""
    count = len(values)
    stored = cute.make_rmem_tensor(count, Float32)
    for i, value in enumerate(values):
        stored[i] = value
    cute.autovec_copy(stored, adjacent(Float32, address, count, cute.AddressSpace.gmem))
