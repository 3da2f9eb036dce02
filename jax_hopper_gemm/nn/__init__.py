"""Flax layers on this library's products: nnx here, their linen twins in `nn.linen`.

A layer with a namesake in Flax has the same parameters, so checkpoints load either way. Bias,
activation and residual are fused into the GEMM, in float32 before the result is rounded, and so are
their gradients.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

try:
    import flax  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "jax_hopper_gemm.nn needs Flax, which is not installed: "
        'python -m pip install "jax-hopper-gemm[flax]"'
    ) from error

from .accelerate import accelerate as accelerate
from .accelerate import explain as explain
from .checkpoints import from_huggingface as from_huggingface
from .checkpoints import from_maxtext as from_maxtext
from .checkpoints import to_huggingface as to_huggingface
from .checkpoints import to_maxtext as to_maxtext
from .gate_up import from_pair as from_pair
from .gate_up import to_pair as to_pair
from .layers import MLP as MLP
from .layers import GatedLinear as GatedLinear
from .layers import GatedMLP as GatedMLP
from .layers import Linear as Linear
from .moe import MoE as MoE


def __getattr__(name: str) -> Any:
    """Imports `nn.linen`, and with it Flax's, where it is asked for."""
    if name == "linen":
        return import_module(".linen", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
