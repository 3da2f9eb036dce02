"""A program as fusion reads it: elementwise calls are what they call, and arrays are variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from jax.extend.core import Literal, Var

from ..fusion.jaxprs import CALLS, renamed
from ..fusion.residuals import variables
from .kinds import is_inlined


def inlined(
    equations: Iterable[Any], results: Iterable[Any], held: dict[int, Any]
) -> tuple[list[Any], list[Any]]:
    """Returns the same equations and results with elementwise calls replaced by what they call.

    Functions of JAX are calls, and after a derivative have what it needs as further results.
    Equations that nothing reads are left out.

    Args:
      held: gets for each array that an equation holds, as some versions of JAX write those that a
        function closes over, the variable that stands for it.
    """
    names: dict[Any, Any] = {}
    new: list[Any] = []

    def read(atoms: Iterable[Any]) -> list[Any]:
        return [literal(x) if isinstance(x, Literal) else names.get(x, x) for x in atoms]

    def literal(atom: Any) -> Any:
        if not atom.aval.ndim:
            return atom
        return held.setdefault(id(atom.val), (Var(atom.aval), atom))[0]

    def add(equations: Iterable[Any], within: Any = None) -> None:
        for equation in equations:
            inputs, name = read(equation.invars), equation.primitive.name
            closed = equation.params[CALLS[name]] if name in CALLS else None
            if closed and name != "custom_jvp_call" and is_inlined(closed):
                names.update(zip(closed.jaxpr.invars, inputs, strict=True))
                add(closed.jaxpr.eqns, within or equation)
                names.update(zip(equation.outvars, read(closed.jaxpr.outvars), strict=True))
                continue
            outputs = equation.outvars
            if name == "convert_element_type" and isinstance(inputs[0], Literal):
                (out,) = outputs
                names[out] = Literal(np.asarray(inputs[0].val, out.aval.dtype), out.aval)
                continue
            if within:
                names.update({x: Var(x.aval) for x in outputs})
                equation = equation.replace(source_info=within.source_info)
                outputs = [names[x] for x in outputs]
            if within or inputs != equation.invars:
                equation = equation.replace(invars=inputs, outvars=outputs)
            new.append(equation)

    add(equations)
    results = read(results)
    live, kept = set(variables(results)), []
    for equation in reversed(new):
        if equation.effects or not live.isdisjoint(equation.outvars):
            live.update(variables(equation.invars))
            kept.append(equation)
    return kept[::-1], results


def with_constants(
    equations: list[Any], results: list[Any], held: dict[int, Any]
) -> tuple[list[Any], list[Any]]:
    """Returns equations and results with the arrays that `inlined` put variables for."""
    names = dict(held.values())
    if names:
        equations = [x.replace(invars=renamed(x.invars, names)) for x in equations]
    return equations, renamed(results, names)
