"""Sums, largest values and sums of exponentials of each row: in registers, then over a quad."""

import math

from ...gemm.wgmma_fragment import ROW_LANES, line_of, over_lanes
from . import instructions as gpu
from .fold import Fold


class RowStatistic:
    """The sum or largest value of one row.

    Also for nodes of a graph whose rows fit a tile. Of a thread's two rows of a block each needs
    one. `add` takes the thread's values of the row in the order of columns; `value` returns the
    statistic, to all lanes of the quad.
    """

    IDENTITY = {"row_sum": 0.0, "row_max": -math.inf}

    def __init__(self, operation):
        self.combine = {"row_sum": gpu.plus, "row_max": gpu.maximum}[operation]
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
            before = gpu.as_float(self.identity) if first else self.so_far
            after = gpu.select(counts, after, before)
        self.so_far = after

    def value(self):
        return over_lanes(self.so_far, ROW_LANES, gpu.shuffle, self.combine)


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
