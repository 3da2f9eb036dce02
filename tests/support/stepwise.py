"""A program run an operation at a time: XLA compiles each kind of operation once, not the program.

Random programs take milliseconds so, beside seconds of compilation. Each operation rounds as its
dtype says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from jax_hopper_gemm.fusion.jaxprs import ClosedJaxpr, traced_once
from jax_hopper_gemm.primitives.experimental import HopperPrimitive

# Primitives that call a program, and the parameter that holds it.
CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", "checkpoint": "jaxpr", "remat2": "jaxpr",
    "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
}  # fmt: skip


def run_stepwise(function: Callable[..., Any], *args: Any) -> Any:
    """Returns what a JAX function of arrays returns."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    outputs = run_program(closed, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs)


def run_program(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a jaxpr, open or closed."""
    jaxpr = getattr(closed, "jaxpr", closed)
    constants = getattr(closed, "consts", ())
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        outputs = _run(equation, [read(atom) for atom in equation.invars])
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _run(equation: Any, inputs: list[Any]) -> list[Any]:
    primitive, params = equation.primitive, equation.params
    if primitive.name in CALLS:
        return run_program(params[CALLS[primitive.name]], inputs)
    if primitive.name in LOOPS:
        return LOOPS[primitive.name](equation, inputs)
    if isinstance(primitive, HopperPrimitive):
        avals = [atom.aval for atom in equation.invars]
        return run_program(traced_once(primitive.reference, *avals, **params), inputs)
    outputs = primitive.bind(*inputs, **primitive.get_bind_params(params))
    return outputs if primitive.multiple_results else [outputs]


def _scan(equation: Any, inputs: list[Any]) -> list[Any]:
    body, length = equation.params["jaxpr"], equation.params["length"]
    first = _unstacked(body.in_avals, equation.invars)
    carried = _unstacked(body.out_avals, equation.outvars)
    constants, carry = inputs[: first - carried], inputs[first - carried : first]
    rows: list[Any] = [None] * length
    for i in reversed(range(length)) if equation.params["reverse"] else range(length):
        outputs = run_program(body, [*constants, *carry, *(x[i] for x in inputs[first:])])
        carry, rows[i] = outputs[:carried], outputs[carried:]
    return [*carry, *(jax.numpy.stack(column) for column in zip(*rows, strict=True))]


def _unstacked(inner: Sequence[Any], outer: Sequence[Any]) -> int:
    """Returns how many values of a loop's body have the rank that they have outside of it."""
    return sum(x.ndim == y.aval.ndim for x, y in zip(inner, outer, strict=True))


def _while(equation: Any, inputs: list[Any]) -> list[Any]:
    params = equation.params
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]
    condition, constants, carry = inputs[:first], inputs[first:last], inputs[last:]
    while run_program(params["cond_jaxpr"], [*condition, *carry])[0]:
        carry = run_program(params["body_jaxpr"], [*constants, *carry])
    return carry


def _cond(equation: Any, inputs: list[Any]) -> list[Any]:
    branches = equation.params["branches"]
    return run_program(branches[min(max(int(inputs[0]), 0), len(branches) - 1)], inputs[1:])


LOOPS: dict[str, Callable[..., list[Any]]] = {"scan": _scan, "while": _while, "cond": _cond}
