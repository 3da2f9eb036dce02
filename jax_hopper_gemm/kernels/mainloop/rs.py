"""The consumer that converts B on its way from shared memory to registers, where wgmma reads it.

wgmma takes one operand from registers ("RS"): the one on its M side. So sides are swapped: 64
columns of B are multiplied by all rows of A in a tile, and the sums are those of D transposed. Math
warpgroups share a tile's columns. For each 16 of K:

    load B's numbers from the stage -> widen to A's dtype -> wgmma, which reads A in shared memory

Conversion of the next 16 runs beside the tensor cores, with registers of its own. At the end of a
tile each warpgroup turns its sums, by way of shared memory, into the accumulators that a plain
product would have left: the epilogue is no other.

With scales of groups along K, sums of a group are multiplied by them in float32.

CuTe's names: sums are (wgmma, blocks of 64 columns, 1), of D transposed; acc is (wgmma, 64-row
blocks, 1), of D.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import warpgroup

from ...gemm.conversion import (
    BLOCK,
    LDMATRIX_K,
    MMA_K,
    column_of,
    offset_along_k,
    offset_along_n,
    slab_of,
    spread,
    widen_integers,
)
from ...gemm.dtypes import DTYPES
from ...gemm.spec import EPI_TILE_M, EXCHANGE_COLUMNS, EXCHANGE_PITCH
from ...gemm.wgmma_fragment import (
    Position,
    first_column,
    first_row,
    nth_column,
    nth_row,
    position_of,
)
from ..dtypes import CUTE_DTYPE
from ..shared_memory import WARPGROUP, BarrierId
from .ss import SharedConsumer

IN_FLIGHT = 2  # groups of wgmma, each with registers of its own for B


class Integers:
    """int8 and int4 -> 16-bit floats."""

    def __init__(self, bits, half):
        self.bits, self.half = bits, half
        self.subtract = {"bfloat16": "sub.rn.bf16x2", "float16": "sub.rn.f16x2"}[half]

    def widen(self, pairs):
        """Returns two numbers, in the lowest bits of the halves of a register, as A's dtype."""
        return widen_integers(pairs, self.bits, self.half, self._subtract)

    def _subtract(self, x, y):
        # A constant must be in a register: the instruction takes none.
        code = "{.reg .b32 y; mov.b32 y, {$r1}; " + self.subtract + " {$w0}, {$r0}, y;}"
        return _instruction(code, x, Uint32(y))


class EightBitFloats:
    """float8_e4m3fn and float8_e5m2 -> 16-bit floats; NaN and infinities are kept."""

    bits = 8

    def __init__(self, dtype, half):
        kind = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}[dtype]
        self.code = (
            "{.reg .b32 two; .reg .b16 pair, high; prmt.b32 two, {$r0}, 0, 0x4420;"
            f" mov.b32 {{pair, high}}, two; cvt.rn.f16x2.{kind}x2 {{$w0}}, pair;}}"
        )
        self.to_bfloat16 = half == "bfloat16"

    def widen(self, pairs):
        halves = _instruction(self.code, pairs)
        if not self.to_bfloat16:
            return halves
        return _instruction(
            "{.reg .b16 low, high; .reg .f32 x, y; mov.b32 {low, high}, {$r0};"
            " cvt.f32.f16 x, low; cvt.f32.f16 y, high; cvt.rn.bf16x2.f32 {$w0}, y, x;}",
            halves,
        )


def make_conversion(dtype, half):
    """Returns what widens numbers of a dtype."""
    if dtype.startswith("float8"):
        return EightBitFloats(dtype, half)
    return Integers(DTYPES[dtype].bits, half)


def _instruction(code, *operands):
    return cute.arch.inline_ptx(code, write_only_types=[Uint32], read_only_args=list(operands))


@dataclass(frozen=True)
class Raw:
    """What a thread reads of a stage."""

    position: Position
    base: Any  # shared address of the stages
    starts: tuple  # for each block, what `BlockLoads` begins with


