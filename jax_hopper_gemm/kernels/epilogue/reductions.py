"""Reductions in the epilogue: over rows, over columns, over all; top-k of a row.

A `Reduction` holds constants of the trace. Its `ThreadView` holds a math thread's registers, its
`Fold`, a class for each kind, those of one tile: see `fold.py`.
"""

import math
from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...gemm import wgmma_fragment as fragment
from ...gemm.offsets import element_offset
from ...gemm.wgmma_fragment import ROW_LANES, WARP_LANES, WORD, line_of, nth_column, over_lanes
from . import instructions as gpu
from .fold import Fold, RowStatistic


class RowFold(Fold):
    """One number for each row."""

    def restart(self):
        self.rows = [RowStatistic(self.operation), RowStatistic(self.operation)]

    def add(self, value, v, i_m, i_n):
        self.rows[line_of(v)[0]].add(value)

    def end_rows(self, i_m, coords):
        for of_two, row in enumerate(self.rows):
            self.write_row(coords, of_two, row.value())
        self.restart()


class RowSum(RowFold):
    operation = "row_sum"
    identity = RowStatistic.IDENTITY["row_sum"]


class RowMax(RowFold):
    operation = "row_max"
    identity = RowStatistic.IDENTITY["row_max"]


class RowSumExp(Fold):
    """Of each row the largest value, and the sum of exp(v - largest).

    The sum is rescaled once a subtile, when the largest value up to there is known. Where that is
    infinite exp(v) is added instead, so -inf alone gives (-inf, 0), and +inf (inf, inf).
    """

    identity = -math.inf

    def restart(self):
        self.pairs = [None, None]
        self.waiting = [[], []]

    def add(self, value, v, i_m, i_n):
        self.waiting[line_of(v)[0]].append(value)
        if sum(map(len, self.waiting)) == self.values:
            both = zip(self.pairs, self.waiting, strict=True)
            self.pairs = [self.with_subtile(*of_row) for of_row in both]
            self.waiting = [[], []]

    def with_subtile(self, pair, values):
        """Returns a row's pair, which is None at first, with a subtile's values added."""
        top = values[0]
        for value in values[1:]:
            top = gpu.maximum(top, value)
        # NOTE: agreed on by the quad for every subtile, although the last would do: no exp moves
        # before a shuffle, so the compiler cannot hold those of all subtiles in registers at once.
        top = over_lanes(top, ROW_LANES, gpu.shuffle, gpu.maximum)
        if pair is not None:
            top = gpu.maximum(top, pair[0])
        base = gpu.finite_or_zero(top)
        total = None
        if pair is not None:
            # Exactly 1 where nothing changed, be it infinite; below 1 elsewhere, so 0 stays 0.
            one, shrunk = gpu.as_float(1.0), gpu.exp(pair[0] - top)
            total = pair[1] * gpu.select(pair[0] == top, one, shrunk)
        for value in values:
            term = gpu.exp(value - base)
            total = term if total is None else gpu.plus(total, term)
        return top, total

    def end_rows(self, i_m, coords):
        for of_two, (top, total) in enumerate(self.pairs):
            self.write_row(coords, of_two, top, 0, 2)
            total = over_lanes(total, ROW_LANES, gpu.shuffle, gpu.plus)
            self.write_row(coords, of_two, total, 1, 2)
        self.restart()


class Max(Fold):
    """The largest value, a part for each warp's 16 rows of a tile."""

    identity = -math.inf
    rows_count = True

    def restart(self):
        self.so_far = [None, None]  # two chains that do not wait for each other

    def add(self, value, v, i_m, i_n):
        chain = v % 2
        before = self.so_far[chain]
        self.so_far[chain] = value if before is None else gpu.maximum(before, value)

    def end_rows(self, i_m, coords):
        top = over_lanes(gpu.maximum(*self.so_far), WARP_LANES, gpu.shuffle, gpu.maximum)
        block = (coords.row0 >> 4) + self.view.warp
        blocks = (coords.m + 15) >> 4
        index = coords.batch, block, coords.tile_n
        at = element_offset(index, (blocks, coords.tiles_n), Int64)
        inside = (block < blocks) & (coords.tile_n < coords.tiles_n) & (self.view.lane == 0)
        gpu.write_where(inside, self.view.pointers[0], at, lambda: top)
        self.restart()


