"""Residuals of an epilogue: the values that its derivative reads in place of the accumulators.

They are the arguments of its nonlinear part, such as `acc + bias` for an activation: one for each
accumulator at most. Where the derivative is smooth, or jumps at zero alone, they are rounded to
16 bits: that keeps signs. Where it jumps elsewhere, as that of a clip does, they are stored as they
are, or else as the mask that is the only thing needed: it jumps where the function did that ran.

NOTE: In float16 numbers below 2^-25 become 0, those beyond 65520 infinite. So accumulators are
kept in float32 beside float16 where the derivative of a factor, such as a scale, reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal, jaxpr_as_fun

from .jaxprs import ClosedJaxpr, at, evaluated, is_inexact, outputs_of, pruned, traced
from .jumps import read_across_a_jump
from .memo import memoised
from .op_table import SAME

# Linear operations on elements; besides these a product and a quotient by what is no accumulator's.
_LINEAR = {"add", "add_any", "sub", "neg", "convert_element_type", "live_rows", *SAME}
_size = attrgetter("itemsize")  # of a dtype


@dataclass(frozen=True)
class Tangent:
    """The derivative of an epilogue."""

    moving: tuple[bool, ...]  # which outputs have a tangent: of others it is zero, as of a sign
    # Of the residuals, the operands that it needs, and tangents, in which it is linear. Its outputs
    # are the tangents of the `moving` outputs.
    jaxpr: ClosedJaxpr
    residuals: ClosedJaxpr  # computes the residuals from the epilogue's inputs
    accumulators: tuple[int | None, ...]  # for each residual, which accumulator it is, or None
    operands: tuple[bool, ...]  # which of the epilogue's operands it needs


@memoised
def tangent(
    closed: ClosedJaxpr,
    wrt: Sequence[int],
    count: int,
    dtype: Any,
    recompute: bool,
    moving_dtype: Any = None,
) -> Tangent:
    """Returns the derivative of an epilogue by the inputs `wrt`.

    Args:
      closed: the epilogue, of `count` accumulators and of operands.
      dtype: of residuals that are rounded.
      recompute: whether the residuals are accumulators, all of one dtype.
      moving_dtype: of the accumulators' tangents; `dtype` if None.
    """
    avals: list[Any] = list(closed.in_avals)
    inexact = [i for i, aval in enumerate(closed.out_avals) if is_inexact(aval)]

    def derivative(*args: Any) -> list[Any]:
        primals, tangents = list(args[: len(avals)]), list(args[len(avals) :])
        of = at(wrt, outputs_of(closed, inexact), primals)
        return jax.jvp(of, [primals[i] for i in wrt], tangents)[1]

    whole = traced(derivative, *avals, *(avals[i] for i in wrt))
    whole = traced(lambda *args: evaluated(whole, args), *whole.in_avals)
    equations = [x for x in whole.jaxpr.eqns if x.outvars]  # callbacks are the epilogue's alone
    effects = frozenset().union(*(x.effects for x in equations))
    whole = whole.replace(jaxpr=whole.jaxpr.replace(eqns=equations, effects=effects))
    moves = _reached(whole, len(avals))
    whole, _ = pruned(whole, moves, [True] * len(whole.in_avals))
    cut = _Cut(whole, len(avals), count, np.dtype(dtype), sum(i < count for i in wrt))
    values = cut.accumulators() if recompute else cut.least()
    dtypes = cut.dtypes(values)
    if recompute and dtypes:
        dtypes = [max(dtypes, key=_size)] * len(dtypes)
    before, (after, used) = cut.before(values), cut.after(values)
    residuals = [x.aval.update(dtype=dtype) for x, dtype in zip(values, dtypes, strict=True)]

    def residuals_of(*args: Any) -> list[Any]:
        outputs = jaxpr_as_fun(before)(*args)
        return [x.astype(dtype) for x, dtype in zip(outputs, dtypes, strict=True)]

    # NOTE: tangents are widened here, behind the simplification: where it left out that and a
    # conversion of a result, the transpose would add cotangents in 16 bits.
    def of_residuals(*args: Any) -> list[Any]:
        wide = (x.astype(aval.dtype) for x, aval in zip(args, after.in_avals, strict=True))
        return jaxpr_as_fun(after)(*wide)

    operands = after.in_avals[len(values) : len(after.in_avals) - len(wrt)]
    moving = [avals[i].update(dtype=moving_dtype or dtype) if i < count else avals[i] for i in wrt]
    numbers = {i for i, move in zip(inexact, moves, strict=True) if move}
    return Tangent(
        tuple(i in numbers for i in range(len(closed.out_avals))),
        traced(of_residuals, *residuals, *operands, *moving),
        traced(residuals_of, *avals),
        tuple(cut.inputs.index(x) if x in cut.inputs else None for x in values),
        tuple(used[count:]),
    )


def _reached(closed: ClosedJaxpr, first: int) -> list[bool]:
    """Returns which outputs depend on inputs from the number `first` on."""
    reached = set(closed.jaxpr.invars[first:])
    for equation in closed.jaxpr.eqns:
        if not reached.isdisjoint(variables(equation.invars)):
            reached.update(equation.outvars)
    return [not reached.isdisjoint(variables([x])) for x in closed.jaxpr.outvars]


class _Cut:
    """The derivative of an epilogue, to be cut before what is not linear in the accumulators.

    Args:
      closed: of the epilogue's inputs, `num_inputs`, the first `count` of them accumulators, and of
        tangents.
      dtype: that values may be rounded to.
      first: how many of the tangents, the first, are those of accumulators.
    """

    def __init__(
        self, closed: ClosedJaxpr, num_inputs: int, count: int, dtype: np.dtype, first: int
    ) -> None:
        self._closed, self._count, self._dtype = closed, count, dtype
        self._equations = closed.jaxpr.eqns
        self.inputs: list[Any] = closed.jaxpr.invars[:num_inputs]
        self._tangents: list[Any] = closed.jaxpr.invars[num_inputs:]
        self._of_operands = self._tangents[first:]
        linear, moving = set(self._tangents), set(self.inputs[:count])
        self._known: dict[int, Any] = {}  # equations of what accumulators and no tangents make
        for number, equation in enumerate(self._equations):
            if not linear.isdisjoint(variables(equation.invars)):
                linear.update(equation.outvars)
            elif not moving.isdisjoint(variables(equation.invars)):
                moving.update(equation.outvars)
                self._known[number] = equation
        self._moving, self._linear = moving, linear

    def accumulators(self) -> list[Any]:
        """Returns the accumulators that the derivative needs."""
        first = slice(self._count)
        used = self.after(())[1][first]
        return [x for x, use in zip(self.inputs[first], used, strict=True) if use]

    def least(self) -> list[Any]:
        """Returns the fewest bytes of values, linear in accumulators, that stand for these.

        Of equal ones the last, the arguments of what is not linear. Operands that are needed
        besides count too.
        """
        best = accumulators = self.accumulators()
        steps, end = self._linear_steps(), len(self._equations)
        last: dict[Any, int] = {}  # by variable, the last step that reads it, or the end
        for number, equation in enumerate(self._equations):
            reader = number if number in steps else end
            last.update((x, max(last.get(x, -1), reader)) for x in variables(equation.invars))
        for alive in alive_after(accumulators, steps, last):
            alive = self._independent(alive, steps)
            if len(alive) <= len(accumulators) and self._cost(alive) <= self._cost(best):
                best = alive
        masks = self._masks()
        fewer = 0 < len(masks) <= len(accumulators) and self._cost(masks) < self._cost(best)
        return masks if fewer else best

    def _independent(self, alive: list[Any], steps: dict[int, Any]) -> list[Any]:
        """Returns those of some variables that do not follow from the others by linear steps."""
        follow: set[Any] = set()
        kept = [x for x in alive if x in self.inputs]
        for equation in steps.values():
            (out,) = equation.outvars
            moving = self._moving.intersection(variables(equation.invars))
            if moving <= follow.union(kept):
                follow.add(out)
            elif out in alive:
                kept.append(out)
        return kept

    def _masks(self) -> list[Any]:
        """Returns the predicates, if there is nothing else, by which tangents are chosen."""
        tangents = (e for i, e in enumerate(self._equations) if i not in self._known)
        read = dict.fromkeys(x for e in tangents for x in variables(e.invars) if x in self._moving)
        shape = self.inputs[0].aval.shape
        masks = [x for x in read if x.aval.dtype == bool and x.aval.shape == shape]
        return masks if len(masks) == len(read) else []

    def _linear_steps(self) -> dict[int, Any]:
        """Returns the equations, by number, whose results are linear in accumulators alone."""
        linear = set(self.inputs[: self._count])
        steps: dict[int, Any] = {}
        for number, equation in self._known.items():
            inputs = [x for x in variables(equation.invars) if x in self._moving]
            if not equation.outvars:  # a print
                continue
            name, out = equation.primitive.name, equation.outvars[0]
            scales = name == "mul" or (name == "div" and equation.invars[0] is inputs[0])
            if (
                (name in _LINEAR or (scales and len(inputs) == 1))
                and linear.issuperset(inputs)
                and is_inexact(out.aval)
                and _is_complex(out) == _is_complex(self.inputs[0])
                and out.aval.shape == self.inputs[0].aval.shape
            ):
                linear.add(out)
                steps[number] = equation
        return steps

    def _cost(self, values: Sequence[Any]) -> tuple[int, int]:
        """Returns bytes for an element of residuals and operands, and the number of other ones."""
        (_, used), shape = self.after(values), values[0].aval.shape
        operands = [x.aval for x, use in zip(self.inputs, used, strict=True) if use]
        full = [aval.dtype for aval in operands if aval.shape == shape]
        return sum(x.itemsize for x in (*full, *self.dtypes(values))), len(operands) - len(full)

    def dtypes(self, values: Sequence[Any]) -> list[np.dtype]:
        kept = [
            self._dtype if x.aval.dtype == bool else min(x.aval.dtype, self._dtype, key=_size)
            for x in values
        ]
        rounded = {
            x: dtype for x, dtype in zip(values, kept, strict=True)
            if dtype != x.aval.dtype and is_inexact(x.aval)
        }  # fmt: skip
        after, _ = self.after(values)
        exact = read_across_a_jump(after.jaxpr.eqns, rounded, tangents=self._linear)
        exact |= self._scaled() if self._dtype == np.float16 else set()
        return [
            x.aval.dtype if x in exact else dtype for x, dtype in zip(values, kept, strict=True)
        ]

    def _scaled(self) -> set[Any]:
        """Returns those that tangents of factors multiply: without these they may be too large."""
        factors, found = set(self._of_operands), set[Any]()
        for equation in self._equations:
            read = set(variables(equation.invars))
            if not factors.isdisjoint(read):
                factors.update(equation.outvars)
                found |= read.intersection(self.inputs[: self._count])
        return found

    # The two parts.

    def before(self, values: Sequence[Any]) -> ClosedJaxpr:
        """Returns how values are computed from the epilogue's inputs."""
        part = self._part(self.inputs, values, self._equations)
        return pruned(part, [True] * len(values), [True] * len(self.inputs))[0]

    def after(self, values: Sequence[Any]) -> tuple[ClosedJaxpr, list[bool]]:
        """Returns the derivative as a function of values, operands that it needs, and tangents.

        And which of the epilogue's inputs these operands are.
        """
        others = [x for x in self.inputs if x not in values]
        equations = [e for e in self._equations if not any(x in values for x in e.outvars)]
        inputs = [*values, *others, *self._tangents]
        part = self._part(inputs, self._closed.jaxpr.outvars, equations)
        kept = [True] * len(values) + [False] * len(others) + [True] * len(self._tangents)
        after, used = pruned(part, [True] * len(part.out_avals), kept)
        needed = iter(used[len(values) :])
        return after, [x not in values and next(needed) for x in self.inputs]

    def _part(self, inputs: Sequence[Any], outputs: Sequence[Any], equations: Any) -> ClosedJaxpr:
        jaxpr = self._closed.jaxpr
        part = jaxpr.replace(
            invars=list(inputs), outvars=list(outputs), eqns=equations,
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )  # fmt: skip
        return self._closed.replace(jaxpr=part)


def alive_after(
    first: Sequence[Any], steps: dict[int, Any], last: dict[Any, int]
) -> Iterator[list[Any]]:
    """Yields the variables that are to be read yet, after each of some equations.

    Args:
      first: those before the first equation.
      steps: the equations by number, in order.
      last: by variable, the number of the last step that reads it, or a greater one.
    """
    alive = list(first)
    for number, equation in steps.items():
        alive = [x for x in (*alive, *equation.outvars) if last.get(x, -1) > number]
        yield alive


def _is_complex(variable: Any) -> bool:
    return np.issubdtype(variable.aval.dtype, np.complexfloating)


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Returns those atoms that are no literals."""
    return [x for x in atoms if not isinstance(x, Literal)]
