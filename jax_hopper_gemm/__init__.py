"""GEMM kernels for NVIDIA Hopper, called from JAX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .lowering.fallback import FallbackWarning as FallbackWarning
from .ops import dot_general as dot_general
from .ops import einsum as einsum
from .ops import gated_linear_unit as gated_linear_unit
from .ops import matmul as matmul
from .ops import max_sms as max_sms
from .ops import ragged_dot as ragged_dot
from .ops import ragged_dot_general as ragged_dot_general

if TYPE_CHECKING:
    from . import moe as moe
    from .collective import all_gather_matmul as all_gather_matmul
    from .collective import matmul_reduce_scatter as matmul_reduce_scatter
    from .interop import accelerate as accelerate
    from .interop import checkpoint_policy as checkpoint_policy
    from .interop import intercept_ragged_dot as intercept_ragged_dot
    from .reports import Explanation as Explanation
    from .reports import FoundProduct as FoundProduct
    from .reports import ProductReport as ProductReport
    from .reports import explain as explain
    from .reports import explain_gated_linear_unit as explain_gated_linear_unit
    from .reports import report_products as report_products
    from .reports import supports as supports
    from .sharding.export import export_disabled_checks as export_disabled_checks

# Modules that are imported when one of their names is first asked for.
_LAYERS = {
    "collective": ("all_gather_matmul", "matmul_reduce_scatter"),
    "interop": ("accelerate", "checkpoint_policy", "intercept_ragged_dot"),
    "reports": (
        "Explanation", "FoundProduct", "ProductReport", "explain", "explain_gated_linear_unit",
        "report_products", "supports",
    ),
    "sharding.export": ("export_disabled_checks",),
}  # fmt: skip
_LAYER_OF = {name: layer for layer, names in _LAYERS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "moe":
        return importlib.import_module(f"{__name__}.moe")
    if name not in _LAYER_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LAYER_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAYER_OF, "moe"})
