"""`explain` and `supports`: which path a product takes and why, without running it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.typing import DTypeLike

from .. import dispatch
from ..dispatch.cost import estimate
from ..gemm.problem import GemmProblem
from ..gemm.spec import GemmSpec, RasterOrder
from ..launch.ffi_target import launcher_violation
from ..lowering.decide import decide
from ..lowering.route import array_text, current_device
from ..ops import checks
from ..ops.activations import Activation
from ..ops.batch_invariance import takes_batch_invariant
from ..ops.dense import Implementation, Preactivation, dot_general, matmul
from ..ops.gated import gated_linear_unit
from ..ops.ragged import ragged_dot, ragged_dot_general
from ..ops.ragged_run import left_to_lax
from ..ops.recipes import Recipe
from .find_product import TracedProduct, traced_product


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
      spec, raster_order: the kernel and its order of tiles; None with "xla".
      grid: thread blocks launched, (x, y, z).
      waves: rounds of tiles that the busiest SM computes; those to expect where the sizes of groups
        decide.
      epilogue: what the kernel computes after the product; empty for nothing.
      uncovered: names of the operations that follow the product and are XLA's.
      devices: over how many the operands lie. Above 1, all this is said of the whole product, and
        each device runs its shard, decided anew for its extents when XLA partitions the program.
    """

    product: str
    device: dispatch.Device
    path: str
    reason: str
    source: str
    problem: GemmProblem | None = None
    spec: GemmSpec | None = None
    raster_order: RasterOrder | None = None
    grid: tuple[int, int, int] | None = None
    waves: int | None = None
    epilogue: str = ""
    uncovered: tuple[str, ...] = ()
    devices: int = 1

    def __str__(self) -> str:
        major, minor = self.device.compute_capability
        of = "a limit of " if self.device.limited else ""
        lines = {
            "product": self.product,
            "device": f"compute capability {major}.{minor}, {of}{self.device.num_sms} SMs",
            "path": self.path,
            "because": f"{self.reason} ({self.source})",
        }
        if p := self.problem:
            lines["problem"] = (
                f"M={p.m} N={p.n} K={p.k} L={p.l}, A {p.a.major}-major, B {p.b.major}-major"
            )
            if g := p.groups:
                lines["groups"] = f"{g.total} along {g.axis.upper()}"
                if g.gathered:
                    lines["groups"] += f", {g.gathered.upper()}'s rows picked of {g.source_rows}"
        if (spec := self.spec) and (raster_order := self.raster_order):
            lines["kernel"] = spec.name
            lines["tile"] = (
                f"{spec.tile_m}x{spec.tile_n}x{spec.tile_k}, cluster "
                f"{spec.cluster_m}x{spec.cluster_n}, {spec.num_stages} stages, "
                f"{spec.warp_schedule}, {spec.tile_scheduler} scheduler"
            )
            lines["raster_order"] = f"along {raster_order.along}, swizzle {raster_order.swizzle}"
            lines["grid"] = f"{self.grid}, {self.waves} {'wave' if self.waves == 1 else 'waves'}"
        if self.epilogue:
            lines["epilogue"] = self.epilogue
        if self.uncovered:
            lines["by XLA"] = ", ".join(self.uncovered)
        if self.devices > 1:
            lines["devices"] = (
                f"{self.devices}, of which each runs its shard where XLA partitions the program; "
                "the above is of the whole product: explain arrays of the shards' shapes"
            )
        return "\n".join(f"{name:<10} {text}" for name, text in lines.items())


@takes_batch_invariant
def explain(
    a: Any,
    b: Any,
    *,
    dimension_numbers: Any = None,
    group_sizes: Any = None,
    group_offset: Any = None,
    row_indices: Any = None,
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
    cotangent_dtype: DTypeLike | None = None,
    out_sharding: Any = None,
    recipe: Recipe | None = None,
    implementation: Implementation = None,
    batch_invariant: bool | None = None,
) -> Explanation:
    """Returns how `matmul(a, b, ...)` runs on this process's GPU, or on an H200 where it has none.

    Its operands are arrays of their own. In a program they may be transposes, or arrays of a stack,
    which kernels read where they lie: `report_products` sees these.

    Args:
      a, b: arrays or `jax.ShapeDtypeStruct`s, as all other operands may be.
      dimension_numbers: if not None, explains `dot_general(a, b, dimension_numbers, ...)`, which
        takes none of the arguments from `bias` to `c`.
      group_sizes: if not None, explains `ragged_dot(a, b, group_sizes, ...)`, which takes none of
        those from `alpha` to `c` and no `residual`; or with a `jax.lax.RaggedDotDimensionNumbers`
        for `dimension_numbers` `ragged_dot_general`, which takes `alpha`, `beta` and `c` alone.
      group_offset, row_indices: of these.
      everything else: as in `matmul`.

    Raises:
      ValueError, TypeError: as the function would whose call is explained.
    """
    groups = {"group_sizes": group_sizes, "group_offset": group_offset, "row_indices": row_indices}
    added = {"alpha": alpha, "beta": beta, "c": c}
    dense = {"residual": residual} | added
    named = {"bias": bias, "activation": activation}
    steps = {
        "epilogue": epilogue,
        "epilogue_operands": epilogue_operands,
        "preactivation": preactivation,
    }
    options = {
        "precision": precision,
        "preferred_element_type": preferred_element_type,
        "cotangent_dtype": cotangent_dtype,
        "out_sharding": out_sharding,
        "recipe": recipe,
    }
    if group_sizes is None:
        checks.check_explained("matmul", "no group_sizes", groups)
        if dimension_numbers is None:
            return _explained(matmul, a, b, dense | named | steps | options, implementation)
        checks.check_explained("dot_general", "dimension_numbers", named | dense)
        options |= steps | {"dimension_numbers": dimension_numbers}
        return _explained(dot_general, a, b, options, implementation)
    if dimension_numbers is None:
        checks.check_explained("ragged_dot", "group_sizes", dense)
        options |= groups | named | steps
        return _explained(ragged_dot, a, b, options, implementation)
    refused = named | {"residual": residual, "epilogue": epilogue, "row_indices": row_indices}
    checks.check_explained("ragged_dot_general", "group_sizes and dimension_numbers", refused)
    options |= added | {
        "group_sizes": group_sizes,
        "group_offset": group_offset,
        "ragged_dot_dimension_numbers": dimension_numbers,
    }
    return _explained(ragged_dot_general, a, b, options, implementation)


