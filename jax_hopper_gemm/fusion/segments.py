"""What functions of ragged products know of groups, and which arrays are 0 in rows of no group.

A kernel stores 0 in the rows of no group, whatever a function makes of them. So a matrix may be
stored for XLA to go on with only if it is known to be 0 there by the function's own meaning: it
*vanishes*. Accumulators do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .axes import REDUCTIONS, is_layout
from .flatten import Atom, Constant, Equation, Program, Variable

# Operations that keep zeros: of one input, of any of several, of the first, of all.
_UNARY = {
    "abs", "ceil", "convert_element_type", "copy", "copy_p", "erf", "expm1", "floor", "log1p",
    "neg", "pvary", "reduce_precision", "round", "sign", "sin", "sqrt", "square", "stop_gradient",
    "tanh",
}  # fmt: skip
_ANY = {"and", "mul"}
_FIRST = {"div"}
_ALL = {"add", "add_any", "concatenate", "max", "min", "optimization_barrier", "stack", "sub"}


@dataclass(frozen=True)
class GroupedRows:
    """How a function knows the groups of its product's rows.

    Attributes:
      sizes: which of the function's operands are the product's sizes; None: none is.
      groups: the parameter of that name of the operations that read these sizes.
      letters: of the groups' axes, the last for an array that all matrices of a batch share.
      each: whether the matrices of a batch have groups of their own.
    """

    sizes: int | None
    groups: Any
    letters: str
    each: bool

    def axes_of(self, equation: Equation) -> tuple[str, ...]:
        """Returns the letters of the groups' axes that `segment_broadcast` takes to rows."""
        return tuple(self.letters if equation.params["each"] else self.letters[-1])


class GroupedProgram:
    """A program whose accumulators have grouped rows.

    Attributes:
      rows: how it knows them.
      sizes: the input that is their sizes.
      live: an operation that puts 0 in the rows of no group, if there is one.
      reducible: whether what a kernel computes of rows of no group can be put right: where no
        group has a part in it, what vanishes is 0 there already.
    """

    def __init__(self, program: Program, num_accumulators: int, rows: GroupedRows):
        self.rows = rows
        self.sizes: Variable | None = None
        if rows.sizes is not None:
            self.sizes = program.inputs[num_accumulators + rows.sizes]
        self._zero: set[Variable] = set(program.inputs[:num_accumulators])
        equations = program.equations
        self.live = next(filter(self.is_live_rows, equations), None)
        self.reducible = bool(self.live) or not any(map(self.is_rows_of_groups, equations))
        for equation in equations:
            if self._vanishes(equation):
                self._zero.update(equation.outputs)

    def vanishes(self, atom: Atom) -> bool:
        """Whether an array is known to be 0 in rows of no group; numbers are taken as finite."""
        if isinstance(atom, Constant):
            return bool(np.asarray(atom.value) == 0)
        return atom in self._zero

    def with_live_rows(self, array: Any, *sizes: Any) -> Any:
        """Returns an array of rows with 0 for the rows of no group."""
        if self.live is None:
            return array
        (found,) = self.live.evaluate(array, *sizes)
        return found

    def is_live_rows(self, equation: Equation) -> bool:
        """Whether an equation puts 0 in the rows of no group of the product."""
        return equation.name == "live_rows" and self._same_groups(equation)

    def is_rows_of_groups(self, equation: Equation) -> bool:
        """Whether an equation gives the product's rows what arrays have for their groups."""
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
        if self.is_live_rows(equation) or self.is_rows_of_groups(equation):
            return True
        if name in _UNARY or (is_layout(equation) and name not in REDUCTIONS):
            return zero[0]
        if name == "integer_pow":
            return zero[0] and int(equation.params["y"]) > 0
        if name == "select_n":
            return all(zero[1:])
        return (
            (name in _ANY and any(zero))
            or (name in _FIRST and zero[0])
            or (name in _ALL and all(zero))
        )
