"""The consumer that loads B from shared memory to registers, where wgmma reads it, and converts it.

wgmma takes one operand from registers ("RS"): the one on its M side. So sides are swapped: 64
columns of B are multiplied by all rows of A in a tile, and the sums are those of D transposed. Math
warpgroups share a tile's columns. For each 32 of K:

    load B's numbers from the stage -> widen to A's dtype -> wgmma, which reads A in shared memory

Float32 in TF32 is not widened: the tensor cores read it in shared memory along K alone, so here it
lies across. It is loaded 16 of K at a time.

Conversion of the next 32, be they of the next k-tile, runs beside the tensor cores, with registers
of its own. At the end of a tile each warpgroup turns its sums, by way of shared memory, into the
accumulators that a plain product would have left: the epilogue is no other.

With scales of groups along K, sums of a group are multiplied by them in float32, when the first
numbers of the next group have been converted.

CuTe's names: sums are (wgmma, blocks of 64 columns, 1), of D transposed; acc is (wgmma, 64-row
blocks, 1), of D.
"""

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, TFloat32, Uint32
from cutlass.cute.nvgpu import warpgroup

from ...gemm.conversion import BLOCK, Held
from ...gemm.dtypes import DTYPES
from ...gemm.smem import EPI_TILE_M, EXCHANGE_COLUMNS, EXCHANGE_PITCH
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
from .ring import either
from .rs_loads import LoadsAlongK, LoadsAlongN, LoadsOfFloat32, Raw
from .ss import SharedConsumer
from .tf32 import make_tiled_mma
from .widening import make_conversion

SETS = 2  # of registers for what is loaded of B together: one is multiplied, one is filled
WAIT_AT = 2  # groups of wgmmas of a stage that are issued before the next one is waited for


def even(offset):
    """Returns the offset of a thread's first column of D as one of pairs."""
    return cute.assume(offset, divby=2)


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
    barrier: Any  # of the threads that exchange sums
    warpgroup: Any