@takes_batch_invariant
def explain_gated_linear_unit(
    x: Any,
    weights: Any,
    *,
    implementation: Implementation = None,
    batch_invariant: bool | None = None,
    **options: Any,
) -> Explanation:
    """Returns how `gated_linear_unit(x, weights, ...)` runs, as `explain` does of a product.

    Args:
      x, weights, options: as in `gated_linear_unit`; arrays may be `jax.ShapeDtypeStruct`s.
    """
    return _explained(gated_linear_unit, x, weights, options, implementation)


def _explained(
    function: Callable[..., Any], a: Any, b: Any, options: dict[str, Any], implementation: Any
) -> Explanation:
    """Returns how `function(a, b, **options)` runs."""
    call = traced_product(function, a, b, options)
    if call is None:
        device = current_device()
        product = " x ".join(array_text(x.shape, x.dtype.name) for x in (a, b))
        numbers = options.get("ragged_dot_dimension_numbers")
        reason = left_to_lax(a, b, options["group_sizes"], options["out_sharding"], numbers)
        explanation = Explanation(product, device, "xla", str(reason), "unsupported")
    else:
        explanation = explanation_of(call, implementation)
    return replace(explanation, devices=max(_devices_of(a), _devices_of(b)))


def _devices_of(x: Any) -> int:
    """Returns over how many devices an array lies; 1 where nothing says so."""
    return getattr(getattr(x, "sharding", None), "num_devices", None) or 1


def explanation_of(call: TracedProduct, implementation: Implementation) -> Explanation:
    """Returns how a product runs that was found by tracing."""
    device = current_device().limited_to(call.request.options.max_sms)
    text = str(call.request)
    if implementation == "xla":
        return Explanation(text, device, "xla", "implementation='xla'", "request")
    insist = implementation == "hopper" or call.request.options.insists is not None
    decision = decide(call.request, call.origins(), device, kernel_only=insist)
    route, violation = decision.route, launcher_violation()
    if route.path == "xla" or violation:
        if not (insist or violation) and (apart := _explained_apart(call, route.reason)):
            return apart
        route = route.unless(violation)
        problem = route.gemm.problem if route.gemm else None
        return Explanation(text, device, "xla", route.reason, route.source, problem)
    assert route.gemm and route.spec and route.raster_order and route.plan
    cost = estimate(route.gemm.problem, route.spec, route.raster_order, device)
    return Explanation(
        text, device, "hopper", decision.reason, route.source, route.gemm.problem,
        route.spec, route.raster_order, route.plan.grid, waves=cost.waves,
        epilogue=route.epilogue, uncovered=(*route.uncovered, *call.following),
    )  # fmt: skip


def _explained_apart(call: TracedProduct, reason: str) -> Explanation | None:
    """Returns how a product runs without its epilogue; None if not on a kernel."""
    if (bare := call.apart()) is None:
        return None
    alone = explanation_of(bare, None)
    if alone.path == "xla":
        return None
    reason = f"{alone.reason}; XLA computes the epilogue: {reason}"
    uncovered = (*alone.uncovered, *call.following)
    return replace(alone, product=str(call.request), reason=reason, uncovered=uncovered)


def supports(a: Any, b: Any, **options: Any) -> tuple[bool, str]:
    """Returns whether a kernel can run `matmul(a, b, ...)`, and why or why not.

    That it can does not make it the faster way: `explain` says which path is taken, and which
    part of an epilogue the kernel computes.

    Args:
      as in `explain`, without `implementation`.
    """
    explanation = explain(a, b, **options, implementation="hopper")
    return explanation.path == "hopper", explanation.reason
