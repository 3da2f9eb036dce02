"""Which kernels a function runs on a GPU, found on any machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax

from ..spec import GemmSpec

_TARGET = "jax_hopper_gemm."


def specs_of(function: Callable[..., Any], *args: Any) -> list[GemmSpec]:
    """Returns the kernels that `function` launches for CUDA, in the order of the program.

    Args:
      args: arrays, or `jax.ShapeDtypeStruct`s.
    """
    fresh = jax.jit(lambda *args: function(*args))  # JAX keeps what it lowered for a function
    lowered = fresh.trace(*args).lower(lowering_platforms=("cuda",))
    module: Any = lowered.compiler_ir("stablehlo")
    found = []
    for operation in _operations(module.operation):
        if operation.name == "stablehlo.custom_call":
            attributes = operation.attributes
            if attributes["call_target_name"].value.startswith(_TARGET):
                found.append(GemmSpec.from_json(attributes["mhlo.backend_config"]["spec"].value))
    return found


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


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _operations(inner.operation)
