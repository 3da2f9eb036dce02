"""Excerpts of programs: a product and what follows it, as functions that can be timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jax import lax
from jax.extend import core
from jax.extend.core import jaxpr_as_fun

from jax_hopper_gemm.fusion.jaxprs import ClosedJaxpr, evaluated, traced
from jax_hopper_gemm.fusion.residuals import variables
from jax_hopper_gemm.interop.rewrite_jaxpr import RAGGED, Rewriting, rewritten, traced_call
from jax_hopper_gemm.primitives.define import PRODUCTS

MOVES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "transpose"})
# What XLA computes apart from the product whose result it reads.
APART = frozenset({"conv_general_dilated", "gather", "optimization_barrier", "scatter-add"})


def excerpts(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Iterator[ClosedJaxpr]:
    """Yields an excerpt for each product of a function that `accelerate` has rewritten.

    They have the order of `explain`'s report. Functions that the program calls are part of it.
    """
    original, arrays, _ = traced_call(function, arguments, {})
    program = rewritten(original, Rewriting(weights=(True,) * len(arrays)))
    jaxpr = traced(lambda *args: evaluated(program, args), *program.in_avals).jaxpr
    for number, equation in enumerate(jaxpr.eqns):
        if is_product(equation):
            yield excerpt(jaxpr, number)


def is_product(equation: Any) -> bool:
    primitive = equation.primitive
    return primitive in PRODUCTS or primitive is lax.dot_general_p or primitive.name == RAGGED


def excerpt(jaxpr: Any, number: int) -> ClosedJaxpr:
    """Returns the closed jaxpr of a product, an equation of `jaxpr`, and of what follows it.

    That is all which depends on the product but on no later one that reads it. What moves elements
    before it is there, too: a product reads transposes as they lie. What only moves elements of a
    result is not, since XLA would leave them where they are.
    """
    product = jaxpr.eqns[number]
    made, beyond, numbers = set(product.outvars), set[Any](), {number}
    makers: dict[Any, int] = {}
    for i, equation in enumerate(jaxpr.eqns):
        makers.update(dict.fromkeys(equation.outvars, i))
        inputs = set(variables(equation.invars))
        if i <= number or inputs.isdisjoint(made | beyond):
            continue
        apart = is_product(equation) or equation.primitive.name in APART
        if apart or not inputs.isdisjoint(beyond):
            beyond.update(equation.outvars)
        else:
            made.update(equation.outvars)
            numbers.add(i)

    def moved(x: Any) -> bool:
        return x in makers and jaxpr.eqns[makers[x]].primitive.name in MOVES

    read = set(variables(jaxpr.outvars))
    for i, equation in enumerate(jaxpr.eqns):
        read.update(() if i in numbers else variables(equation.invars))
    results: dict[Any, None] = {}
    for x in (x for i in sorted(numbers) for x in jaxpr.eqns[i].outvars if x in read):
        while moved(x):
            (x,) = variables(jaxpr.eqns[makers[x]].invars)
        results[x] = None
    pending = [x for i in numbers for x in variables(jaxpr.eqns[i].invars)]
    while pending:
        x = pending.pop()
        if x not in made and moved(x) and makers[x] not in numbers:
            numbers.add(makers[x])
            pending += variables(jaxpr.eqns[makers[x]].invars)
    equations = [jaxpr.eqns[i] for i in sorted(numbers)]
    inside = {x for equation in equations for x in equation.outvars}
    arguments = dict.fromkeys(x for e in equations for x in variables(e.invars) if x not in inside)
    cut = jaxpr.replace(
        constvars=[], invars=[*arguments], outvars=[*results], eqns=equations,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )  # fmt: skip
    return closed(cut)


def closed(jaxpr: Any) -> ClosedJaxpr:
    return core.ClosedJaxpr(jaxpr, [])  # pyright: ignore[reportPrivateImportUsage]


def by(cut: ClosedJaxpr, implementation: str) -> Callable[..., Any]:
    """Returns an excerpt as a function whose product has this implementation."""

    def with_implementation(equation: Any) -> Any:
        if equation.primitive not in PRODUCTS:
            return equation
        product = equation.params["product"].with_options(implementation=implementation)
        return equation.replace(params=equation.params | {"product": product})

    equations = [*map(with_implementation, cut.jaxpr.eqns)]
    return jaxpr_as_fun(closed(cut.jaxpr.replace(eqns=equations)))


def computing(cut: ClosedJaxpr) -> list[Any]:
    """Returns the equations of an excerpt that compute something."""
    return [e for e in cut.jaxpr.eqns if e.primitive.name not in MOVES]


def steps(cut: ClosedJaxpr) -> tuple[Any, ...]:
    """Returns what two excerpts have in common that take the same time."""
    done = ((e.primitive.name, *(str(x.aval) for x in e.outvars)) for e in computing(cut))
    return (*map(str, (*cut.in_avals, *cut.out_avals)), *done)
