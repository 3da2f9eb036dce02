"""`explain` and `supports`: which path a product takes and why, without running it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params
from jax.typing import DTypeLike

from .. import dispatch
from ..fused import hopper_fused_p
from ..fused import product_of as fused_product_of
from ..lowering import launcher_violation
from ..plan import ceil_div, max_clusters
from ..primitive import hopper_dot_p, product_of
from ..problem import GemmProblem
from ..routing import Product, current_device, route
from ..spec import GemmSpec, Traversal
from . import checks
from .activations import Activation
from .dense import Implementation, Preactivation, dot_general, matmul


@dataclass(frozen=True)
class Explanation:
    """How a product runs. `str` makes it a report.

    Attributes:
      product: what was asked, as text.
      device: the kind of GPU it was decided for.
      path: "hopper" (a kernel of this library) or "xla".
      reason: why.
      source: what decided: "table", "user table", "model", "request" (by `implementation`), or
        "unsupported" where no kernel can run the product.
      problem: the product as the kernel sees it, where it has that form. A and B may have
        changed places, so that the result's last axis is N.
      spec, traversal: the kernel and its order of tiles; None with "xla".
      grid: thread blocks launched, (x, y, z).
      waves: rounds of tiles that the busiest SM computes.
      epilogue: what the kernel computes after the product; empty for nothing.
      uncovered: names of the operations that follow the product and are XLA's.
    """

    product: str
    device: dispatch.Device
    path: str
    reason: str
    source: str
    problem: GemmProblem | None = None
    spec: GemmSpec | None = None
    traversal: Traversal | None = None
    grid: tuple[int, int, int] | None = None
    waves: int | None = None
    epilogue: str = ""
    uncovered: tuple[str, ...] = ()

    def __str__(self) -> str:
        major, minor = self.device.compute_capability
        lines = {
            "product": self.product,
            "device": f"compute capability {major}.{minor}, {self.device.num_sms} SMs",
            "path": self.path,
            "because": f"{self.reason} ({self.source})",
        }
        if p := self.problem:
            lines["problem"] = (
                f"M={p.m} N={p.n} K={p.k} L={p.l}, A {p.a.major}-major, B {p.b.major}-major"
            )
        if (spec := self.spec) and (traversal := self.traversal):
            lines["kernel"] = spec.name
            lines["tile"] = (
                f"{spec.tile_m}x{spec.tile_n}x{spec.tile_k}, cluster "
                f"{spec.cluster_m}x{spec.cluster_n}, {spec.num_stages} stages, "
                f"{spec.warp_schedule}, {spec.tile_scheduler} scheduler"
            )
            lines["traversal"] = f"along {traversal.along}, swizzle {traversal.swizzle}"
            lines["grid"] = f"{self.grid}, {self.waves} {'wave' if self.waves == 1 else 'waves'}"
        if self.epilogue:
            lines["epilogue"] = self.epilogue
        if self.uncovered:
            lines["by XLA"] = ", ".join(self.uncovered)
        return "\n".join(f"{name:<10} {text}" for name, text in lines.items())


def explain(
    a: Any,
    b: Any,
    *,
    dimension_numbers: Any = None,
    bias: Any = None,
    residual: Any = None,
    activation: str | Activation | None = None,
    alpha: Any = None,
    beta: Any = None,
    c: Any = None,
    epilogue: Callable[..., Any] | None = None,
    epilogue_operands: Sequence[Any] = (),
    preactivation: Preactivation = "save",
    precision: Any = None,
    preferred_element_type: DTypeLike | Sequence[DTypeLike] | None = None,
    out_sharding: Any = None,
    implementation: Implementation = None,
) -> Explanation:
    """Returns how `matmul(a, b, ...)` runs on this process's GPU, or on an H200 where it has none.

    Operands of a lowered program that are transposes are read as they lie in memory, which this
    cannot see: pass the stored arrays and `dimension_numbers`.

    Args:
      a, b: arrays or `jax.ShapeDtypeStruct`s, as all other operands may be.
      dimension_numbers: if not None, explains `dot_general(a, b, dimension_numbers, ...)`, which
        takes none of the arguments from `bias` to `c`.
      everything else: as in `matmul`.

    Raises:
      ValueError, TypeError: as `matmul` or `dot_general` would.
    """
    named = {
        "bias": bias, "residual": residual, "activation": activation, "alpha": alpha,
        "beta": beta, "c": c,
    }  # fmt: skip
    options = {
        "epilogue": epilogue,
        "epilogue_operands": epilogue_operands,
        "preactivation": preactivation,
        "precision": precision,
        "preferred_element_type": preferred_element_type,
        "out_sharding": out_sharding,
    }
    if dimension_numbers is None:
        call, options = matmul, named | options
    else:
        checks.check_explained_dot_general(named)
        call, options = dot_general, options | {"dimension_numbers": dimension_numbers}
    device = current_device()
    traced = _traced(call, a, b, options)
    asked = str(traced.product)
    if implementation == "xla":
        return Explanation(asked, device, "xla", "implementation='xla'", "request")
    found = route(traced.product, device, kernel_only=implementation == "hopper")
    found = found.unless(launcher_violation())
    if found.path == "xla":
        problem = found.gemm.problem if found.gemm else None
        return Explanation(asked, device, "xla", found.reason, found.source, problem)
    assert found.gemm and found.spec and found.plan
    tiles = found.gemm.problem.l
    tiles *= ceil_div(found.gemm.problem.m, found.spec.tile_m * found.spec.cluster_m)
    tiles *= ceil_div(found.gemm.problem.n, found.spec.tile_n * found.spec.cluster_n)
    return Explanation(
        asked, device, "hopper", found.reason, found.source, found.gemm.problem,
        found.spec, found.traversal, found.plan.grid,
        waves=ceil_div(tiles, max_clusters(found.spec, device.num_sms)),
        epilogue=found.epilogue, uncovered=(*found.uncovered, *traced.rest),
    )  # fmt: skip


def supports(a: Any, b: Any, **options: Any) -> tuple[bool, str]:
    """Returns whether a kernel can run `matmul(a, b, ...)`, and why or why not.

    That it can does not make it the faster way: `explain` says which path is taken, and which
    part of an epilogue the kernel computes.

    Args:
      as in `explain`, without `implementation`.
    """
    found = explain(a, b, **options, implementation="hopper")
    return found.path == "hopper", found.reason


@dataclass(frozen=True)
class _Call:
    """The one product that a call becomes, and the operations that follow it outside of it."""

    product: Product
    rest: tuple[str, ...]


def _traced(function: Callable[..., Any], a: Any, b: Any, options: dict[str, Any]) -> _Call:
    arrays = {k: x for k, x in options.items() if k == "epilogue_operands" or hasattr(x, "shape")}

    def call(a: Any, b: Any, arrays: dict[str, Any]) -> Any:
        return function(a, b, **{**options, **arrays})

    equations = jax.make_jaxpr(call)(a, b, arrays).jaxpr.eqns
    (i,) = (i for i, e in enumerate(equations) if e.primitive in (hopper_dot_p, hopper_fused_p))
    equation, rest = equations[i], _operations(equations[i + 1 :])
    avals = [v.aval for v in equation.invars]
    if equation.primitive is hopper_fused_p:
        return _Call(fused_product_of(avals, equation.params), rest)
    lhs, rhs = avals
    return _Call(product_of(lhs, rhs, equation.outvars[0].aval, equation.params), rest)


# Operations that say where elements lie and what their dtype is, not what is computed.
SILENT = frozenset(
    {"broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze", "transpose"}
)


def _operations(equations: Sequence[Any]) -> tuple[str, ...]:
    """Returns the names of what equations compute, each once, in order."""
    names: list[str] = []
    for equation in equations:
        inner = list(jaxprs_in_params(equation.params))
        for jaxpr in inner:
            names += _operations(getattr(jaxpr, "jaxpr", jaxpr).eqns)
        if not inner and equation.primitive.name not in SILENT:
            names.append(equation.primitive.name)
    return tuple(dict.fromkeys(names))