class RegisterConsumer(SharedConsumer):
    """Math warpgroups that convert B in registers."""

    def __init__(self, spec, atom_layout_m, before_read):
        super().__init__(spec, atom_layout_m, before_read)
        along_k = spec.b_major == "k"
        self.blocks = spec.converted_columns // BLOCK
        of_each = self.blocks // spec.graph.accumulators
        self.held = Held.of(DTYPES[spec.b_dtype].bits, of_each, along_k=along_k)
        self.spans = range(self.blocks // self.held.joined)
        kind = LoadsAlongK if along_k else LoadsAlongN
        self.loads = (LoadsOfFloat32 if spec.rounds_operands else kind)(spec, self.held)
        self.conversion = make_conversion(spec.b_dtype, spec.a_dtype)

    def make_tiled_mma(self, warpgroups):
        """Returns the MMA that would have left the accumulators as they are turned."""
        mode, dtype = cute.nvgpu.OperandMajorMode.K, CUTE_DTYPE[self.spec.a_dtype]
        columns = self.spec.columns_per_warpgroup
        return make_tiled_mma(dtype, dtype, mode, mode, Float32, warpgroups, columns)

    def make_swapped_mma(self):
        s, mode, dtype = self.spec, cute.nvgpu.OperandMajorMode, CUTE_DTYPE[self.spec.a_dtype]
        a_mode = mode.K if s.a_major == "k" else mode.MN
        in_registers = warpgroup.OperandSource.RMEM
        return make_tiled_mma(dtype, dtype, mode.K, a_mode, Float32, 1, s.tile_m, in_registers)

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
        shape = thr_mma.partition_shape_C((s.converted_columns, s.tile_m))
        sums = cute.make_rmem_tensor(shape, Float32)
        totals = cute.make_rmem_tensor(shape, Float32) if s.k_group else sums
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        position, lane = position_of(thread), thread % 32
        of_span = [self.span_column(warpgroup_index, span) for span in self.spans]
        starts = tuple(self.loads.start(position, lane, column) for column in of_span)
        base = Int32(stages.sB.iterator.toint())
        written, read = self.exchange_of(stages, warpgroup_index, position)
        return ConversionView(
            Raw(position, base, starts), tCrB, acc, sums, totals,
            scales=stages.sS,
            columns=tuple(
                self.columns_of(warpgroup_index, block, position) for block in range(self.blocks)
            ),
            written=written,
            read=read,
            barrier=self.exchange_barrier(warpgroup_index),
            warpgroup=warpgroup_index,
        )  # fmt: skip

    def exchange_of(self, stages, warpgroup_index, position):
        """Returns `written` and `read` of a `ConversionView`."""
        exchange = stages.exchange + warpgroup_index * (EPI_TILE_M * EXCHANGE_PITCH)
        column = self.held.column(position, 0, 0) % EXCHANGE_COLUMNS
        return (
            exchange + self.aligned(first_column(position) * EXCHANGE_PITCH + column),
            exchange + even(first_row(position) * EXCHANGE_PITCH + first_column(position)),
        )

    def aligned(self, offset):
        """Returns the offset of a thread's first column as one of vectors of its `neighbours`."""
        return cute.assume(offset, divby=self.held.neighbours)

    def exchange_barrier(self, warpgroup_index):
        return pipeline.NamedBarrier(BarrierId.WARPGROUP + warpgroup_index, WARPGROUP)

    def span_column(self, warpgroup_index, span):
        """Returns the first column, in a stage, of a span: those of gate come first."""
        part, column = self.place_of(warpgroup_index, span * self.held.joined)
        return part * self.spec.d_tile_n + column

    def columns_of(self, warpgroup_index, block, position):
        """Returns which B a block is of, and a thread's two columns there."""
        inside = block % self.held.joined
        part, first = self.place_of(warpgroup_index, block - inside)
        return part, tuple(first + self.held.column(position, inside, h) for h in range(2))

    def place_of(self, warpgroup_index, block):
        """Returns which B a block is of, and its first column there."""
        of_each = self.blocks // self.spec.graph.accumulators
        part, i = divmod(block, of_each)
        return part, (warpgroup_index * of_each + i) * BLOCK

    def multiply(self, view, ring, state, coords, on_issued):
        return self._accumulate(view, ring, state, coords.k_tiles, on_issued)

    @cute.jit
    def _accumulate(self, view, ring, state, k_tiles, on_issued: cutlass.Constexpr):
        """B's words of a stage are loaded, the first converted, while the one before is multiplied.

        A stage is released when the groups that read it have retired: in the next k-tile.
        """
        release = state.clone()
        fragments, words = self.make_fragments(), self.make_words()
        mma = self.make_swapped_mma()
        # Those in turns have cleared their totals: they may have no k-tile of a tile.
        if cutlass.const_expr(self.spec.k_group > 0 and not self.spec.k_in_turns):
            view.totals.fill(0.0)
        mma.set(warpgroup.Field.ACCUMULATE, False)
        ring.consumer_wait(state)
        self._load_stage(view, words, state.index)
        self._convert(view, fragments[0], words, 0)
        following = self.following(state, k_tiles > 1)
        self._multiply_stage(mma, view, (fragments, words), ring, state, following, None)
        state = self.after(state)
        for i in cutlass.range(1, k_tiles, unroll=1):
            following = self.following(state, i + 1 < k_tiles)
            self._multiply_stage(
                mma, view, (fragments, words), ring, state, following,
                partial(self.release, ring, release),
            )  # fmt: skip
            state = self.after(state)
            release = self.after(release)
        on_issued()
        warpgroup.wait_group(0)
        self.release(ring, release)
        return state

    def following(self, state, exists):
        """Returns that of a warpgroup's next stage of a tile; `state` where it has no more."""
        return either(exists, self.after(state), state)

    def release(self, ring, state):
        # NOTE: ordinary loads have read the stage, which TMA refills by another proxy.
        cute.arch.fence_proxy("async.shared", space="cta")
        ring.consumer_release(state)

    def make_fragments(self):
        """Returns sets of registers for B as wgmma reads it, each 16 of a set's K."""
        s, mma = self.spec, self.make_swapped_mma()
        shape = mma.get_slice(0).partition_shape_A((s.converted_columns, s.mma_k))
        dtype = TFloat32 if s.rounds_operands else CUTE_DTYPE[s.a_dtype]
        make = partial(cute.make_rmem_tensor, shape, dtype)
        return [[make() for _ in range(self.loads.k // s.mma_k)] for _ in range(SETS)]

    def make_words(self):
        """Returns registers for B's numbers in a stage, as they are loaded."""
        count = len(self.spans) * (self.spec.tile_k // self.loads.k) * self.loads.words
        return cute.make_rmem_tensor((count,), Uint32)

    def _multiply_stage(self, mma, view, registers, ring, state, following, release_previous):
        """Multiplies a stage whose words are there, and loads those of the following one.

        What is loaded together first has been converted before; here that of the following stage
        is, which is waited for. `release_previous` is called once all wgmmas of the stage before
        have retired.
        """
        fragments, words = registers
        self.before_read()
        # Asked long before it is needed, as the answer takes time. Not of few stages: of two the
        # following one is that before, not released yet, and of three it has just begun to load.
        many = self.spec.num_stages > 3 * self.step
        there = ring.consumer_try_wait(following) if many else None
        count, of_sum = self.spec.tile_k // self.loads.k, self.spec.k_group // self.loads.k
        for i in range(count):
            if of_sum and i % of_sum == 0:
                scales = self._scales(view, i // of_sum, state.index)
                mma.set(warpgroup.Field.ACCUMULATE, False)
            self._multiply(mma, view, fragments[i % SETS], i, state.index)
            self._load_following(view, words, ring, i + 1, following, there)
            if release_previous or i:
                warpgroup.wait_group(1)
            if release_previous and i == 0:
                release_previous()
            self._convert(view, fragments[(i + 1) % SETS], words, (i + 1) % count)
            if of_sum and (i + 1) % of_sum == 0:
                warpgroup.wait_group(0)
                self._add_group(view, scales)

    def _multiply(self, mma, view, fragments, group, stage):
        """Multiplies what was loaded `group`-th of a stage."""
        warpgroup.fence()
        for i, fragment in enumerate(fragments):
            tCrB = view.tCrB[None, None, group * len(fragments) + i, stage]
            cute.gemm(mma, view.sums, fragment[None, None, 0], tCrB, view.sums)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    def _load_following(self, view, words, ring, done, stage, there):
        """Loads words of the following stage over those of this one that have been multiplied.

        These are the first `done` of what is loaded together.
        """
        if done == WAIT_AT:
            ring.consumer_wait(stage, there)
            for group in range(done):
                self._load_words(view, words, stage.index, group)
        elif done > WAIT_AT:
            self._load_words(view, words, stage.index, done - 1)

    def _load_stage(self, view, words, stage):
        for group in range(self.spec.tile_k // self.loads.k):
            self._load_words(view, words, stage, group)

    def _load_words(self, view, words, stage, group):
        """Loads what is loaded together `group`-th."""
        nbytes = DTYPES[self.spec.b_dtype].nbytes(self.spec.tile_n * self.spec.tile_k)
        address = view.raw.base + stage * nbytes
        for span in self.spans:
            first = self._first_word(span, group)
            for i, word in enumerate(
                self.loads.load(view.raw, address, span, group * self.loads.k)
            ):
                words[first + i] = word

    def _first_word(self, span, group):
        return (span * (self.spec.tile_k // self.loads.k) + group) * self.loads.words

    def _convert(self, view, fragments, words, group):
        """Widens the words of a stage that were loaded `group`-th."""
        position, joined = view.raw.position, self.held.joined
        for step, fragment in enumerate(fragments):
            registers = cute.recast_tensor(fragment, Uint32)
            for block, i, h in product(range(self.blocks), range(2), range(2)):
                first = self._first_word(block // joined, group)
                word = words[first + self.loads.index(step * self.spec.mma_k, h, i)]
                pairs = self.held.spread(word, position, block % joined, h)
                widened = self.conversion.widen(pairs, self.held.place(h))
                registers[4 * block + 2 * i + h] = widened

    def _scales(self, view, group, stage):
        """Loads a thread's scales of the `group`-th group along K of a stage, two of a block."""
        return [[view.scales[part][x, group, stage] for x in pair] for part, pair in view.columns]

    def _add_group(self, view, scales):
        """Adds the sums of a group along K to the totals, times their scales."""
        values = self.spec.tile_m // 2  # of a block
        for block in range(self.blocks):
            for v in range(values):
                at, scale = block * values + v, scales[block][v // 2 % 2]
                view.totals[at] = cute.math.fma(view.sums[at], scale, view.totals[at])

    def sums(self, view):
        return view.totals

    def settle(self, view):
        """Moves the sums of D transposed to the accumulators of D, 64 rows by 32 columns a time."""
        chunks = self.held.joined * BLOCK // EXCHANGE_COLUMNS
        for row_block in range(self.spec.d_tile_m // EPI_TILE_M):
            for span in self.spans:
                for chunk in range(chunks):
                    self._write(view, row_block, span, chunk, 4 // chunks)
                    view.barrier.arrive_and_wait()
                    self._read(view, row_block, span * chunks + chunk)
                    view.barrier.arrive_and_wait()

    @cute.jit
    def _write(
        self, view, row_block: cutlass.Constexpr, span: cutlass.Constexpr,
        chunk: cutlass.Constexpr, writers: cutlass.Constexpr,
    ):  # fmt: skip
        """Writes rows of D of those columns of a span that one or two of the warps hold."""
        if self.held.chunk(view.raw.position, writers) == chunk:
            self._write_span(view, view.written, row_block, span)

    def _write_span(self, view, written, row_block, span):
        """Writes up to 64 rows of D of a thread's columns of a span, neighbours together."""
        columns = list(product(range(self.held.joined), range(2)))  # block of the span, h
        count = self.held.neighbours
        for i in range(min(EPI_TILE_M, self.spec.tile_m) // 4):
            for first in range(0, len(columns), count):
                vector = cute.make_rmem_tensor((count,), Float32)
                for j, (inside, h) in enumerate(columns[first : first + count]):
                    vector[j] = self._total(view, row_block, span, inside, i, h)
                column = self.held.column(Position(0, 0, 0), *columns[first])
                at = written + (nth_column(0, i) * EXCHANGE_PITCH + column)
                cute.autovec_copy(vector, cute.make_tensor(at, cute.make_layout(count)))

    def _total(self, view, row_block, span, inside, i, h):
        """Returns a thread's sum of its i-th row of a row block."""
        block = span * self.held.joined + inside
        first = block * (self.spec.tile_m // 2) + row_block * (EPI_TILE_M // 2)
        return view.totals[first + i // 2 * 4 + 2 * h + i % 2]

    def _read(self, view, row_block, chunk):
        of_rows, of_chunk = self.spec.columns_per_warpgroup // 2, EXCHANGE_COLUMNS // 2
        first = row_block * of_rows + chunk * of_chunk
        for v in range(0, of_chunk, 2):
            pair = self.read_pair(view.read, v)
            for i in range(2):
                view.acc[first + v + i] = pair[i] * (1 / self.conversion.unit)

    def read_pair(self, read, v):
        """Returns what the exchange has for a thread's v-th value of a chunk, and for the next."""
        row, column = nth_row(0, v // 2 % 2), nth_column(0, v // 4 * 2 + v % 2)
        pair, layout = cute.make_rmem_tensor((2,), Float32), cute.make_layout(2)
        at = read + (row * EXCHANGE_PITCH + column)
        cute.autovec_copy(cute.make_tensor(at, layout), pair)
        return pair
