"""The equations of accelerated functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

import jax_hopper_gemm as jhg


def equations(function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Returns all equations of the accelerated function, also of inner programs."""

    def within(jaxpr: Any) -> list[Any]:
        found = []
        for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            if equation.primitive.name != "accelerated":  # which stands for those of its program
                found.append(equation)
            for inner in jaxprs_in_params(equation.params):
                found += [] if equation.primitive.name.startswith("hopper") else within(inner)
        return found

    return within(jax.make_jaxpr(jhg.accelerate(function, **options))(*args))


def accelerated(function: Callable[..., Any], *args: Any) -> Any:
    """Returns the program of the accelerated function, which is one equation of the trace."""
    (whole,) = jax.make_jaxpr(jhg.accelerate(function))(*args).eqns
    return whole.params["call_jaxpr"].jaxpr


def products(function: Callable[..., Any], *args: Any, **options: Any) -> list[tuple[Any, ...]]:
    """Returns of each product the number of right operands, dtypes of its results, its operations.

    The operations are those of its function, without conversions and broadcasts; None: there is no
    function.
    """
    silent = ("convert_element_type", "broadcast_in_dim", "copy")
    found = []
    for equation in equations(function, *args, **options):
        if not equation.primitive.name.startswith("hopper"):
            continue
        jaxpr = equation.params.get("jaxpr")
        dtypes = tuple(x.aval.dtype.name for x in equation.outvars)
        names = jaxpr and [e.primitive.name for e in jaxpr.eqns if e.primitive.name not in silent]
        found.append((equation.params.get("num_b", 1), dtypes, names))
    return found
