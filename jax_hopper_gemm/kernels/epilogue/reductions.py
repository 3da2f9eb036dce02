"""Reductions in the epilogue: over rows, over columns, over all; top-k of a row.

Values are added while they are in registers, in an order that depends on nothing but their place,
and combined by shuffles; what a tile knows of a row or column is written as a partial result, see
`plan.result_shapes`. No atomics: the same bits on every run.

The loop over subtiles drives one object for each such result:

    begin_tile()
    for i_m in row blocks:
      for i_n in column blocks:
        add(value, v, i_m, i_n)          of every v of the subtile
        -- barrier of the warpgroup --   only where `needs_barrier`
        end_subtile(i_m, i_n, place)
      end_rows(i_m, place)

All of it runs in all 128 threads of a warpgroup and outside of dynamic branches: between
`begin_tile` and the last `end_rows` values are held in registers that the trace names. `place` has
rows, n: extents of D; m: where rows end; row0, column0: of the subtile, in D; batch; tile_n: index
of the tile along N; tiles_n: how many there are.
"""

import math

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import select_

from ...gemm.offsets import element_offset
from ...gemm.spec import EPI_TILE_M
from ...gemm.wgmma_fragment import (
    ROW_LANES,
    WARP_LANES,
    WORD,
    add_columns,
    columns_outside,
    kept_columns,
    largest,
    largest_of_row,
    line_of,
    nth_column,
    order_key,
    over_lanes,
    take,
)
from ..named_barriers import WARPGROUP, BarrierId

LOG2_E = math.log2(math.e)


def shuffle(value, distance):
    """Returns the value of the lane whose number differs by xor."""
    return cute.arch.shuffle_sync_bfly(value, distance)


def select(condition, x, y):
    """Returns x where the condition holds, else y: numbers of y's type."""
    return type(y)(select_(condition, x, y))


def maximum(x, y):
    """Returns the larger; NaN if either is."""
    return cute.arch.fmax(x, y, nan=True)


def plus(x, y):
    """Returns the sum rounded by itself.

    `x + y` may become a fused multiply-add in one kernel and not in another, and so other bits.
    """
    return Float32(
        nvvm.addf(Float32(x).ir_value(), Float32(y).ir_value(), rnd=nvvm.FPRoundingMode.RN)
    )


def finite_or_zero(largest_value):
    """Returns what to subtract before `exp`: an infinity minus itself would be NaN."""
    infinite = maximum(largest_value, -largest_value) == math.inf
    return select(infinite, as_float(0.0), largest_value)


def exp(x):
    """Returns e^x to 2 ulp for x up to 0; `exp2` is one instruction."""
    return cute.math.exp2(x * LOG2_E, fastmath=True)


def as_float(x):
    return Float32(x)


def float_bits(x):
    return Float32(x).bitcast(Int32)


def float_of(bits):
    return bits.bitcast(Float32)


def write_scratch(scratch, at, value):
    cute.arch.store(scratch + at, value, ss="cta")


def read_scratch(scratch, at):
    return cute.arch.load(scratch + at, Float32, ss="cta")


@cute.jit
def write_where(condition, pointer, at, value: cutlass.Constexpr):
    """Writes what `value()` returns; it is asked only where the condition holds."""
    if condition:
        cute.arch.store(pointer + at, value())