class ColumnSum(Fold):
    """Of each column the sum of each 64 rows; over warps through scratch in shared memory.

    The two turns of the scratch alternate by subtile: a subtile's barrier comes after the reads of
    the subtile before it, and so before the next writes to the same turn.
    """

    rows_count = True
    columns_count = False
    needs_barrier = True

    @classmethod
    def thread_view(cls, spec, *args):
        view = super().thread_view(spec, *args)
        kept = fragment.kept_columns(view.lane, spec.epi_tile_n // 4)
        return replace(view, columns=tuple(nth_column(view.quad_lane, i) for i in kept))

    def restart(self):
        self.sums = {}
        self.added = 0

    def add(self, value, v, i_m, i_n):
        _, column = line_of(v)
        so_far = self.sums.get(column)
        self.sums[column] = value if so_far is None else gpu.plus(so_far, value)
        self.added += 1
        if self.added == self.values:
            sums = [self.sums[i] for i in range(self.spec.epi_tile_n // 4)]
            sums = fragment.add_columns(sums, self.view.lane, gpu.shuffle, gpu.select, gpu.plus)
            row = self.turn(i_m, i_n) + self.view.warp * self.spec.epi_tile_n
            for column, partial in zip(self.view.columns, sums, strict=True):
                gpu.write_scratch(self.view.scratch, row + column, partial)
            self.restart()

    def turn(self, i_m, i_n):
        """Returns where the scratch of a subtile starts, in elements."""
        return (i_m * self.subtiles_n + i_n) % 2 * 4 * self.spec.epi_tile_n

    def end_subtile(self, i_m, i_n, coords):
        turn, width, thread = self.turn(i_m, i_n), self.spec.epi_tile_n, self.view.thread

        def over_warps():
            rows = [turn + warp * width for warp in range(4)]
            a, b, c, d = (gpu.read_scratch(self.view.scratch, row + thread) for row in rows)
            return gpu.plus(gpu.plus(a, b), gpu.plus(c, d))

        column = coords.column0 + thread
        inside = (thread < width) & (coords.row0 < coords.m) & (column < coords.n)
        blocks = (coords.m + 63) >> 6
        at = element_offset((coords.batch, coords.row0 >> 6, column), (blocks, coords.n), Int64)
        gpu.write_where(inside, self.view.pointers[0], at, over_warps)
        if self.subtiles_m * self.subtiles_n % 2:
            if (i_m, i_n) == (self.subtiles_m - 1, self.subtiles_n - 1):
                # NOTE: the next tile's first subtile takes the same turn.
                self.view.barrier.arrive_and_wait()


class TopK(Fold):
    """One selection, for results of the same value and k. One tile holds a whole row.

    Equal values come in the order of their columns; the order is that of `order_key`. k must not
    exceed N.
    """

    identity = -math.inf
    columns_count = False  # it looks at N itself

    def restart(self):
        self.keys = [{}, {}]
        self.columns = self.spec.d_tile_n // 4  # of a row that a thread holds

    def add(self, value, v, i_m, i_n):
        of_two, i = line_of(v)
        column = i_n * (self.spec.epi_tile_n // 4) + i
        self.keys[of_two][column] = fragment.order_key(gpu.float_bits(value))

    def end_rows(self, i_m, coords):
        keys = [[row[i] for i in range(self.columns)] for row in self.keys]
        self.select_rows(keys, coords)
        self.restart()

    @cute.jit
    def select_rows(self, keys, coords):
        """Writes the k largest of two rows; a round takes one of each lane, then of the quad."""
        words = -(-self.columns // WORD)
        outside = fragment.columns_outside(self.view.quad_lane, coords.n, self.columns, gpu.select)
        taken = cute.make_rmem_tensor((words, 2), Int32)  # a bit for each column, by row
        for word in cutlass.range_constexpr(words):
            for of_two in cutlass.range_constexpr(2):
                taken[word, of_two] = outside[word]
        for round_ in cutlass.range(self.results[0].k, unroll=1):
            for of_two in cutlass.range_constexpr(2):
                self.select_one(keys[of_two], taken, of_two, round_, coords)

    def select_one(self, keys, taken, of_two, round_, coords):
        words = range(-(-self.columns // WORD))
        bits = [taken[word, of_two] for word in words]
        key, i = fragment.largest(keys, bits, gpu.select)
        my_column = nth_column(self.view.quad_lane, i)
        key, column = fragment.largest_of_row(key, my_column, gpu.shuffle, gpu.select)
        for word, new in enumerate(fragment.take(bits, i, column == my_column, gpu.select)):
            taken[word, of_two] = new
        row = self.row(coords, of_two)
        at = element_offset((coords.batch, row, round_), (coords.rows, self.results[0].k), Int64)
        inside = (row < coords.m) & (coords.tile_n == 0)  # a cluster may reach past D
        written = zip(self.results, self.view.pointers, strict=True)
        for result, pointer in sorted(written, key=lambda pair: pair[0].kind, reverse=True):
            if result.kind == "top_k_values":
                mine = inside & (self.view.quad_lane == 0)
                gpu.write_where(mine, pointer, at, lambda: gpu.float_of(fragment.order_key(key)))
            else:
                mine = inside & (self.view.quad_lane == 1)
                gpu.write_where(mine, pointer, at, lambda: column)


FOLDS = {
    "row_sum": RowSum,
    "row_max": RowMax,
    "row_sumexp": RowSumExp,
    "column_sum": ColumnSum,
    "max": Max,
    "top_k_values": TopK,
    "top_k_indices": TopK,
}


class Reduction:
    """One reduction of a value; a top-k may have two results."""

    def __init__(self, spec, numbers):
        self.spec = spec
        self.numbers = numbers  # of its results among those of the graph that are no matrices
        self.results = tuple(spec.graph.reductions[number] for number in numbers)
        self.fold = FOLDS[self.results[0].kind]
        self.needs_barrier = self.fold.needs_barrier
        self.scratch_floats = 2 * 4 * spec.epi_tile_n  # of a warpgroup

    def allocate(self, memory):
        """Returns a pointer to the scratch of all math warpgroups; None where it needs none."""
        if not self.needs_barrier:
            return None
        return memory.pointer(Float32, 4 * self.scratch_floats * self.spec.math_warpgroups, 16)

    def thread_view(self, pointers, warpgroup, thread, scratch, barrier):
        """Returns a math thread's `ThreadView`; `pointers` and `scratch` are those of all."""
        if scratch is not None:
            scratch = scratch + warpgroup * self.scratch_floats
        mine = tuple(pointers[number] for number in self.numbers)
        return self.fold.thread_view(self.spec, mine, thread, scratch, barrier)

    def begin_tile(self, view):
        return self.fold(self.spec, self.results, view)


def make_reductions(spec):
    """Returns the graph's reductions, in order; results of top-k of one value and k are one."""
    selections = {}
    for number, result in enumerate(spec.graph.reductions):
        top_k = result.kind.startswith("top_k")
        same = ("top_k", result.value, result.k) if top_k else number
        selections.setdefault(same, []).append(number)
    return [Reduction(spec, tuple(numbers)) for numbers in selections.values()]