class LoadsAlongK:
    """Loads of what is stored (N, K): two neighbours along K at a time."""

    def __init__(self, spec):
        self.spec, self.bits = spec, DTYPES[spec.b_dtype].bits
        self.code = "ld.shared.u16" if self.bits == 8 else "ld.shared.u8"

    def start(self, position, lane, column):
        return column + 16 * position.warp

    def load(self, raw, stage, block):
        """Returns for each 16 of K the words of (h, first or second 8)."""
        s = self.spec
        words = []
        inside = raw.position.quad_lane * (self.bits // 4)
        for k in range(0, s.tile_k, MMA_K):
            of_k = {}
            for h in range(2):
                for i in range(2):
                    first = (k + 8 * i) * self.bits // 8
                    chunk = first // 16 * 16
                    offset = offset_along_k(
                        raw.position, raw.starts[block], h, chunk, s.b_box.swizzle, s.tile_n
                    )
                    address = stage + offset + (first - chunk) + inside
                    of_k[h, i] = _instruction(self.code + " {$w0}, [{$r0}];", address)
            words.append(of_k)
        return words


class LoadsAlongN:
    """Loads of what is stored (K, N), by ldmatrix: 16 bits along N of 32 of K."""

    def __init__(self, spec):
        self.spec, self.bits = spec, DTYPES[spec.b_dtype].bits

    def start(self, position, lane, column):
        slab = (column + slab_of(position, self.bits)) * self.bits // 8
        return offset_along_n(lane, slab, self.spec.b_box.swizzle, self.spec.tile_k)

    def load(self, raw, stage, block):
        words = []
        for k in range(0, self.spec.tile_k, LDMATRIX_K):
            address = stage + raw.starts[block] + k * self.spec.b_box.swizzle
            four = cute.arch.inline_ptx(
                "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
                " {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                write_only_types=[Uint32] * 4,
                read_only_args=[address],
            )
            for pair in (four[:2], four[2:]):
                words.append({(h, i): pair[i] for h in range(2) for i in range(2)})
        return words


@dataclass(frozen=True)
class ConversionView:
    """What a thread of a math warpgroup multiplies with, whatever the tile."""

    raw: Raw
    tCrB: Any  # descriptors of A's stages, which wgmma takes as its N side: (wgmma, 1, k, stages)
    acc: Any
    sums: Any  # where wgmma adds up
    totals: Any  # `sums`; with scales others like it, to which these are added
    scales: tuple  # of each B (bN, groups along K, stages), or none
    columns: tuple  # for each block the number of its B, and there a thread's two columns
    written: Any  # a thread's first element of the exchange, as `sums` has them
    read: Any  # the same as `acc` has them: (2, 2, columns / 8)
    barrier: Any  # the warpgroup's


class RegisterConsumer(SharedConsumer):
    """Math warpgroups that convert B in registers."""

    def __init__(self, spec, atom_layout_m, before_read):
        super().__init__(spec, atom_layout_m, before_read)
        self.along_k = spec.b_major == "k"
        self.loads = (LoadsAlongK if self.along_k else LoadsAlongN)(spec)
        self.conversion = make_conversion(spec.b_dtype, spec.a_dtype)
        self.bits = DTYPES[spec.b_dtype].bits
        self.blocks = spec.columns_per_warpgroup // BLOCK

    def make_tiled_mma(self, warpgroups):
        """Returns the MMA that would have left the accumulators as they are turned."""
        mode, dtype = cute.nvgpu.OperandMajorMode.K, CUTE_DTYPE[self.spec.a_dtype]
        tiler = 64, self.spec.columns_per_warpgroup
        return sm90.make_trivial_tiled_mma(
            dtype, dtype, mode, mode, Float32, (warpgroups, 1, 1), tiler_mn=tiler
        )

    def make_swapped_mma(self):
        s, mode, dtype = self.spec, cute.nvgpu.OperandMajorMode, CUTE_DTYPE[self.spec.a_dtype]
        return sm90.make_trivial_tiled_mma(
            dtype, dtype, mode.K, mode.K if s.a_major == "k" else mode.MN, Float32, (1, 1, 1),
            tiler_mn=(64, s.tile_m), a_source=warpgroup.OperandSource.RMEM,
        )  # fmt: skip

    def partition_for_math(self, stages, warpgroup_index, args):
        s = self.spec
        mma = self.make_swapped_mma()
        thr_mma = mma.get_slice(0)  # one thread stands for its warpgroup
        tCrB = mma.make_fragment_B(thr_mma.partition_B(stages.sA))
        acc = cute.make_rmem_tensor(
            self.make_tiled_mma(1)
            .get_slice(0)
            .partition_shape_C((s.d_tile_m, s.columns_per_warpgroup)),
            Float32,
        )
        shape = thr_mma.partition_shape_C((s.columns_per_warpgroup, s.tile_m))
        sums = cute.make_rmem_tensor(shape, Float32)
        totals = cute.make_rmem_tensor(shape, Float32) if s.k_group else sums
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        position, lane = position_of(thread), thread % 32
        columns = [self.block_column(warpgroup_index, block) for block in range(self.blocks)]
        starts = tuple(self.loads.start(position, lane, column) for column in columns)
        base = Int32(stages.sB.iterator.toint())
        exchange = stages.exchange + warpgroup_index * (EPI_TILE_M * EXCHANGE_PITCH)
        own = [column_of(position, h, self.bits, along_k=self.along_k) for h in range(2)]
        return ConversionView(
            Raw(position, base, starts), tCrB, acc, sums, totals,
            scales=stages.sS,
            columns=tuple(self.columns_of(warpgroup_index, i, own) for i in range(self.blocks)),
            written=exchange
            + (first_column(position) * EXCHANGE_PITCH + own[0] % EXCHANGE_COLUMNS),
            read=exchange + (first_row(position) * EXCHANGE_PITCH + first_column(position)),
            barrier=pipeline.NamedBarrier(BarrierId.WARPGROUP + warpgroup_index, WARPGROUP),
        )  # fmt: skip

    def block_column(self, warpgroup_index, block):
        """Returns the first column, in a stage, of a block of 64: those of gate come first."""
        part, (column,) = self.columns_of(warpgroup_index, block, (0,))
        return part * self.spec.d_tile_n + column

    def columns_of(self, warpgroup_index, block, own):
        """Returns which B a block is of, and its columns `own` there."""
        of_each = self.blocks // self.spec.graph.accumulators
        part, i = divmod(block, of_each)
        first = (warpgroup_index * of_each + i) * BLOCK
        return part, tuple(first + column for column in own)

    def multiply(self, view, ring, state, coords, on_issued):
        if self.spec.k_group:
            state = self._accumulate_groups(view, ring, state, coords.k_tiles, on_issued)
        else:
            state = self._accumulate(view, ring, state, coords.k_tiles, on_issued)
        self._turn(view)
        return state

    @cute.jit
    def _accumulate(self, view, ring, state, k_tiles, on_issued: cutlass.Constexpr):
        """A stage is released when the groups that read it have retired: in the next k-tile."""
        release = state.clone()
        fragments = self.make_fragments()
        mma = self.make_swapped_mma()
        mma.set(warpgroup.Field.ACCUMULATE, False)
        ring.consumer_wait(state)
        self._multiply_stage(mma, view, fragments, state.index, None)
        state.advance()
        for _ in cutlass.range(1, k_tiles, unroll=1):
            ring.consumer_wait(state)
            self._multiply_stage(
                mma, view, fragments, state.index, lambda: self.release(ring, release)
            )
            state.advance()
            release.advance()
        on_issued()
        warpgroup.wait_group(0)
        self.release(ring, release)
        return state

    def release(self, ring, state):
        # NOTE: ordinary loads have read the stage, which TMA refills by another proxy.
        cute.arch.fence_proxy("async.shared", space="cta")
        ring.consumer_release(state)

    def make_fragments(self):
        """Returns registers for B as wgmma reads it, of each group in flight: 16 of K."""
        mma = self.make_swapped_mma()
        shape = mma.get_slice(0).partition_shape_A((self.spec.columns_per_warpgroup, MMA_K))
        dtype = CUTE_DTYPE[self.spec.a_dtype]
        return [cute.make_rmem_tensor(shape, dtype) for _ in range(IN_FLIGHT)]

    def _multiply_stage(self, mma, view, fragments, stage, release_previous):
        """Multiplies a stage. `release_previous` is called once all groups before have retired."""
        words = self._load_stage(view, stage)
        self.before_read()
        for k_block in range(self.spec.tile_k // MMA_K):
            if release_previous or k_block >= IN_FLIGHT:
                warpgroup.wait_group(IN_FLIGHT - 1)
            if release_previous and k_block == IN_FLIGHT - 1:
                release_previous()
            self._multiply_k_block(mma, view, fragments[k_block % IN_FLIGHT], words, k_block, stage)

    def _load_stage(self, view, stage):
        nbytes = DTYPES[self.spec.b_dtype].nbytes(self.spec.tile_n * self.spec.tile_k)
        address = view.raw.base + stage * nbytes
        return [self.loads.load(view.raw, address, block) for block in range(self.blocks)]

    def _multiply_k_block(self, mma, view, fragment, words, k_block, stage):
        registers = cute.recast_tensor(fragment, Uint32)
        for block in range(self.blocks):
            for i in range(2):
                for h in range(2):
                    word = words[block][k_block][h, i]
                    pairs = spread(word, view.raw.position, h, self.bits, along_k=self.along_k)
                    registers[4 * block + 2 * i + h] = self.conversion.widen(pairs)
        warpgroup.fence()
        cute.gemm(
            mma, view.sums, fragment[None, None, 0], view.tCrB[None, None, k_block, stage],
            view.sums,
        )  # fmt: skip
        mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def _accumulate_groups(self, view, ring, state, k_tiles, on_issued: cutlass.Constexpr):
        fragments = self.make_fragments()
        view.totals.fill(0.0)
        for _ in cutlass.range(k_tiles, unroll=1):
            ring.consumer_wait(state)
            self._multiply_groups(view, fragments, state.index)
            self.release(ring, state)
            state.advance()
        on_issued()
        return state

    def _multiply_groups(self, view, fragments, stage):
        """Multiplies a stage, group by group of those along K that have scales."""
        words = self._load_stage(view, stage)
        self.before_read()
        of_group = self.spec.k_group // MMA_K
        for group in range(self.spec.tile_k // self.spec.k_group):
            scales = [
                [view.scales[part][x, group, stage] for x in pair] for part, pair in view.columns
            ]
            mma = self.make_swapped_mma()
            mma.set(warpgroup.Field.ACCUMULATE, False)
            for i in range(of_group):
                if i >= IN_FLIGHT:
                    warpgroup.wait_group(IN_FLIGHT - 1)
                k_block, fragment = group * of_group + i, fragments[i % IN_FLIGHT]
                self._multiply_k_block(mma, view, fragment, words, k_block, stage)
            warpgroup.wait_group(0)
            self._add_group(view, scales)

    def _add_group(self, view, scales):
        values = self.spec.tile_m // 2  # of a block
        for block in range(self.blocks):
            for v in range(values):
                at, scale = block * values + v, scales[block][v // 2 % 2]
                view.totals[at] = cute.math.fma(view.sums[at], scale, view.totals[at])

    def _turn(self, view):
        """Moves the sums of D transposed to the accumulators of D, 64 rows by 32 columns a time."""
        s = self.spec
        for row_block in range(s.d_tile_m // EPI_TILE_M):
            for block in range(self.blocks):
                for half in range(BLOCK // EXCHANGE_COLUMNS):
                    self._write(view, row_block, block, half)
                    view.barrier.arrive_and_wait()
                    self._read(view, row_block, block * 2 + half)
                    view.barrier.arrive_and_wait()

    @cute.jit
    def _write(
        self, view, row_block: cutlass.Constexpr, block: cutlass.Constexpr, half: cutlass.Constexpr
    ):
        """Writes rows of D of those columns of a block that two of the warps hold."""
        if view.raw.position.warp // 2 == half:
            of_block, rows = self.spec.tile_m // 2, min(EPI_TILE_M, self.spec.tile_m)
            step = column_of(Position(0, 0, 0), 1, self.bits, along_k=self.along_k)
            for v in range(rows // 2):
                row, column = nth_column(0, v // 4 * 2 + v % 2), v // 2 % 2 * step
                value = view.totals[block * of_block + row_block * (EPI_TILE_M // 2) + v]
                cute.arch.store(view.written + (row * EXCHANGE_PITCH + column), value)

    def _read(self, view, row_block, chunk):
        of_rows, of_chunk = self.spec.columns_per_warpgroup // 2, EXCHANGE_COLUMNS // 2
        for v in range(of_chunk):
            row, column = nth_row(0, v // 2 % 2), nth_column(0, v // 4 * 2 + v % 2)
            value = cute.arch.load(view.read + (row * EXCHANGE_PITCH + column), Float32)
            view.acc[row_block * of_rows + chunk * of_chunk + v] = value
