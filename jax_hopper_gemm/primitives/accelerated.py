"""The JAX primitive `accelerated`: a rewritten program, as one equation of the trace around it.

A trace that only writes equations down, as that of `jax.jit`, gets this one and need not trace the
program again. All others, as those of `jax.grad` and `jax.vmap`, run the program's own equations,
also when they come later and find the primitive in a jaxpr. It is lowered in place.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.core import ShapedArray, Tracer
from jax.extend import core
from jax.extend.core import Literal, jaxpr_as_fun, set_current_trace
from jax.extend.core.primitives import closed_call_p
from jax.interpreters import ad, mlir
from jax.interpreters import partial_eval as pe

from ..fusion.jaxprs import ClosedJaxpr, spliced, transpose_by
from ..lowering.register import lower_jaxpr
from .experimental import HopperPrimitive


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pauses Python's garbage collector, if it runs.

    Tracing, rewriting and lowering make many objects that stay, and few cycles of them; each pass
    of the collector would look through all that was made before. Threads may pause it at the
    same time: the one that found it running starts it again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def run_accelerated(closed: ClosedJaxpr, arrays: Sequence[Any]) -> list[Any]:
    """Returns the results of a program; those that it has without computing stay the same arrays.

    Effects are those of equations that the trace itself sees.
    """
    jaxpr: Any = closed.jaxpr
    if jaxpr.effects or getattr(jaxpr, "is_high", False):
        return list(jaxpr_as_fun(closed)(*arrays))
    inputs = [*jaxpr.constvars, *jaxpr.invars]  # what it closes over may be a tracer
    values = dict(zip(inputs, [*closed.consts, *arrays], strict=True))
    computed = [x for x in jaxpr.outvars if not isinstance(x, Literal) and x not in values]
    computed = list(dict.fromkeys(computed))
    if computed:
        whole = jaxpr.replace(constvars=[], invars=inputs, outvars=computed)
        params = {"call_jaxpr": core.ClosedJaxpr(whole, ())}  # pyright: ignore[reportPrivateImportUsage]
        found = accelerated_p.bind(*values.values(), **params)
        values.update(zip(computed, found, strict=True))
    values.update({x: _as_array(values[x], x) for x in jaxpr.constvars if x in jaxpr.outvars})
    return [_as_array(x.val, x) if isinstance(x, Literal) else values[x] for x in jaxpr.outvars]


def _as_array(constant: Any, atom: Any) -> Any:
    """Returns a constant of a program, which JAX may hold as a number of its own, as an array."""
    if isinstance(constant, jax.Array | Tracer):
        return constant
    array = np.asarray(constant, atom.aval.dtype)
    return jnp.asarray(array.item() if atom.aval.weak_type else array)


def _evaluated(*arrays: Any, call_jaxpr: ClosedJaxpr) -> list[Any]:
    return list(jaxpr_as_fun(call_jaxpr)(*arrays))


def with_equations_of_accelerated(jaxpr: Any) -> Any:
    """Returns an open jaxpr with the equations of programs that `accelerated` stands for."""
    if all(equation.primitive is not accelerated_p for equation in jaxpr.eqns):
        return jaxpr
    new: list[Any] = []
    for equation in jaxpr.eqns:
        if equation.primitive is accelerated_p:
            new += spliced(equation, equation.params["call_jaxpr"], source=False)
        else:
            new.append(equation)
    return jaxpr.replace(eqns=new)


class _Accelerated(HopperPrimitive):
    """Stands for a program where its arguments are those of a trace that writes equations down."""

    is_program = True
    skip_canonicalization = True  # of arguments: the program's equations do it

    def bind_with_trace(self, trace: Any, args: Any, avals: Any, params: Any, /) -> Any:
        tracers = [x for x in args if isinstance(x, Tracer)]
        written = tracers and all(isinstance(x, pe.DynamicJaxprTracer) for x in tracers)
        arrays = all(isinstance(x, ShapedArray) for x in avals)  # no mutable references
        if written and arrays and [*avals] == [*params["call_jaxpr"].in_avals]:
            return super().bind_with_trace(trace, args, avals, params)
        with set_current_trace(trace):
            return _evaluated(*args, **params)


def _lower(ctx: mlir.LoweringRuleContext, *values: Any, call_jaxpr: ClosedJaxpr) -> Any:
    with paused_collector():
        return lower_jaxpr(ctx, call_jaxpr, *values)


accelerated_p = _Accelerated("accelerated", _evaluated, (), None)
accelerated_p.multiple_results = True
accelerated_p.def_abstract_eval(lambda *_, call_jaxpr: list(call_jaxpr.out_avals))
ad.primitive_transposes[accelerated_p] = partial(transpose_by, _evaluated)
# Rules that take a part of the program.
pe.dce_rules[accelerated_p] = pe.dce_rules[closed_call_p]
_splits = pe.partial_eval_jaxpr_custom_rules
_splits[accelerated_p] = _splits[closed_call_p]
mlir.register_lowering(accelerated_p, _lower, cacheable=False)
