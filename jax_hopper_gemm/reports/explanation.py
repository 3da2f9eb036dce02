"""`Explanation`: which path one product takes and why, without running it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import dispatch
from ..dispatch.cost import estimate
from ..gemm.problem import GemmProblem
from ..gemm.raster import RasterOrder
from ..gemm.spec import GemmSpec
from ..launch.ffi_target import launcher_violation
from ..lowering.decide import decide
from ..lowering.devices import current_device
from ..ops.dense import Implementation
from .find_product import TracedProduct


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
