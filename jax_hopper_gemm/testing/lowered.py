"""Which kernels a function runs on a GPU, found on any machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax

from ..spec import GemmSpec

_TARGET = "jax_hopper_gemm."


def specs_of(function: Callable[..., Any], *args: Any) -> list[GemmSpec]:
    """Returns the kernels that `function` launches for CUDA, in the order of the program.

    Args:
      args: arrays, or `jax.ShapeDtypeStruct`s.
    """
    return [GemmSpec.from_json(config["spec"].value) for config in _launches(function, *args)]


def grids_of(function: Callable[..., Any], *args: Any) -> list[tuple[int, int, int]]:
    """Returns the thread blocks, (x, y, z), of each launch of `function` for CUDA."""
    plans = (list(config["plan"]) for config in _launches(function, *args))
    return [(plan[1], plan[2], plan[3]) for plan in plans]


def _launches(function: Callable[..., Any], *args: Any) -> Iterator[Any]:
    """Yields what each launch in the program is told."""
    fresh = jax.jit(lambda *args: function(*args))  # JAX keeps what it lowered for a function
    lowered = fresh.trace(*args).lower(lowering_platforms=("cuda",))
    module: Any = lowered.compiler_ir("stablehlo")
    for operation in _operations(module.operation):
        if operation.name == "stablehlo.custom_call":
            attributes = operation.attributes
            if attributes["call_target_name"].value.startswith(_TARGET):
                yield attributes["mhlo.backend_config"]


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _operations(inner.operation)
