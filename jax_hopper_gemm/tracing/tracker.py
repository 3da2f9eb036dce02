"""Follows the accumulators through a program: which graph value each variable is, and how it lies.

A variable that kernels can compute is *tracked*: at index (i, j, ...) it equals a value of the
graph at the place in D that its axes say. An axis is a letter of D, or None where the variable is
constant along that dimension. A variable that depends on no accumulator is *free*. It has no
place until it meets a tracked one, and is then built from the operands, at that one's axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from ..epilogue import MAX_TOP_K, Operand
from . import elementwise
from .builder import Builder, Leaf
from .elementwise import Uncovered
from .flatten import Atom, Constant, Equation, Program, Variable

Axes = tuple[str | None, ...]

_REDUCTIONS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min"}
_LAYOUT = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose")


def _is_layout(equation: Equation) -> bool:
    """Whether an equation moves elements and computes nothing: a sum of one element does not."""
    if equation.name in _REDUCTIONS:
        return all(equation.inputs[0].shape[d] == 1 for d in equation.params["axes"])
    return equation.name in _LAYOUT


@dataclass(frozen=True)
class Tracked:
    """A variable as a value of the graph."""

    value: int
    axes: Axes


@dataclass(frozen=True)
class Reduction:
    """A variable that a kernel reduces a matrix to, in parts that XLA puts together.

    Attributes:
      kind: of `epilogue.Result`.
      value: what is reduced.
      axes: of the variable; letters of D that are neither here nor reduced by the kernel, XLA
        reduces.
      negated: whether it is the minimum, found as the maximum of what is negated.
    """

    kind: Literal["row_sum", "row_max", "column_sum", "max"]
    value: int
    axes: Axes
    negated: bool = False


@dataclass(frozen=True)
class SumExp:
    """A variable that is sum(exp(x - center)) over the columns of each row.

    Attributes:
      value: x.
      axes: of the variable.
      center: constant along each row.
      columns: the dimensions of `center`, if it has as many as x, that the sum goes over.
    """

    value: int
    axes: Axes
    center: Atom
    columns: tuple[int, ...]


@dataclass(frozen=True)
class TopK:
    """A variable that holds the k largest of each row, or where they are; axis "?" counts them."""

    kind: Literal["top_k_values", "top_k_indices"]
    value: int
    axes: Axes
    k: int


@dataclass(frozen=True)
class Stack:
    """A variable that holds two matrices side by side; axis "?" tells them apart."""

    values: tuple[int, int]
    axes: Axes


class Place:
    """The letters of D: what they mean and how far they go."""

    def __init__(self, out: str, m: str, n: str, shape: Sequence[int], tile_limit: int):
        self.out = out
        self.extents = dict(zip(out, shape, strict=True))
        self.size = prod(shape)
        self.long = frozenset(letter for letter in out if self.extents[letter] > 1)
        self.m, self.n = self.long & set(m), self.long & set(n)
        self.letters_m, self.columns = m, n
        self.row_fits = prod(self.extents[letter] for letter in n) <= tile_limit
        batch = "".join(letter for letter in out if letter not in m + n)
        self.compact = out == batch + m + n  # matrices are dense: there is room for two planes

    def kind(self, labels: str) -> Literal["scalar", "row", "column", "matrix"]:
        along_m, along_n = not self.m.isdisjoint(labels), not self.n.isdisjoint(labels)
        if along_m and along_n:
            return "matrix"
        return "row" if along_n else "column" if along_m else "scalar"


@dataclass
class Tracker:
    """What is known of each variable of a program.

    Attributes:
      tracked, free: see above; `free` says along which dimensions a variable may vary.
      reductions, sums_of_exp, top_k, stacks: variables that results of the kernel give.
      uncovered: why a variable that depends on an accumulator is not tracked: operations' names.
      producers: the equation of each computed variable.
    """

    place: Place
    builder: Builder
    tracked: dict[Variable, Tracked] = field(default_factory=dict)
    free: dict[Variable, tuple[bool, ...]] = field(default_factory=dict)
    reductions: dict[Variable, Reduction] = field(default_factory=dict)
    sums_of_exp: dict[Variable, SumExp] = field(default_factory=dict)
    top_k: dict[Variable, TopK] = field(default_factory=dict)
    stacks: dict[Variable, Stack] = field(default_factory=dict)
    uncovered: dict[Variable, tuple[str, ...]] = field(default_factory=dict)
    producers: dict[Variable, Equation] = field(default_factory=dict)
    _operands: dict[Variable, int] = field(default_factory=dict)
    _placed: dict[tuple[Variable, Axes, str | None], int] = field(default_factory=dict)

    def run(self, program: Program) -> None:
        accumulators = self.builder.num_accumulators
        for i, variable in enumerate(program.inputs):
            if i < accumulators:
                axes = self._without_units(tuple(self.place.out), variable)
                self.tracked[variable] = Tracked(i, axes)
            else:
                self._operands[variable] = i - accumulators
                self.free[variable] = tuple(extent > 1 for extent in variable.shape)
        for equation in program.equations:
            self._follow(equation)

    def depends(self, atom: Atom) -> bool:
        """Whether an accumulator has a part in it."""
        return isinstance(atom, Variable) and atom not in self.free

    def is_matrix(self, value: int) -> bool:
        """Whether a value has an element for each of D's."""
        return self.place.long <= self.builder.letters(value)

    def _follow(self, equation: Equation) -> None:
        self.producers.update((variable, equation) for variable in equation.outputs)
        if not any(map(self.depends, equation.inputs)):
            self._follow_free(equation)
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
        for variable in equation.outputs:
            if equation.name == "reduce_sum":
                self._note_sum_of_exp(equation, variable)

    def _follow_free(self, equation: Equation) -> None:
        for variable in equation.outputs:
            varies = tuple(extent > 1 for extent in variable.shape)
            if len(equation.outputs) == 1:
                if _is_layout(equation):
                    names = tuple("?" if v else None for v in self._varies(equation.inputs[0]))
                    with suppress(Uncovered):
                        varies = tuple(map(bool, self._moved(equation, names)))
                elif elementwise.covered(equation.name):
                    inputs = [self._varies(x) for x in equation.inputs if x.shape]
                    varies = tuple(map(any, zip(*inputs, strict=True))) if inputs else varies
            self.free[variable] = varies

    def _varies(self, atom: Atom) -> tuple[bool, ...]:
        return self.free[atom] if isinstance(atom, Variable) else (False,) * len(atom.shape)

    def _without_units(self, axes: Axes, variable: Variable) -> Axes:
        """Returns axes with None for dimensions of extent 1."""
        return tuple(
            axis if extent > 1 else None for axis, extent in zip(axes, variable.shape, strict=True)
        )

    # Operations on what is tracked.

    def _track(self, equation: Equation) -> list[Tracked | None]:
        """Returns what the outputs are; None of one that only a result gives.

        Raises:
          Uncovered: no kernel computes the equation.
        """
        name = equation.name
        if equation.kept:
            raise Uncovered(name)
        if _is_layout(equation):
            (x, *_) = equation.inputs
            return [Tracked(self._of(x).value, self._moved(equation, self._of(x).axes))]
        if name == "optimization_barrier":
            inputs = equation.inputs
            return [self.tracked.get(x) if isinstance(x, Variable) else None for x in inputs]
        if name in _REDUCTIONS:
            return [self._reduce(equation)]
        if name == "top_k":
            return self._top_k(equation)
        if name in ("stack", "concatenate"):
            return self._stack(equation)
        axes = self._common_axes(equation)
        return [Tracked(self._apply(equation, axes), axes)]

    def _of(self, atom: Atom) -> Tracked:
        assert isinstance(atom, Variable)
        return self.tracked[atom]

    def _moved(self, equation: Equation, axes: Axes) -> Axes:
        """Returns the axes of a layout operation's output, from those of its input.

        Raises:
          Uncovered: a reshape merges or splits axes.
        """
        x, (out,), params = equation.inputs[0], equation.outputs, equation.params
        if equation.name == "transpose":
            return tuple(axes[i] for i in params["permutation"])
        if equation.name == "broadcast_in_dim":
            at = {
                int(d): axis for d, axis in zip(params["broadcast_dimensions"], axes, strict=True)
            }
            return tuple(at.get(d) for d in range(len(out.shape)))
        kept = [d for d, extent in enumerate(x.shape) if extent > 1]
        if [x.shape[d] for d in kept] != [extent for extent in out.shape if extent > 1]:
            raise Uncovered(equation.name)
        remaining = iter(kept)
        return tuple(axes[next(remaining)] if extent > 1 else None for extent in out.shape)

    def _common_axes(self, equation: Equation) -> Axes:
        """Returns the axes at which the inputs of an elementwise operation meet.

        A dimension that only free inputs vary along is D's of the same position and extent.

        Raises:
          Uncovered: they meet at different places of D.
        """
        if not elementwise.covered(equation.name) or len(equation.outputs) != 1:
            raise Uncovered(equation.name)
        shape = equation.outputs[0].shape
        axes: list[str | None] = [None] * len(shape)
        for atom in equation.inputs:
            if atom.shape and self.depends(atom):
                for d, axis in enumerate(self._of(atom).axes):
                    if axis and axes[d] not in (None, axis):
                        raise Uncovered(equation.name)
                    axes[d] = axis or axes[d]
        for atom in equation.inputs:
            if atom.shape and not self.depends(atom):
                for d, varies in enumerate(self._varies(atom)):
                    if varies and axes[d] is None:
                        axes[d] = self._letter_at(d, equation)
        letters = [axis for axis in axes if axis]
        if len(set(letters)) < len(letters):
            raise Uncovered(equation.name)
        return tuple(axes)

    def _letter_at(self, dimension: int, equation: Equation) -> str:
        place, shape = self.place, equation.outputs[0].shape
        if len(shape) == len(place.out) and shape[dimension] == place.extents[place.out[dimension]]:
            return place.out[dimension]
        raise Uncovered(equation.name)

    def _apply(self, equation: Equation, axes: Axes) -> int:
        values = [self._value(atom, axes if atom.shape else ()) for atom in equation.inputs]
        return elementwise.apply(
            self.builder, equation.name, equation.params, values,
            [atom.dtype.name for atom in equation.inputs], equation.outputs[0].dtype.name,
        )  # fmt: skip

    def _value(self, atom: Atom, axes: Axes) -> int:
        if isinstance(atom, Constant):
            if atom.dtype.name not in elementwise.HELD:
                raise Uncovered(f"{atom.dtype.name} constant")
            return self.builder.constant(atom.value)
        return self.tracked[atom].value if atom in self.tracked else self._put(atom, axes)

    # Free variables, put where they are wanted.

    def _put(self, variable: Variable, axes: Axes, cast: str | None = None) -> int:
        """Returns the value of a free variable that lies at `axes`.

        Args:
          cast: the dtype that is wanted of it, if it has one that graphs do not hold.

        Raises:
          Uncovered: it takes an operation that no kernel computes.
        """
        varies = self.free[variable]
        axes = tuple(axis if v else None for axis, v in zip(axes, varies, strict=True))
        key = (variable, axes, cast)
        if key not in self._placed:
            if variable in self._operands:
                self._placed[key] = self._operand(variable, axes, cast)
            else:
                self._placed[key] = self._compute(self.producers[variable], axes, cast)
        return self._placed[key]

    def _compute(self, equation: Equation, axes: Axes, cast: str | None) -> int:
        x, name = equation.inputs[0] if equation.inputs else None, equation.name
        if _is_layout(equation) and isinstance(x, Variable):
            return self._put(x, self._moved_back(equation, axes), cast)
        if name in _REDUCTIONS and isinstance(x, Variable) and not cast:
            return self._reduce_free(equation, x, axes)
        if cast or equation.kept or len(equation.outputs) != 1 or not elementwise.covered(name):
            raise Uncovered(name)
        if (
            name == "convert_element_type"
            and isinstance(x, Variable)
            and x.dtype.name not in elementwise.HELD
        ):
            return self._put(x, axes, equation.outputs[0].dtype.name)
        return self._apply(equation, axes)

    def _reduce_free(self, equation: Equation, x: Variable, axes: Axes) -> int:
        """Returns a reduction over whole rows, which `x` must have where D has them."""
        place, dims = self.place, {int(d) for d in equation.params["axes"]}
        kept = iter(axes)
        if (
            len(x.shape) != len(place.out)
            or any(x.shape[d] != place.extents[place.out[d]] for d in dims)
            or {place.out[d] for d in dims} & place.long != place.n
            or not (place.n and place.row_fits)
            or x.dtype.name not in elementwise.NUMBERS
        ):
            raise Uncovered(equation.name)
        places = tuple(place.out[d] if d in dims else next(kept) for d in range(len(x.shape)))
        return self._row_statistic(equation, self._put(x, places))

    def _moved_back(self, equation: Equation, axes: Axes) -> Axes:
        """Returns the axes of a layout operation's input, from those of its output."""
        x, (out,), params = equation.inputs[0], equation.outputs, equation.params
        if equation.name == "transpose":
            return tuple(axes[params["permutation"].index(d)] for d in range(len(axes)))
        if equation.name == "broadcast_in_dim":
            return tuple(axes[d] for d in params["broadcast_dimensions"])
        kept = [d for d, extent in enumerate(out.shape) if extent > 1]
        if [out.shape[d] for d in kept] != [extent for extent in x.shape if extent > 1]:
            raise Uncovered(equation.name)
        remaining = iter(kept)
        return tuple(axes[next(remaining)] if extent > 1 else None for extent in x.shape)

    def _operand(self, variable: Variable, axes: Axes, cast: str | None) -> int:
        """Returns the value of an operand, converted to a dtype that kernels read.

        What kernels do not read is converted by XLA beforehand: scalars to float32, rows and
        columns of integers and the like to the dtype that the function converts them to.
        """
        index, dtype = self._operands[variable], variable.dtype.name
        labels = "".join(axis for axis in axes if axis)
        kind = self.place.kind(labels)
        read = cast or dtype
        if read not in elementwise.HELD or (cast and kind == "matrix"):
            raise Uncovered("convert_element_type" if cast else f"{dtype} operand")
        if kind != "scalar":
            return self.builder.operand(Leaf(index, labels, Operand(kind, read), cast))
        if read != "float32" and cast:
            raise Uncovered("convert_element_type")
        before = None if dtype == "float32" else "float32"
        value = self.builder.operand(Leaf(index, labels, Operand(kind, "float32"), before))
        return (
            self.builder.node("ne", value, self.builder.constant(0.0)) if dtype == "bool" else value
        )

    # Operations that are results of the kernel.

    def _reduce(self, equation: Equation) -> Tracked | None:
        (atom, *_), (out,), place = equation.inputs, equation.outputs, self.place
        x, what = self._of(atom), _REDUCTIONS[equation.name]
        dtype = atom.dtype.name
        dims = {int(d) for d in equation.params["axes"]}
        axes = tuple(axis for d, axis in enumerate(x.axes) if d not in dims)
        constant_along = [d for d in dims if x.axes[d] is None and atom.shape[d] > 1]
        reduced = {x.axes[d] for d in dims} - {None}
        if dtype not in elementwise.NUMBERS or (what == "sum" and constant_along):
            raise Uncovered(equation.name)
        if not self.is_matrix(x.value):
            return None
        value = x.value if what != "min" else self.builder.node("neg", x.value)
        kind = None
        if place.m and place.m <= reduced and what == "sum":
            kind = "column_sum"
        elif place.n and place.n <= reduced and what == "sum":
            kind = "row_sum"
        elif place.long <= reduced:
            kind = "max"
        elif place.n and place.n <= reduced:
            kind = "row_max"
        if kind is None:
            raise Uncovered(equation.name)
        self.reductions[out] = Reduction(kind, value, axes, what == "min")
        if not place.row_fits or reduced != place.n:
            return None
        return Tracked(self._row_statistic(equation, x.value), axes)

    def _row_statistic(self, equation: Equation, value: int) -> int:
        """Returns a reduction over whole rows as a value of the graph."""
        op = "row_sum" if equation.name == "reduce_sum" else "row_max"
        negated = equation.name == "reduce_min"
        value = self.builder.node("neg", value) if negated else value
        row = self.builder.row_reduction(op, value, self.place.columns)
        row = self.builder.node("neg", row) if negated else row
        dtype = equation.outputs[0].dtype.name
        if dtype in elementwise.NARROW:
            row = self.builder.node("convert", row, params=(dtype,))
        return row

    def _top_k(self, equation: Equation) -> list[Tracked | None]:
        (atom, *_), place = equation.inputs, self.place
        x, k = self._of(atom), equation.params["k"]
        last = len(atom.shape) - 1
        axis = equation.params.get("axis", last)
        if (
            not self.is_matrix(x.value)
            or atom.dtype.name not in elementwise.NUMBERS
            or axis not in (last, -1)
            or place.n != {x.axes[last]}
            or not place.row_fits
            or not 1 <= k <= MAX_TOP_K
        ):
            raise Uncovered("top_k")
        values, indices = equation.outputs
        axes = (*x.axes[:-1], "?")
        self.top_k[values] = TopK("top_k_values", x.value, axes, k)
        self.top_k[indices] = TopK("top_k_indices", x.value, axes, k)
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
            or out.dtype.name not in elementwise.NUMBERS
        ):
            raise Uncovered(name)
        first, second = (tracked for tracked in pair if tracked)
        axes = list(first.axes)
        if name == "stack":
            axes.insert(dimension, "?")
        else:
            axes[dimension] = "?"
        plane = next((i for i, x in enumerate(self.place.out) if x in self.place.columns), 0)
        wanted = (*self.place.out[:plane], "?", *self.place.out[plane:])
        if (
            first.axes != second.axes
            or not self.place.compact
            or not self.place.columns
            or tuple(axes) != self._without_units(wanted, out)
            or not (self.is_matrix(first.value) and self.is_matrix(second.value))
        ):
            raise Uncovered(name)
        self.stacks[out] = Stack((first.value, second.value), wanted)
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
        self.sums_of_exp[out] = SumExp(tracked.value, axes, center, dims)

    def _source(self, atom: Atom, name: str) -> Equation | None:
        """Returns the equation of this name that computes a float32 variable."""
        while isinstance(atom, Variable) and (equation := self.producers.get(atom)):
            if equation.name == name and atom.dtype.name == "float32":
                return equation
            if equation.name not in elementwise.SAME:
                return None
            atom = equation.inputs[0]
        return None

    def _constant_along(self, atom: Atom, dims: Sequence[int]) -> bool:
        if not isinstance(atom, Variable) or not atom.shape:
            return True
        dims = [d for d in dims if atom.shape[d] > 1]
        if not dims:
            return True
        if atom in self.tracked:
            return all(self.tracked[atom].axes[d] is None for d in dims)
        equation = self.producers.get(atom)
        if equation is None:
            return False
        if equation.name in elementwise.SAME:
            return self._constant_along(equation.inputs[0], dims)
        if equation.name != "broadcast_in_dim":
            return False
        (x, *_), at = equation.inputs, [int(d) for d in equation.params["broadcast_dimensions"]]
        return all(d not in at or x.shape[at.index(d)] == 1 for d in dims)
