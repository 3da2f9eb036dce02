"""Which kernels a function runs on a GPU, found on any machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ..launches import launches_in
from ..spec import GemmSpec


def specs_of(function: Callable[..., Any], *args: Any) -> list[GemmSpec]:
    """Returns the kernels that `function` launches for CUDA, in the order of the program.

    Args:
      args: arrays, or `jax.ShapeDtypeStruct`s.
    """
    fresh = jax.jit(lambda *args: function(*args))  # JAX keeps what it lowered for a function
    lowered = fresh.trace(*args).lower(lowering_platforms=("cuda",))
    module = lowered.compiler_ir("stablehlo")
    return [GemmSpec.from_json(launch.spec) for launch in launches_in(module)]
