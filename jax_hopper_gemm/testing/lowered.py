"""Which kernels a function runs on a GPU, found on any machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from ..gemm.spec import GemmSpec
from ..lowering.read_calls import Launch, launches_in


def specs_of(function: Callable[..., Any], *args: Any) -> list[GemmSpec]:
    """Returns the kernels that `function` launches for CUDA, in the order of the program.

    Args:
      args: arrays, or `jax.ShapeDtypeStruct`s.
    """
    return [GemmSpec.from_json(launch.spec) for launch in _launches(function, *args)]


def grids_of(function: Callable[..., Any], *args: Any) -> list[tuple[int, int, int]]:
    """Returns the thread blocks, (x, y, z), of each launch of `function` for CUDA."""
    plans = (launch.plan for launch in _launches(function, *args))
    return [(plan[1], plan[2], plan[3]) for plan in plans]


def _launches(function: Callable[..., Any], *args: Any) -> list[Launch]:
    fresh = jax.jit(lambda *args: function(*args))  # JAX keeps what it lowered for a function
    lowered = fresh.trace(*args).lower(lowering_platforms=("cuda",))
    return launches_in(lowered.compiler_ir("stablehlo"))


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