class Reduction:
    """The protocol of a reduction, for one `Result` of the graph.

    Attributes:
      identity: what takes the place of elements outside of D, so that they count for nothing.
      rows_count, columns_count: whether rows past M, and columns past N, must be replaced by it;
        where not, their results are written nowhere.
      needs_barrier: whether the warpgroup's threads must meet between the last `add` of a subtile
        and `end_subtile`. A barrier that is there for another reason serves.
    """

    identity = 0.0
    rows_count = False
    columns_count = True
    needs_barrier = False

    def __init__(self, spec, result):
        self.spec = spec
        self.result = result
        self.values = EPI_TILE_M * spec.epi_tile_n // 128  # of a thread's subtile
        self.subtiles_n = spec.d_tile_n // spec.epi_tile_n
        self.subtiles_m = spec.rows_per_warpgroup // EPI_TILE_M

    def partition(self, pointer, warpgroup, thread, scratch):
        """Takes a thread's view.

        Args:
          pointer: the result in global memory.
          warpgroup, thread: index of the math warpgroup, and of the thread in it.
          scratch: (2, 4, epi_tile_n) float32 in shared memory, of this result and warpgroup;
            None where `needs_barrier` is false.
        """
        self.pointer = pointer
        self.warpgroup = warpgroup
        self.thread = thread
        self.warp, self.lane = thread >> 5, thread & 31
        self.quad, self.quad_lane = self.lane >> 2, self.lane & 3
        self.scratch = scratch

    def begin_tile(self):
        """Forgets the last tile."""

    def add(self, value, v, i_m, i_n):
        """Takes the thread's v-th value of subtile (i_m, i_n)."""
        raise NotImplementedError

    def end_subtile(self, i_m, i_n, place):
        """Follows the last `add` of a subtile."""

    def end_rows(self, i_m, place):
        """Follows the last subtile of a block of 64 rows."""

    def row(self, place, of_two):
        """Returns the row of D that the first or second of the thread's rows is."""
        return place.row0 + 16 * self.warp + self.quad + 8 * of_two

    def write_row(self, place, of_two, value, part=0, parts=1):
        """Writes one of `parts` values of a row to result[batch, tile_n, (parts,) row]."""
        row = self.row(place, of_two)
        index = place.batch, place.tile_n, part, row
        at = element_offset(index, (place.tiles_n, parts, place.rows), Int64)
        # A cluster may reach past D by whole tiles.
        inside = (row < place.m) & (place.tile_n < place.tiles_n) & (self.quad_lane == 0)
        write_where(inside, self.pointer, at, lambda: value)


class RowFold(Reduction):
    """One number for each row: in registers along the tile, by shuffles over the quad."""

    def begin_tile(self):
        self.begin_rows()

    def begin_rows(self):
        self.folds = [RowStatistic(self.operation), RowStatistic(self.operation)]

    def add(self, value, v, i_m, i_n):
        self.folds[line_of(v)[0]].add(value)

    def end_rows(self, i_m, place):
        for of_two, fold in enumerate(self.folds):
            self.write_row(place, of_two, fold.value())
        self.begin_rows()


class RowStatistic:
    """The sum or largest value of one row, for nodes of a graph whose rows fit a tile.

    Of a thread's two rows of a block each wants one. `add` takes the thread's values of the row in
    the order of columns; `value` returns the statistic, to all lanes of the quad.
    """

    COMBINE = {"row_sum": plus, "row_max": maximum}
    IDENTITY = {"row_sum": 0.0, "row_max": -math.inf}

    def __init__(self, operation):
        self.combine = self.COMBINE[operation]
        self.identity = self.IDENTITY[operation]
        self.so_far = None

    def add(self, value, counts=None):
        """Takes a value; `counts` says whether it lies in D, None that it does or is `identity`.

        A conditional addition holds fewer registers than one of a masked value: that the compiler
        computes long before it is added.
        """
        first = self.so_far is None
        after = value if first else self.combine(self.so_far, value)
        if counts is not None:
            after = select(counts, after, as_float(self.identity) if first else self.so_far)
        self.so_far = after

    def value(self):
        return over_lanes(self.so_far, ROW_LANES, shuffle, self.combine)


class RowSum(RowFold):
    operation = "row_sum"
    identity = RowStatistic.IDENTITY["row_sum"]


class RowMax(RowFold):
    operation = "row_max"
    identity = RowStatistic.IDENTITY["row_max"]


