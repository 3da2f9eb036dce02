"""Kernels that a function launches on a GPU, found on any machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ..gemm.kernel_params import KernelSpec, spec_from_json
from ..gemm.spec import GemmSpec
from ..lowering.call import Launch, launches_in


def specs_of(function: Callable[..., Any], *args: Any) -> list[GemmSpec]:
    """Returns the kernels of `function`'s products for CUDA, in the order of the program.

    Args:
      args: arrays, or `jax.ShapeDtypeStruct`s.
    """
    return [spec for spec in all_specs_of(function, *args) if isinstance(spec, GemmSpec)]


def all_specs_of(function: Callable[..., Any], *args: Any) -> list[KernelSpec]:
    """Returns all kernels that `function` launches for CUDA, those that quantize, too."""
    return [spec_from_json(launch.spec) for launch in launches_of(function, *args)]


def launches_of(function: Callable[..., Any], *args: Any) -> list[Launch]:
    """Returns the launches of `function` for CUDA, in the order of the program."""
    fresh = jax.jit(lambda *args: function(*args))  # JAX keeps what it lowered for a function
    lowered = fresh.trace(*args).lower(lowering_platforms=("cuda",))
    return launches_in(lowered.compiler_ir("stablehlo"))
