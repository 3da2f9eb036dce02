"""The k largest of each row, in order: values, columns or both."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...gemm.offsets import element_offset
from ...gemm.wgmma_fragment import (
    WORD,
    columns_outside,
    largest,
    largest_of_row,
    line_of,
    nth_column,
    order_key,
    take,
)
from . import instructions as gpu
from .fold import Fold


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
        self.keys[of_two][column] = order_key(gpu.float_bits(value))

    def end_rows(self, i_m, coords):
        keys = [[row[i] for i in range(self.columns)] for row in self.keys]
        self.select_rows(keys, coords)
        self.restart()

    @cute.jit
    def select_rows(self, keys, coords):
        """Selects and writes the k largest of a thread's two rows.

        A round finds the first that is not taken yet, first in each lane, then in the quad.
        """
        words = -(-self.columns // WORD)
        outside = columns_outside(self.view.quad_lane, coords.n, self.columns, gpu.select)
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
        key, i = largest(keys, bits, gpu.select)
        my_column = nth_column(self.view.quad_lane, i)
        key, column = largest_of_row(key, my_column, gpu.shuffle, gpu.select)
        for word, new in enumerate(take(bits, i, column == my_column, gpu.select)):
            taken[word, of_two] = new
        row = self.row(coords, of_two)
        at = element_offset((coords.batch, row, round_), (coords.rows, self.results[0].k), Int64)
        inside = (row < coords.m) & (coords.tile_n == 0)  # a cluster may reach past D
        written = zip(self.results, self.view.pointers, strict=True)
        for result, pointer in sorted(written, key=lambda pair: pair[0].kind, reverse=True):
            if result.kind == "top_k_values":
                mine = inside & (self.view.quad_lane == 0)
                gpu.write_where(mine, pointer, at, lambda: gpu.float_of(order_key(key)))
            else:
                mine = inside & (self.view.quad_lane == 1)
                gpu.write_where(mine, pointer, at, lambda: column)
