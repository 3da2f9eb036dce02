"""Which path a product takes and why: the answer that lowering follows and `explain` shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax.lax import DotAlgorithmPreset, Precision

from . import dispatch
from .contraction import Gemm, NotAGemm, as_gemm
from .plan import LaunchPlan, make_plan
from .spec import GemmSpec, Traversal

# Products of 16-bit floats are exact in float32, where the kernels add them: no `Precision` asks
# for more, and these algorithms ask for just that.
EXACT_ALGORITHMS = {
    "bfloat16": (DotAlgorithmPreset.DEFAULT, DotAlgorithmPreset.BF16_BF16_F32),
    "float16": (DotAlgorithmPreset.DEFAULT, DotAlgorithmPreset.F16_F16_F32),
}


@dataclass(frozen=True)
class Product:
    """What is asked of one product: subscripts, shapes, dtypes, precision."""

    subscripts: str
    lhs_shape: tuple[int, ...]
    lhs_dtype: str
    rhs_shape: tuple[int, ...]
    rhs_dtype: str
    out_dtype: str
    precision: Any = None

    def __str__(self) -> str:
        lhs = array_text(self.lhs_shape, self.lhs_dtype)
        rhs = array_text(self.rhs_shape, self.rhs_dtype)
        return f"{lhs} x {rhs} by {self.subscripts!r} into {short_dtype(self.out_dtype)}"


@dataclass(frozen=True)
class Route:
    """How one product runs.

    Attributes:
      path: "hopper" (a kernel of ours) or "xla".
      reason: why.
      source: what decided: "table", "user table", "model", or "unsupported" where no kernel can
        run the product.
      gemm: its canonical form, where it has one.
      spec, traversal, plan: the kernel, its order of tiles and its launch; None with "xla".
    """

    path: Literal["hopper", "xla"]
    reason: str
    source: str
    gemm: Gemm | None = None
    spec: GemmSpec | None = None
    traversal: Traversal | None = None
    plan: LaunchPlan | None = None

    @property
    def supported(self) -> bool:
        """Whether some kernel can run the product, chosen or not."""
        return self.source != "unsupported"

    def unless(self, violation: str | None) -> Route:
        """Returns this route, or XLA's where a kernel's cannot be taken because of `violation`."""
        if violation is None or self.path == "xla":
            return self
        return Route("xla", violation, "unsupported", self.gemm)


def route(product: Product, device: dispatch.Device, *, kernel_only: bool = False) -> Route:
    """Returns how `product` runs on `device`.

    With `kernel_only`, XLA is the answer only where no kernel can run the product.
    """
    if reason := _request_violation(product):
        return Route("xla", reason, "unsupported")
    try:
        gemm = as_gemm(
            product.subscripts, product.lhs_shape, product.rhs_shape,
            product.lhs_dtype, product.out_dtype,
        )  # fmt: skip
    except NotAGemm as error:
        return Route("xla", str(error), "unsupported")
    decision = dispatch.choose(gemm.problem, device, kernel_only=kernel_only)
    if decision.spec is None or decision.traversal is None:
        runs = not kernel_only and dispatch.choose(gemm.problem, device, kernel_only=True).spec
        return Route("xla", decision.reason, decision.source if runs else "unsupported", gemm)
    plan = make_plan(gemm.problem, decision.spec, decision.traversal, device.num_sms)
    return Route(
        "hopper", decision.reason, decision.source, gemm, decision.spec, decision.traversal, plan
    )


def _request_violation(product: Product) -> str | None:
    """Returns why no kernel can serve a product that no `GemmProblem` can express."""
    if not all(isinstance(extent, int) for extent in product.lhs_shape + product.rhs_shape):
        return "an extent is symbolic; a kernel is launched for extents that are known"
    if product.lhs_dtype != product.rhs_dtype:
        return (
            f"the operands are {product.lhs_dtype} and {product.rhs_dtype}; "
            "kernels take two operands of one dtype"
        )
    precision = product.precision
    if precision is None or isinstance(precision, tuple | Precision):
        return None
    accepted = EXACT_ALGORITHMS.get(product.lhs_dtype, (DotAlgorithmPreset.DEFAULT,))
    if precision in accepted:
        return None
    return f"precision is {precision}; kernels for {product.lhs_dtype} accumulate in float32"


def current_device(candidates: Sequence[Any] = ()) -> dispatch.Device:
    """Returns the kind of GPU a program is lowered for.

    That is the first of `candidates` that is a CUDA device, else this process's first one,
    else, for want of any, the H200.
    """
    for device in (*candidates, *_local_cuda_devices()):
        if capability := getattr(device, "compute_capability", None):
            major, minor = str(capability).split(".")
            return dispatch.Device((int(major), int(minor)), int(device.core_count))
    return dispatch.H200


def _local_cuda_devices() -> list[Any]:
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:  # no CUDA backend here
        return []


def short_dtype(dtype: str) -> str:
    """Returns a dtype as JAX prints it: "bf16", "f32", "i8"."""
    name = np.dtype(dtype).name if dtype != "bfloat16" else dtype
    for long, short in (
        ("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c"),
    ):  # fmt: skip
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


def array_text(shape: Sequence[int], dtype: str) -> str:
    """Returns an array as JAX prints it: "bf16[128,4096]"."""
    return f"{short_dtype(dtype)}[{','.join(map(str, shape))}]"
