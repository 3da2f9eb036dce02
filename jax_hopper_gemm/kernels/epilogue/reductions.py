"""Reductions in the epilogue: over rows, over columns, over all; top-k of a row.

A `Reduction` holds constants of the trace. Its `ThreadView` holds a math thread's registers, its
`Fold` those of one tile: see `fold.py`, and a file for each kind.
"""

from cutlass import Float32

from .row_folds import RowMax, RowSum, RowSumExp
from .tile_folds import ColumnSum, Max
from .top_k import TopK

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
        """Returns the `Fold` of a tile."""
        return self.fold(self.spec, self.results, view)


def make_reductions(spec):
    """Returns the graph's reductions, in order; results of top-k of one value and k are one."""
    selections = {}
    for number, result in enumerate(spec.graph.reductions):
        top_k = result.kind.startswith("top_k")
        same = ("top_k", result.value, result.k) if top_k else number
        selections.setdefault(same, []).append(number)
    return [Reduction(spec, tuple(numbers)) for numbers in selections.values()]