class RowSumExp(Reduction):
    """Of each row the largest value, and the sum of exp(v - largest).

    The sum is rescaled once a subtile, when the largest value up to there is known. Where that is
    infinite exp(v) is added instead, so -inf alone gives (-inf, 0), and +inf (inf, inf).
    """

    identity = -math.inf

    def begin_tile(self):
        self.pairs = [None, None]
        self.waiting = [[], []]

    def add(self, value, v, i_m, i_n):
        self.waiting[line_of(v)[0]].append(value)
        if sum(map(len, self.waiting)) == self.values:
            self.pairs = [
                self.fold(*of_row) for of_row in zip(self.pairs, self.waiting, strict=True)
            ]
            self.waiting = [[], []]

    def fold(self, pair, values):
        top = values[0]
        for value in values[1:]:
            top = maximum(top, value)
        # Agreed on by the quad for every subtile, although the last would do: no exp moves before
        # a shuffle, so the compiler cannot hold those of all subtiles in registers at once.
        top = over_lanes(top, ROW_LANES, shuffle, maximum)
        if pair is not None:
            top = maximum(top, pair[0])
        base = finite_or_zero(top)
        total = None
        if pair is not None:
            # Exactly 1 where nothing changed, be it infinite; below 1 elsewhere, so 0 stays 0.
            total = pair[1] * select(pair[0] == top, as_float(1.0), exp(pair[0] - top))
        for value in values:
            term = exp(value - base)
            total = term if total is None else plus(total, term)
        return top, total

    def end_rows(self, i_m, place):
        for of_two, (top, total) in enumerate(self.pairs):
            self.write_row(place, of_two, top, 0, 2)
            self.write_row(place, of_two, over_lanes(total, ROW_LANES, shuffle, plus), 1, 2)
        self.pairs = [None, None]


class Max(Reduction):
    """The largest value, a part for each warp's 16 rows of a tile."""

    identity = -math.inf
    rows_count = True

    def begin_tile(self):
        self.so_far = [None, None]  # two chains that do not wait for each other

    def add(self, value, v, i_m, i_n):
        chain = v % 2
        before = self.so_far[chain]
        self.so_far[chain] = value if before is None else maximum(before, value)

    def end_rows(self, i_m, place):
        found = over_lanes(maximum(*self.so_far), WARP_LANES, shuffle, maximum)
        block = (place.row0 >> 4) + self.warp
        blocks = (place.m + 15) >> 4
        index = place.batch, block, place.tile_n
        at = element_offset(index, (blocks, place.tiles_n), Int64)
        inside = (block < blocks) & (place.tile_n < place.tiles_n) & (self.lane == 0)
        write_where(inside, self.pointer, at, lambda: found)
        self.begin_tile()


class ColumnSum(Reduction):
    """Of each column the sum of each 64 rows; over warps through scratch in shared memory.

    The two turns of the scratch alternate by subtile: a subtile's barrier comes after the reads of
    the subtile before it, and so before the next writes to the same turn.
    """

    rows_count = True
    columns_count = False
    needs_barrier = True

    def partition(self, pointer, warpgroup, thread, scratch):
        super().partition(pointer, warpgroup, thread, scratch)
        self.barrier = pipeline.NamedBarrier(BarrierId.WARPGROUP + warpgroup, WARPGROUP)
        self.columns = self.spec.epi_tile_n // 4  # that a thread holds
        self.kept = [nth_column(self.quad_lane, i) for i in kept_columns(self.lane, self.columns)]

    def begin_tile(self):
        self.sums = {}
        self.added = 0

    def add(self, value, v, i_m, i_n):
        _, column = line_of(v)
        held = self.sums.get(column)
        self.sums[column] = value if held is None else plus(held, value)
        self.added += 1
        if self.added == self.values:
            sums = [self.sums[i] for i in range(self.columns)]
            sums = add_columns(sums, self.lane, shuffle, select, plus)
            row = self.turn(i_m, i_n) + self.warp * self.spec.epi_tile_n
            for column, partial in zip(self.kept, sums, strict=True):
                write_scratch(self.scratch, row + column, partial)
            self.begin_tile()

    def turn(self, i_m, i_n):
        """Returns where the scratch of a subtile starts, in elements."""
        return (i_m * self.subtiles_n + i_n) % 2 * 4 * self.spec.epi_tile_n

    def end_subtile(self, i_m, i_n, place):
        turn, width = self.turn(i_m, i_n), self.spec.epi_tile_n

        def over_warps():
            rows = [turn + warp * width for warp in range(4)]
            a, b, c, d = (read_scratch(self.scratch, row + self.thread) for row in rows)
            return plus(plus(a, b), plus(c, d))

        column = place.column0 + self.thread
        inside = (self.thread < width) & (place.row0 < place.m) & (column < place.n)
        blocks = (place.m + 63) >> 6
        at = element_offset((place.batch, place.row0 >> 6, column), (blocks, place.n), Int64)
        write_where(inside, self.pointer, at, over_warps)
        if self.subtiles_m * self.subtiles_n % 2:
            if (i_m, i_n) == (self.subtiles_m - 1, self.subtiles_n - 1):
                # The next tile's first subtile takes the same turn.
                self.barrier.arrive_and_wait()


