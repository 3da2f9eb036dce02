"""Which path a product takes and why: the answer that lowering follows and `explain` shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

from .. import dispatch
from ..dispatch.canonical import Gemm, NotAGemm, Roles, roles
from ..fusion import Fusion, GroupedRows, NotFusable, fuse
from ..fusion.jaxprs import ClosedJaxpr
from ..fusion.memo import memoised
from ..gemm.dtypes import short_name
from ..gemm.groups import GROUP, is_varlen_k
from ..gemm.raster import RasterOrder
from ..gemm.spec import GemmSpec
from ..launch.plan import LaunchPlan, make_plan
from .canonical import bare_form, canonical_form, request_violation, side_by_side
from .request import Request

# Axes in front of the rows of a ragged product, and of its groups.
ROW_LETTERS, GROUP_LETTERS = "ABCDEFGH", "STUVWXYZ"


@dataclass(frozen=True, eq=False)
class Route:
    """How one product runs: one object while `route` remembers the answer."""

    path: Literal["hopper", "xla"]  # a kernel of ours, or XLA's own product
    reason: str
    # What decided: "table", "user table", "model", or "unsupported" where no kernel can run it.
    source: str
    gemm: Gemm | None = None  # its canonical form, where it has one
    spec: GemmSpec | None = None  # the kernel; like its order None with "xla"
    raster_order: RasterOrder | None = None
    num_sms: int = 0  # that the launch may use
    fusion: Fusion | None = None  # what of the epilogue the kernel computes
    roles: Roles | None = None  # the axes that the epilogue was read for
    # Where products of one array are launched together, each with an epilogue: the same of these.
    # `fusion` and `roles` are the first one's.
    apart: tuple[Route, ...] = ()

    @cached_property
    def plan(self) -> LaunchPlan:
        """The kernel's launch, made when it is emitted: most routes are only weighed."""
        assert self.gemm and self.spec and self.raster_order
        return make_plan(self.gemm.problem, self.spec, self.raster_order, self.num_sms)

    @property
    def uncovered(self) -> tuple[str, ...]:
        """Names of the epilogue's operations that XLA computes after the kernel."""
        return self.fusion.uncovered if self.fusion else ()

    @property
    def epilogue(self) -> str:
        """What of the epilogue the kernel computes, reads and writes; "" where there is none."""
        if self.fusion is None:
            return ""
        graph = self.fusion.graph
        operations = list(dict.fromkeys(n.op for n in graph.nodes if n.op != "constant"))
        reads = [f"{operand.kind} {short_name(operand.dtype)}" for operand in graph.operands]
        writes = [
            f"{r.kind} {short_name(r.dtype)}" if r.kind == "matrix" else r.kind
            for r in graph.results
        ]
        parts = (("", operations), ("reads ", reads), ("writes ", writes))
        return "; ".join(verb + ", ".join(items) for verb, items in parts if items)

    @property
    def supported(self) -> bool:
        """Whether some kernel can run the product, chosen or not."""
        return self.source != "unsupported"

    def expected_ns(self, device: dispatch.Device) -> float:
        """Returns the kernel's expected time."""
        assert self.gemm and self.spec and self.raster_order
        return dispatch.estimate(self.gemm.problem, self.spec, self.raster_order, device).ns

    def unless(self, violation: str | None) -> Route:
        """Returns this route, or XLA's where a kernel's cannot be taken because of `violation`."""
        if violation is None or self.path == "xla":
            return self
        return Route(
            "xla", violation, "unsupported", self.gemm, fusion=self.fusion, roles=self.roles
        )


def route(request: Request, device: dispatch.Device, *, kernel_only: bool = False) -> Route:
    """Returns how a product runs on `device`.

    With `kernel_only`, XLA is the answer only where no kernel can run the product.
    """
    if reason := request_violation(request):
        return Route("xla", reason, "unsupported")
    read = read_for(request, device)
    device = device.limited_to(request.options.max_sms)
    # With block scales XLA would multiply float32 numbers.
    kernel_only = kernel_only or request.options.batch_invariant or request.blocks is not None
    return _route(request, device, kernel_only, read)


def read_for(request: Request, device: dispatch.Device) -> tuple[Any, ...]:
    """Returns the function that chooses a product's kernel, and the tables that it reads."""
    invariant = request.options.batch_invariant
    whole = replace(device.limited_to(request.options.max_sms), comm_overlap=False)
    choose = dispatch.choose_invariant if invariant else dispatch.choose
    return choose, dispatch.tables_of(whole)


