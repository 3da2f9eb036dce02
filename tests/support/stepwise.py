"""A program run an operation at a time: XLA compiles each kind of operation once, not the program.

Random programs take milliseconds so, beside seconds of compilation. Each operation rounds as its
dtype says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from jax_hopper_gemm.fusion import jaxprs
from jax_hopper_gemm.fusion.jaxprs import ClosedJaxpr, traced_once
from jax_hopper_gemm.primitives.experimental import HopperPrimitive

# Primitives that call a program, and the parameter that holds it.
CALLS = jaxprs.CALLS | {"remat2": "jaxpr", "custom_vjp_call": "call_jaxpr"}


def run_stepwise(function: Callable[..., Any], *args: Any) -> Any:
    """Returns what a JAX function of arrays returns."""
    return Run(function, *args).results


class Run:
    """One run of a JAX function of arrays.

    Attributes:
      results: what the function returns.
      largest: the largest magnitude of any number on the way there, if it is to be `measured`.
      added: the largest finite sum of magnitudes of what is added up there, likewise.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, measured: bool = False):
        self._measured, self.largest, self.added = measured, 0.0, 0.0
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        outputs = self._program(closed, jax.tree.leaves(args))
        self.results = jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    def _program(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        """Returns the outputs of a jaxpr, open or closed."""
        jaxpr = getattr(closed, "jaxpr", closed)
        constants = getattr(closed, "consts", ())
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *args], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        for equation in jaxpr.eqns:
            outputs = self._outputs(equation, [read(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, outputs, strict=True))
            if self._measured:
                self.largest = max([self.largest, *(float(np.abs(x).max()) for x in outputs)])
                if equation.primitive.name == "reduce_sum":
                    magnitudes = np.abs(np.asarray(read(equation.invars[0]))).astype(np.float64)
                    added = magnitudes.sum(equation.params["axes"])
                    self.added = np.max(added, initial=self.added, where=np.isfinite(added))
        return [read(atom) for atom in jaxpr.outvars]

    def _outputs(self, equation: Any, inputs: list[Any]) -> list[Any]:
        primitive, params = equation.primitive, equation.params
        if primitive.name in CALLS:
            return self._program(params[CALLS[primitive.name]], inputs)
        if primitive.name == "scan":
            return self._scan(equation, inputs)
        if primitive.name == "while":
            return self._while(inputs, **params)
        if primitive.name == "cond":
            branches = params["branches"]
            return self._program(
                branches[min(max(int(inputs[0]), 0), len(branches) - 1)], inputs[1:]
            )
        if isinstance(primitive, HopperPrimitive):
            avals = [atom.aval for atom in equation.invars]
            return self._program(traced_once(primitive.reference, *avals, **params), inputs)
        outputs = primitive.bind(*inputs, **primitive.get_bind_params(params))
        return outputs if primitive.multiple_results else [outputs]

    def _scan(self, equation: Any, inputs: list[Any]) -> list[Any]:
        body, length = equation.params["jaxpr"], equation.params["length"]
        first = _unstacked(body.in_avals, equation.invars)
        carried = _unstacked(body.out_avals, equation.outvars)
        constants, carry = inputs[: first - carried], inputs[first - carried : first]
        rows: list[Any] = [None] * length
        for i in reversed(range(length)) if equation.params["reverse"] else range(length):
            outputs = self._program(body, [*constants, *carry, *(x[i] for x in inputs[first:])])
            carry, rows[i] = outputs[:carried], outputs[carried:]
        return [*carry, *(jax.numpy.stack(column) for column in zip(*rows, strict=True))]

    def _while(
        self,
        inputs: list[Any],
        cond_jaxpr: Any,
        cond_nconsts: int,
        body_jaxpr: Any,
        body_nconsts: int,
    ) -> list[Any]:
        last = cond_nconsts + body_nconsts
        condition, constants = inputs[:cond_nconsts], inputs[cond_nconsts:last]
        carry = inputs[last:]
        while self._program(cond_jaxpr, [*condition, *carry])[0]:
            carry = self._program(body_jaxpr, [*constants, *carry])
        return carry


def _unstacked(inner: Sequence[Any], outer: Sequence[Any]) -> int:
    """Returns how many values of a loop's body have the rank that they have outside of it."""
    return sum(x.ndim == y.aval.ndim for x, y in zip(inner, outer, strict=True))
