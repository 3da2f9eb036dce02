"""Weights of a program: its arguments, and what casts, transposes or cuts them.

A recipe quantizes weights in other blocks than activations. No program says which they are, but an
array that depends on arguments alone, before any computation, is one wherever it is multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal, jaxprs_in_params

from ..fusion.jaxprs import CALLS

# Equations that keep weights what they are: of the first operand.
KEEPING = {
    "broadcast_in_dim", "convert_element_type", "copy", "dynamic_slice", "reshape",
    "sharding_constraint", "slice", "squeeze", "transpose",
}  # fmt: skip
# Calls whose inner program has the equation's operands, and its results.
PASSING = {*CALLS, "custom_vjp_call", "remat2", "shard_map"}

Marks = tuple[bool, ...]  # which variables are weights


class Weights:
    """The weights of an open jaxpr, whose arguments have these marks."""

    def __init__(self, jaxpr: Any, marks: Marks):
        marked = zip(jaxpr.invars, marks, strict=False)
        self._found = {x for x, mark in marked if mark and x.aval.ndim > 1}
        if self._found:
            for equation in jaxpr.eqns:
                self._found.update(self._made_by(equation))

    def marks(self, atoms: Sequence[Any]) -> Marks:
        return tuple(not isinstance(x, Literal) and x in self._found for x in atoms)

    def _made_by(self, equation: Any) -> list[Any]:
        name, marks = equation.primitive.name, self.marks(equation.invars)
        if name in KEEPING:
            return list(equation.outvars) if marks[0] else []
        if not any(marks) or name not in PASSING | {"scan"}:
            return []
        inner = list(jaxprs_in_params(equation.params))
        if len(inner) != 1:
            return []
        outputs = Weights(inner[0], self.into(equation, "jaxpr")).marks(inner[0].outvars)
        carried = _carried(equation) if name == "scan" else 0
        pairs = zip(equation.outvars, outputs, strict=True)
        return [x for i, (x, mark) in enumerate(pairs) if mark and i >= carried]

    def into(self, equation: Any, parameter: str) -> Marks:
        """Returns the marks of the arguments of a program that an equation has as a parameter."""
        name, params, marks = equation.primitive.name, equation.params, self.marks(equation.invars)
        if name in PASSING:
            return marks
        if name == "cond":
            return marks[1:]
        if name == "scan":
            carried = _carried(equation)
            consts = len(marks) - carried - _sliced(equation.invars, params["jaxpr"].jaxpr.invars)
            return (*marks[:consts], *[False] * carried, *marks[consts + carried :])
        if name == "while" and parameter == "body_jaxpr":
            first = params["cond_nconsts"]
            return marks[first : first + params["body_nconsts"]]
        return ()


def _carried(scan: Any) -> int:
    """Returns how many results a `scan` carries; they come first."""
    return len(scan.outvars) - _sliced(scan.outvars, scan.params["jaxpr"].jaxpr.outvars)


def _sliced(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    """Returns how many variables of a `scan` have an axis more than in its body.

    Versions of JAX name the parameters that say so differently.
    """
    return sum(x.aval.ndim > y.aval.ndim for x, y in zip(outer, inner, strict=True))