@memoised
def _route(
    request: Request, device: dispatch.Device, kernel_only: bool, read: tuple[Any, ...]
) -> Route:
    """Returns the same; `read` is `read_for`."""
    choose, _ = read
    fusion = axes = None
    apart = [route(x, device, kernel_only=kernel_only) for x in request.apart if request.functions]
    try:
        if apart:
            gemm = side_by_side([_whole(x) for x in apart])
            fusion, axes = apart[0].fusion, apart[0].roles
        elif request.function:
            gemm, fusion, axes = _fused(request, request.function)
        else:
            gemm = bare_form(request)
    except (NotAGemm, NotFusable) as error:
        return Route("xla", str(error), "unsupported")
    by_xla = partial(Route, "xla", gemm=gemm, fusion=fusion, roles=axes)
    names = ", ".join(fusion.uncovered) if fusion else ""
    if names and request.options.batch_invariant:
        return by_xla(f"XLA would compute {names}, in an order of its own", "unsupported")
    decision = choose(gemm.problem, device, kernel_only=kernel_only)
    # The rest of an epilogue that a kernel can only begin reads the kernel's results from memory.
    # If one of them is a float32 matrix, nothing is saved: XLA would also store the product and
    # read it back, but once, in the pass that computes the whole epilogue.
    wide = fusion and any(result.dtype == "float32" for result in fusion.graph.matrices)
    if names and wide and not (request.groups or kernel_only):
        return by_xla(f"XLA computes {names}, and would read a float32 product for that", "model")
    if decision.spec is None or decision.raster_order is None:
        return by_xla(decision.reason, decision.source)
    return Route(
        "hopper", decision.reason, decision.source, gemm, decision.spec, decision.raster_order,
        device.num_sms, fusion, axes, tuple(replace(x, spec=decision.spec) for x in apart),
    )  # fmt: skip


def _whole(route: Route) -> Gemm:
    """Returns the canonical form of a product whose epilogue a kernel computes.

    Raises:
      NotFusable: XLA computes some of it.
    """
    if not (route.gemm and route.fusion):
        raise NotFusable(route.reason)
    if route.uncovered:
        raise NotFusable(f"XLA would compute {', '.join(route.uncovered)}")
    return route.gemm


def _fused(request: Request, function: ClosedJaxpr) -> tuple[Gemm, Fusion, Roles]:
    """Returns the canonical form of a product with an epilogue.

    Which axes are rows and columns decides what of the function is fused; how its operands vary
    decides which axes are. Begins with what broadcasting suggests of the operands, and settles.

    Raises:
      NotAGemm, NotFusable: with the reason.
    """
    if request.groups:
        return _fused_ragged(request, function)
    out = request.subscripts.out
    avals: Any = function.in_avals[request.accumulators :]
    expected = [_broadcast_label(aval.shape, out) for aval in avals]
    try:
        found = roles(request, expected)
    except NotAGemm:
        found = roles(request)
    for _ in range(3):
        fusion = fuse(function, request.accumulators, out, found.m, found.n)
        needed = roles(request, fusion.labels)
        if needed == found:
            return canonical_form(request, fusion, fusion.labels), fusion, found
        found = needed
    raise NotAGemm("the epilogue's operands leave open which axes of the result are rows")


def _fused_ragged(request: Request, function: ClosedJaxpr) -> tuple[Gemm, Fusion, Roles]:
    """Returns the canonical form of a ragged product with an epilogue; raises as `_fused`."""
    found, axis = roles(request), request.groups
    out = request.subscripts.out
    rows, merged = None, {}
    aval: Any = function.in_avals[0]
    if not is_varlen_k(request.subscripts) and axis:
        batch = len(aval.shape) - len(out)
        out = ROW_LETTERS[:batch] + out
        group_letters = GROUP_LETTERS[:batch] + GROUP
        found = replace(found, m=out.removesuffix(found.n))
        merged = {found.m: "m", group_letters: GROUP} if batch else {}
        rows = GroupedRows(
            request.sizes_operand, replace(axis.rule, step=0) if batch else axis.rule,
            group_letters, each=axis.rule.step != 0,
        )  # fmt: skip
    elif batch := len(aval.shape) - len(out):
        group_letters = GROUP_LETTERS[:batch] + GROUP
        out, merged = out.replace(GROUP, group_letters), {group_letters: GROUP}
        found = replace(found, batch=group_letters)
    fusion = fuse(function, request.accumulators, out, found.m, found.n, rows=rows)
    labels = list(fusion.labels)
    if is_varlen_k(request.subscripts):  # no groups are shared
        for long in merged:
            if any(GROUP in x and long not in x for x in labels):
                raise NotAGemm("an operand of the epilogue varies along some axes of the groups")
    for long, short in merged.items():
        labels = [x.replace(long, short) for x in labels]
    if any(x in ROW_LETTERS + GROUP_LETTERS for x in "".join(labels)):
        raise NotAGemm("an operand of the epilogue varies along some axes of the rows, not all")
    return canonical_form(request, fusion, labels), fusion, roles(request)


def _broadcast_label(shape: Sequence[int], out: str) -> str:
    """Returns the letters of the result that an array broadcast against it varies along."""
    if len(shape) > len(out):
        return ""
    aligned = zip(out[len(out) - len(shape) :], shape, strict=True)
    return "".join(letter for letter, extent in aligned if extent != 1)
