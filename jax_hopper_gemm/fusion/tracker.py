"""Tracker of accumulators through a program: the graph value and the axes of each variable.

A variable that kernels can compute is *tracked*: at index (i, j, ...) it equals a value of the
graph at the place in D that its axes name. A variable that depends on no accumulator is *free*; it
is placed when it meets a tracked one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..gemm.epilogue_graph import MAX_TOP_K, Result
from . import op_table
from .axes import REDUCTIONS, Axes, Place, is_layout, moved
from .flatten import Atom, Equation, Program, Variable
from .graph_builder import Builder
from .op_table import Uncovered
from .operand_values import FreeVariables
from .segments import GroupedProgram


@dataclass(frozen=True)
class Tracked:
    """A variable as a value of the graph."""

    value: int
    axes: Axes


@dataclass(frozen=True)
class Reduction:
    """A reduction of a matrix: the kernel computes partial results and XLA combines them.

    Or what is whole, the k largest of each row or their columns: axis "?" counts them.
    """

    result: Result  # of the kernel, of the reduced value
    axes: Axes  # of the variable; XLA reduces the other letters that the kernel leaves
    negated: bool = False  # whether it is a minimum, computed as the maximum of the negated value


@dataclass(frozen=True)
class SumExp:
    """A variable that is sum(exp(x - center)) over the columns of each row."""

    value: int  # x
    axes: Axes  # of the variable
    center: Atom  # constant along each row
    columns: tuple[int, ...]  # the summed dimensions, if `center` has as many dimensions as x


@dataclass(frozen=True)
class Stack:
    """A variable that holds two matrices side by side; axis "?" tells them apart."""

    values: tuple[int, int]
    axes: Axes


class Tracker:
    """The role of each variable of a program."""

    def __init__(
        self, program: Program, place: Place, builder: Builder, grouped: GroupedProgram | None
    ):
        self.place, self.builder, self.grouped = place, builder, grouped
        self.tracked: dict[Variable, Tracked] = {}  # those that kernels can compute
        # Those that come from results of the kernel.
        self.results: dict[Variable, Reduction | SumExp | Stack] = {}
        # For each that depends on an accumulator but is not tracked, what operations prevent it.
        self.uncovered: dict[Variable, tuple[str, ...]] = {}
        self.producers: dict[Variable, Equation] = {}  # of each computed variable
        self._free = FreeVariables(place, builder, grouped)
        for i, variable in enumerate(program.inputs):
            if i < builder.num_accumulators:
                axes = self._without_units(tuple(place.out), variable)
                self.tracked[variable] = Tracked(i, axes)
            else:
                self._free.add_operand(variable)
        for equation in program.equations:
            self._follow(equation)

    def depends(self, atom: Atom) -> bool:
        """Whether the value of an atom depends on an accumulator."""
        return atom not in self._free

    def is_matrix(self, value: int) -> bool:
        """Whether a value has an element for each element of D."""
        return self.place.long <= self.builder.letters(value)

    def may_store(self, variable: Variable) -> bool:
        """Whether a matrix stored by a kernel equals the variable in all rows."""
        return self.grouped is None or self.grouped.vanishes(variable)

    def _follow(self, equation: Equation) -> None:
        self.producers.update((variable, equation) for variable in equation.outputs)
        if not any(map(self.depends, equation.inputs)):
            self._free.follow(equation)
            return
        if all(not self.depends(x) or x in self.tracked for x in equation.inputs):
            try:
                for variable, tracked in zip(equation.outputs, self._track(equation), strict=False):
                    if tracked:
                        axes = self._without_units(tracked.axes, variable)
                        self.tracked[variable] = Tracked(tracked.value, axes)
            except Uncovered as reason:
                names = (str(reason), equation.name)
                self.uncovered.update((v, names) for v in equation.outputs)
        if equation.name == "reduce_sum" and not self.grouped:
            self._note_sum_of_exp(equation, *equation.outputs)

    def _without_units(self, axes: Axes, variable: Variable) -> Axes:
        """Returns axes with None for dimensions of extent 1."""
        return tuple(
            axis if extent > 1 else None for axis, extent in zip(axes, variable.shape, strict=True)
        )

    # Operations on tracked variables.

    def _track(self, equation: Equation) -> list[Tracked | None]:
        """Returns the tracked outputs; None for an output that only a result of the kernel holds.

        Raises Uncovered where no kernel computes the equation.
        """
        name = equation.name
        if equation.kept:
            raise Uncovered(name)
        if is_layout(equation):
            (x, *_) = equation.inputs
            return [Tracked(self._of(x).value, moved(equation, self._of(x).axes))]
        if self.grouped and self.grouped.is_segment_mask(equation):  # what a kernel stores has them
            tracked = self._of(equation.inputs[0])
            self.place.check_rows(equation, tracked.axes)
            return [tracked]
        if name == "optimization_barrier":
            inputs = equation.inputs
            return [self.tracked.get(x) if isinstance(x, Variable) else None for x in inputs]
        if name in REDUCTIONS:
            return [self._reduce(equation)]
        if name == "top_k":
            return self._top_k(equation)
        if name in ("stack", "concatenate"):
            return self._stack(equation)
        axes = self._common_axes(equation)
        values = [
            self._of(atom).value
            if self.depends(atom)
            else self._free.value(atom, axes if atom.shape else ())
            for atom in equation.inputs
        ]
        return [Tracked(op_table.apply(self.builder, equation, values), axes)]

    def _of(self, atom: Atom) -> Tracked:
        assert isinstance(atom, Variable)
        return self.tracked[atom]

    def _common_axes(self, equation: Equation) -> Axes:
        """Returns the axes at which the inputs of an elementwise operation meet.

        A dimension that only free inputs vary along is D's of the same position and extent. Raises
        Uncovered where they meet at different places of D.
        """
        if not op_table.covered(equation.name) or len(equation.outputs) != 1:
            raise Uncovered(equation.name)
        place, shape = self.place, equation.outputs[0].shape
        axes: list[str | None] = [None] * len(shape)
        for atom in equation.inputs:
            if atom.shape and self.depends(atom):
                for d, axis in enumerate(self._of(atom).axes):
                    if axis and axes[d] not in (None, axis):
                        raise Uncovered(equation.name)
                    axes[d] = axis or axes[d]
        for atom in equation.inputs:
            if atom.shape and not self.depends(atom):
                for d, varies in enumerate(self._free.varies(atom)):
                    if varies and axes[d] is None:
                        if len(shape) != len(place.out) or shape[d] != place.extents[place.out[d]]:
                            raise Uncovered(equation.name)
                        axes[d] = place.out[d]
        letters = [axis for axis in axes if axis]
        if len(set(letters)) < len(letters):
            raise Uncovered(equation.name)
        return tuple(axes)

    # Operations that are results of the kernel.

    def _reduce(self, equation: Equation) -> Tracked | None:
        (atom, *_), (out,) = equation.inputs, equation.outputs
        x, name, place = self._of(atom), equation.name, self.place
        dims = {int(d) for d in equation.params["axes"]}
        axes = tuple(axis for d, axis in enumerate(x.axes) if d not in dims)
        if not self.is_matrix(x.value):
            return None
        reduced = {axis for d in dims if (axis := x.axes[d])}
        repeated = any(x.axes[d] is None and atom.shape[d] > 1 for d in dims)
        rows, columns = (bool(x) and x <= reduced for x in (place.m, place.n))
        if name == "reduce_sum":
            kind = "column_sum" if rows else "row_sum" if columns else None
        else:
            kind = "max" if place.long <= reduced else "row_max" if columns else None
        if kind is None or repeated or atom.dtype.name not in op_table.NUMBERS:
            raise Uncovered(name)
        negated = name == "reduce_min"
        value = self.builder.node("neg", x.value) if negated else x.value
        # A kernel of a ragged product reduces one group at a time; blocks of rows cross groups.
        along_rows, grouped = kind in ("row_sum", "row_max"), self.grouped
        if not grouped or (along_rows and grouped.reducible and grouped.vanishes(atom)):
            self.results[out] = Reduction(Result(kind, value), axes, negated)
        elif not (along_rows and place.row_fits):
            raise Uncovered(name)
        if not place.row_fits or reduced != place.n:
            return None
        return Tracked(self._free.row_statistic(equation, x.value), axes)

    def _top_k(self, equation: Equation) -> list[Tracked | None]:
        (atom, *_), place = equation.inputs, self.place
        x, k = self._of(atom), equation.params["k"]
        last = len(atom.shape) - 1
        axis = equation.params.get("axis", last)
        if (
            not self.is_matrix(x.value)
            or self.grouped
            or atom.dtype.name not in op_table.NUMBERS
            or axis not in (last, -1)
            or place.n != {x.axes[last]}
            or not place.row_fits
            or not 1 <= k <= MAX_TOP_K
        ):
            raise Uncovered("top_k")
        values, indices = equation.outputs
        axes = (*x.axes[:-1], "?")
        self.results[values] = Reduction(Result("top_k_values", x.value, k=k), axes)
        self.results[indices] = Reduction(Result("top_k_indices", x.value, k=k), axes)
        return [None, None]

    def _stack(self, equation: Equation) -> list[Tracked | None]:
        """Notes two matrices of one array, (..., M, 2, N)."""
        (out,), name = equation.outputs, equation.name
        dimension = int(equation.params["axis" if name == "stack" else "dimension"])
        pair = [self.tracked.get(x) for x in equation.inputs if isinstance(x, Variable)]
        if (
            len(pair) != 2
            or len(equation.inputs) != 2
            or not all(pair)
            or (name == "concatenate" and {x.shape[dimension] for x in equation.inputs} != {1})
            or out.dtype.name not in op_table.NUMBERS
        ):
            raise Uncovered(name)
        first, second = (tracked for tracked in pair if tracked)
        axes = list(first.axes)
        if name == "stack":
            axes.insert(dimension, "?")
        else:
            axes[dimension] = "?"
        plane = next((i for i, x in enumerate(self.place.out) if x in self.place.all_n), 0)
        wanted = (*self.place.out[:plane], "?", *self.place.out[plane:])
        if (
            first.axes != second.axes
            or not self.place.compact
            or not self.place.all_n
            or tuple(axes) != self._without_units(wanted, out)
            or not (self.is_matrix(first.value) and self.is_matrix(second.value))
        ):
            raise Uncovered(name)
        self.results[out] = Stack((first.value, second.value), wanted)
        return [None]

    def _note_sum_of_exp(self, equation: Equation, out: Variable) -> None:
        """Notes sum(exp(x - center)), if the center comes from an accumulator.

        Kernels that do not hold whole rows cannot subtract the center; they use the largest x of
        a tile instead, and XLA corrects the sum.
        """
        exponential = self._source(equation.inputs[0], "exp")
        difference = exponential and self._source(exponential.inputs[0], "sub")
        if difference is None or out.dtype.name != "float32":
            return
        x, center = difference.inputs
        if not isinstance(x, Variable) or x not in self.tracked or not self.depends(center):
            return
        tracked, place = self.tracked[x], self.place
        dims = tuple(sorted(int(d) for d in equation.params["axes"]))
        summed = {tracked.axes[d] for d in dims} - {None}
        if (
            x.shape != difference.outputs[0].shape
            or x.dtype.name != "float32"
            or not self.is_matrix(tracked.value)
            or summed != place.n
            or not place.n
            or not self._constant_along(center, dims)
        ):
            return
        axes = tuple(axis for d, axis in enumerate(tracked.axes) if d not in dims)
        self.results[out] = SumExp(tracked.value, axes, center, dims)

    def _source(self, atom: Atom, name: str) -> Equation | None:
        """Returns the equation of this name that computes a float32 variable."""
        while isinstance(atom, Variable) and (equation := self.producers.get(atom)):
            if equation.name == name and atom.dtype.name == "float32":
                return equation
            if equation.name not in op_table.SAME:
                return None
            atom = equation.inputs[0]
        return None

    def _constant_along(self, atom: Atom, dims: Sequence[int]) -> bool:
        dims = [d for d in dims if atom.shape and atom.shape[d] > 1]
        if not dims or not isinstance(atom, Variable):
            return True
        if atom in self.tracked:
            return all(self.tracked[atom].axes[d] is None for d in dims)
        equation = self.producers.get(atom)
        if equation is None:
            return False
        if equation.name in op_table.SAME:
            return self._constant_along(equation.inputs[0], dims)
        if equation.name != "broadcast_in_dim":
            return False
        (x, *_), at = equation.inputs, [int(d) for d in equation.params["broadcast_dimensions"]]
        return all(d not in at or x.shape[at.index(d)] == 1 for d in dims)
