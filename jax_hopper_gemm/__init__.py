"""GEMM kernels for NVIDIA Hopper, called from JAX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .lowering.fallback import FallbackWarning as FallbackWarning
from .lowering.fallback import on_fallback as on_fallback
from .ops import Quantized as Quantized
from .ops import batch_invariant as batch_invariant
from .ops import dot_general as dot_general
from .ops import einsum as einsum
from .ops import gated_linear_unit as gated_linear_unit
from .ops import matmul as matmul
from .ops import max_sms as max_sms
from .ops import quantize as quantize
from .ops import ragged_dot as ragged_dot
from .ops import ragged_dot_general as ragged_dot_general
from .ops import recipes as recipes

if TYPE_CHECKING:
    from . import moe as moe
    from . import nn as nn
    from .collective import all_gather_matmul as all_gather_matmul
    from .collective import matmul_reduce_scatter as matmul_reduce_scatter
    from .interop import accelerate as accelerate
    from .interop import intercept_ragged_dot as intercept_ragged_dot
    from .reports import Explanation as Explanation
    from .reports import ProductReport as ProductReport
    from .reports import explain as explain
    from .sharding.export import export_disabled_checks as export_disabled_checks

    __version__: str

# All but `__version__` and `nn`: a star import must work without Flax.
__all__ = [
    "Explanation", "FallbackWarning", "ProductReport", "Quantized", "accelerate",
    "all_gather_matmul", "batch_invariant", "dot_general", "einsum", "explain",
    "export_disabled_checks", "gated_linear_unit", "intercept_ragged_dot", "matmul",
    "matmul_reduce_scatter", "max_sms", "moe", "on_fallback", "quantize", "ragged_dot",
    "ragged_dot_general", "recipes",
]  # fmt: skip

# Modules that are imported when one of their names is first asked for.
_LAYERS = {
    "collective": ("all_gather_matmul", "matmul_reduce_scatter"),
    "interop": ("accelerate", "intercept_ragged_dot"),
    "reports": ("Explanation", "ProductReport", "explain"),
    "sharding.export": ("export_disabled_checks",),
}  # fmt: skip
_LAYER_OF = {name: layer for layer, names in _LAYERS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in ("moe", "nn"):
        return importlib.import_module(f"{__name__}.{name}")
    if name == "__version__":
        value = _version()
    elif name in _LAYER_OF:
        value = getattr(importlib.import_module(f"{__name__}.{_LAYER_OF[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "nn"])


def _version() -> str:
    """Returns the installed version, or that of the source tree if none is installed."""
    from importlib import metadata

    try:
        return metadata.version("jax-hopper-gemm")
    except metadata.PackageNotFoundError:
        import tomllib
        from pathlib import Path

        project = Path(__file__).parents[1] / "pyproject.toml"
        return tomllib.loads(project.read_text())["project"]["version"]