class TopK(Reduction):
    """The k largest of each row, in order; values, columns or both. One tile holds a whole row.

    Equal values come in the order of their columns; the order is that of `order_key`. k must not
    exceed N.

    Attributes:
      leader: the object that selects, if it is another one of the same value and k.
    """

    identity = -math.inf
    columns_count = False  # it looks at N itself

    def __init__(self, spec, result, leader=None):
        super().__init__(spec, result)
        self.leader = leader or self
        self.columns = spec.d_tile_n // 4  # of a row that a thread holds

    def partition(self, pointer, warpgroup, thread, scratch):
        super().partition(pointer, warpgroup, thread, scratch)
        if self.leader is self:
            self.value_pointer = self.index_pointer = None
        if self.result.kind == "top_k_values":
            self.leader.value_pointer = pointer
        else:
            self.leader.index_pointer = pointer

    def begin_tile(self):
        self.keys = [{}, {}]

    def add(self, value, v, i_m, i_n):
        if self.leader is self:
            of_two, i = line_of(v)
            column = i_n * (self.spec.epi_tile_n // 4) + i
            self.keys[of_two][column] = order_key(float_bits(value))

    def end_rows(self, i_m, place):
        if self.leader is self:
            keys = [[row[i] for i in range(self.columns)] for row in self.keys]
            self.select_rows(keys, place)
            self.begin_tile()

    @cute.jit
    def select_rows(self, keys, place):
        """Selects and writes the k largest of a thread's two rows.

        A round finds the first of what is left, first in each lane, then in the quad; bits say
        what has been taken.
        """
        words = -(-self.columns // WORD)
        outside = columns_outside(self.quad_lane, place.n, self.columns, select)
        taken = cute.make_rmem_tensor((words, 2), Int32)
        for word in cutlass.range_constexpr(words):
            for of_two in cutlass.range_constexpr(2):
                taken[word, of_two] = outside[word]
        for round_ in cutlass.range(self.result.k, unroll=1):
            for of_two in cutlass.range_constexpr(2):
                self.select_one(keys[of_two], taken, of_two, round_, place)

    def select_one(self, keys, taken, of_two, round_, place):
        words = range(-(-self.columns // WORD))
        bits = [taken[word, of_two] for word in words]
        key, i = largest(keys, bits, select)
        my_column = nth_column(self.quad_lane, i)
        key, column = largest_of_row(key, my_column, shuffle, select)
        for word, new in enumerate(take(bits, i, column == my_column, select)):
            taken[word, of_two] = new
        row = self.row(place, of_two)
        at = element_offset((place.batch, row, round_), (place.rows, self.result.k), Int64)
        inside = (row < place.m) & (place.tile_n == 0)  # a cluster may reach past D
        if self.value_pointer is not None:
            mine = inside & (self.quad_lane == 0)
            write_where(mine, self.value_pointer, at, lambda: float_of(order_key(key)))
        if self.index_pointer is not None:
            mine = inside & (self.quad_lane == 1)
            write_where(mine, self.index_pointer, at, lambda: column)


REDUCTIONS = {
    "row_sum": RowSum,
    "row_max": RowMax,
    "row_sumexp": RowSumExp,
    "column_sum": ColumnSum,
    "max": Max,
    "top_k_values": TopK,
    "top_k_indices": TopK,
}


def make_reductions(spec):
    """Returns the object of each of the graph's reductions, in order.

    Results of top-k with one value and k share a selection.
    """
    made, leaders = [], {}
    for result in spec.graph.reductions:
        if result.kind.startswith("top_k"):
            selection = result.value, result.k
            made.append(TopK(spec, result, leaders.get(selection)))
            leaders.setdefault(selection, made[-1])
        else:
            made.append(REDUCTIONS[result.kind](spec, result))
    return made
