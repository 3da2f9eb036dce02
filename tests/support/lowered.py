"""Grids of a function's launches, and its kernels where each operation runs alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.testing.lowered import launches_of, specs_of


def grids_of(function: Callable[..., Any], *args: Any) -> list[tuple[int, int, int]]:
    """Returns the thread blocks, (x, y, z), of each launch of `function` for CUDA."""
    plans = (launch.plan for launch in launches_of(function, *args))
    return [(plan[1], plan[2], plan[3]) for plan in plans]


def specs_apart(function: Callable[..., Any], *args: Any) -> list[GemmSpec]:
    """Returns the kernels of `function` where each operation is a program of its own.

    So they run under `jax.disable_jit`, and what would be one product's epilogue is none.
    """
    with jax.disable_jit():
        program: Any = jax.make_jaxpr(function)(*args)
    found = []
    for equation in program.jaxpr.eqns:
        if equation.primitive.name.startswith(("hopper_", "epilogue")):
            bind = partial(equation.primitive.bind, **equation.params)
            found += specs_of(bind, *(x.aval for x in equation.invars))
    return found
