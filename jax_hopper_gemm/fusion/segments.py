"""Segment operations in functions of ragged products, and zeros in rows of no group.

A kernel stores 0 in the rows of no group, whatever the function computes there. So an intermediate
matrix is stored for XLA only if the function itself gives 0 in these rows: the matrix *vanishes*.
Accumulators do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .axes import REDUCTIONS, is_layout
from .flatten import Atom, Constant, Equation, Program, Variable

# Operations that keep zeros: of the first input, of any of several, of all.
_FIRST = {
    "abs", "as_float16", "ceil", "convert_element_type", "copy", "div", "erf", "expm1", "floor",
    "log1p", "neg", "pvary", "reduce_precision", "round", "sign", "sin", "sqrt", "square",
    "stop_gradient", "tanh",
}  # fmt: skip
_ANY = {"and", "mul"}
_ALL = {"add", "add_any", "concatenate", "max", "min", "optimization_barrier", "stack", "sub"}


@dataclass(frozen=True)
class GroupedRows:
    """The groups of a product's rows, as its function refers to them."""

    sizes: int | None  # the function's operand that holds the product's sizes
    groups: Any  # the parameter of that name of the operations that read these sizes
    letters: str  # of the groups' axes; the last for an array that all matrices of a batch share
    each: bool  # whether each matrix of a batch has its own groups

    def axes_of(self, equation: Equation) -> tuple[str, ...]:
        """Returns the letters of the groups' axes that a `segment_broadcast` replaces by rows."""
        return tuple(self.letters if equation.params["each"] else self.letters[-1])


class GroupedProgram:
    """A program whose accumulators have grouped rows."""

    def __init__(self, program: Program, num_accumulators: int, rows: GroupedRows):
        self.rows = rows
        self.sizes: Variable | None = None  # the input that holds them
        if rows.sizes is not None:
            self.sizes = program.inputs[num_accumulators + rows.sizes]
        self._zero: set[Variable] = set(program.inputs[:num_accumulators])
        equations = program.equations
        # An operation that puts 0 in the rows of no group, if the program has one.
        self.mask = next(filter(self.is_segment_mask, equations), None)
        # Whether a kernel's reductions of rows of no group can be corrected: by `mask`, or because
        # without per-group operands vanishing arrays give 0 there.
        self.reducible = bool(self.mask) or not any(map(self.is_segment_broadcast, equations))
        for equation in equations:
            if self._vanishes(equation):
                self._zero.update(equation.outputs)

    def vanishes(self, atom: Atom) -> bool:
        """Whether an array is surely 0 in rows of no group, if all numbers are finite."""
        if isinstance(atom, Constant):
            return bool(np.asarray(atom.value) == 0)
        return atom in self._zero

    def is_segment_mask(self, equation: Equation) -> bool:
        """Whether an equation puts 0 in the rows of no group of the product."""
        return equation.name == "live_rows" and self._same_groups(equation)

    def is_segment_broadcast(self, equation: Equation) -> bool:
        """Whether an equation gives each row of the product the entry of its group."""
        return (
            equation.name == "rows_of_groups"
            and self._same_groups(equation)
            and (len(self.rows.letters) == 1 or equation.params["each"] == self.rows.each)
        )

    def _same_groups(self, equation: Equation) -> bool:
        same = equation.inputs[1] is self.sizes
        return same and equation.params["groups"] == self.rows.groups

    def _vanishes(self, equation: Equation) -> bool:
        name, zero = equation.name, [self.vanishes(x) for x in equation.inputs]
        if self.is_segment_mask(equation) or self.is_segment_broadcast(equation):
            return True
        if name in _FIRST or (is_layout(equation) and name not in REDUCTIONS):
            return zero[0]
        if name == "integer_pow":
            return zero[0] and int(equation.params["y"]) > 0
        if name == "select_n":
            return all(zero[1:])
        return (name in _ANY and any(zero)) or (name in _ALL and all(zero))
