"""Which path a product takes and why: the answer that lowering follows and `explain` shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

import jax
import numpy as np
from jax.lax import DotAlgorithmPreset, Precision

from .. import dispatch
from ..dispatch.canonical import (
    Gemm,
    NotAGemm,
    Roles,
    as_gemm,
    as_grouped_gemm,
    ragged_extents,
    ragged_roles,
    roles,
)
from ..fusion import Fusion, GroupedRows, NotFusable, fuse
from ..fusion.jaxprs import ClosedJaxpr
from ..fusion.memo import Memory, memoised
from ..gemm.groups import GROUPS, Spans, gate_letter, is_contraction
from ..gemm.spec import GemmSpec, RasterOrder
from ..gemm.subscripts import split, stacked_letter
from ..launch.plan import LaunchPlan, make_plan

# Axes in front of the rows of a ragged product, and of its groups.
ROW_LETTERS, GROUP_LETTERS = "ABCDEFGH", "STUVWXYZ"

# Products of 16-bit floats are exact in float32, where the kernels add them: no `Precision` asks
# for more, and these algorithms ask for just that.
EXACT_ALGORITHMS = {
    "bfloat16": (DotAlgorithmPreset.DEFAULT, DotAlgorithmPreset.BF16_BF16_F32),
    "float16": (DotAlgorithmPreset.DEFAULT, DotAlgorithmPreset.F16_F16_F32),
}


@dataclass(frozen=True)
class Product:
    """What is asked of one product: subscripts, shapes, dtypes, precision, an epilogue.

    Attributes:
      out_dtype: dtype of the result; with an epilogue, of its first one.
      rights: 2 for a gate and an up operand in two arrays of one shape.
      function: the epilogue, over the accumulators and its operands; None: there is none. Of a
        ragged product of rows it knows groups by the operations of `group_rows`. Where `vmap`
        added axes, its accumulators have the rows in several, those of a contraction the groups.
      spans: of a ragged product which spans of rows belong to which group; the subscripts are one
        of the forms in `spans`.
      sizes: number of sizes that cut the rows into spans.
      sizes_operand: which operand of the function are these sizes, if one is; before `vmap` put
        them behind one another.
      gathered, source: as in `problem.Groups`: the left ("a") or right operand is rows that are
        picked of an array with `source` rows.
      max_sms: how many SMs a kernel may use; None: all.
      indexed, stack: as in `GemmProblem`: the left ("a") or right operand is one array of a stack
        of so many.
    """

    subscripts: str
    lhs_shape: tuple[int, ...]
    lhs_dtype: str
    rhs_shape: tuple[int, ...]
    rhs_dtype: str
    out_dtype: str
    precision: Any = None
    rights: int = 1
    function: ClosedJaxpr | None = None
    spans: Spans | None = None
    sizes: int = 0
    sizes_operand: int | None = None
    gathered: Literal["a", "b"] | None = None
    source: int = 0
    max_sms: int | None = None
    indexed: Literal["a", "b"] | None = None
    stack: int = 1

    @property
    def accumulators(self) -> int:
        letter = gate_letter if self.spans else stacked_letter
        return 2 if self.rights == 2 or letter(self.subscripts) else 1

    @property
    def extents(self) -> dict[str, int]:
        """The extent of each letter."""
        shapes = self.lhs_shape, self.rhs_shape
        if self.spans:
            return ragged_extents(self.subscripts, *shapes, self.spans, self.sizes)
        lhs, rhs, _ = split(self.subscripts)
        return dict(zip(lhs + rhs, (*self.lhs_shape, *self.rhs_shape), strict=True))

    def __str__(self) -> str:
        lhs = array_text(self.lhs_shape, self.lhs_dtype)
        rhs = " and ".join([array_text(self.rhs_shape, self.rhs_dtype)] * self.rights)
        text = f"{lhs} x {rhs} by {self.subscripts!r} into {short_dtype(self.out_dtype)}"
        if self.spans:
            of = "contracted in" if is_contraction(self.subscripts) else "in"
            text += f", rows {of} {self.spans.matrices(self.sizes)} groups"
        return f"{text} with an epilogue" if self.function else text


@dataclass(frozen=True)
class Route:
    """How one product runs.

    Attributes:
      path: "hopper" (a kernel of ours) or "xla".
      reason: why.
      source: what decided: "table", "user table", "model", or "unsupported" where no kernel can
        run the product.
      gemm: its canonical form, where it has one.
      spec, raster_order, plan: the kernel, its order of tiles and its launch; None with "xla".
      fusion, roles: what of the epilogue the kernel computes, and the axes that it was read for.
    """

    path: Literal["hopper", "xla"]
    reason: str
    source: str
    gemm: Gemm | None = None
    spec: GemmSpec | None = None
    raster_order: RasterOrder | None = None
    plan: LaunchPlan | None = None
    fusion: Fusion | None = None
    roles: Roles | None = None

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
        reads = [f"{operand.kind} {short_dtype(operand.dtype)}" for operand in graph.operands]
        writes = [
            f"{r.kind} {short_dtype(r.dtype)}" if r.kind == "matrix" else r.kind
            for r in graph.results
        ]
        parts = (("", operations), ("reads ", reads), ("writes ", writes))
        return "; ".join(verb + ", ".join(items) for verb, items in parts if items)

    @property
    def supported(self) -> bool:
        """Whether some kernel can run the product, chosen or not."""
        return self.source != "unsupported"

    @cached_property
    def launch_attributes(self) -> dict[str, Any]:
        """What the launch carries: digest and description of the kernel, name, plan."""
        from ..cubin import digest_of  # brings cuda-python with it

        assert self.gemm and self.spec and self.plan
        problem = self.gemm.problem
        return {
            "digest": digest_of(self.spec),
            "spec": self.spec.to_json(),
            "name": f"{self.spec.name} M={problem.m} N={problem.n} K={problem.k} L={problem.l}",
            "plan": np.array(self.plan.encode(), np.int64),
        }

    @cached_property
    def finishes(self) -> Memory:
        """What finishes the kernel's results, as jaxprs by their abstract values."""
        return Memory()

    def unless(self, violation: str | None) -> Route:
        """Returns this route, or XLA's where a kernel's cannot be taken because of `violation`."""
        if violation is None or self.path == "xla":
            return self
        return Route(
            "xla", violation, "unsupported", self.gemm, fusion=self.fusion, roles=self.roles
        )


def route(product: Product, device: dispatch.Device, *, kernel_only: bool = False) -> Route:
    """Returns how `product` runs on `device`.

    With `kernel_only`, XLA is the answer only where no kernel can run the product.
    """
    return _route(product.function, product, device, kernel_only, dispatch.decided_by())


@memoised
def _route(
    function: ClosedJaxpr | None,
    product: Product,
    device: dispatch.Device,
    kernel_only: bool,
    tables: object,
) -> Route:
    device = device.limited_to(product.max_sms)
    if reason := _request_violation(product):
        return Route("xla", reason, "unsupported")
    fusion, found_roles = None, None
    try:
        if function is None:
            gemm = _gemm(product, product.out_dtype)
        else:
            gemm, fusion, found_roles = _fused(product, function)
    except (NotAGemm, NotFusable) as error:
        return Route("xla", str(error), "unsupported")
    decision = dispatch.choose(gemm.problem, device, kernel_only=kernel_only)
    if fusion and not kernel_only and not product.spans and (reason := _read_again(fusion)):
        return Route("xla", reason, "model", gemm, fusion=fusion, roles=found_roles)
    if decision.spec is None or decision.raster_order is None:
        runs = not kernel_only and dispatch.choose(gemm.problem, device, kernel_only=True).spec
        source = decision.source if runs else "unsupported"
        return Route("xla", decision.reason, source, gemm, fusion=fusion, roles=found_roles)
    plan = make_plan(gemm.problem, decision.spec, decision.raster_order, device.num_sms)
    return Route(
        "hopper", decision.reason, decision.source, gemm, decision.spec, decision.raster_order,
        plan, fusion, found_roles,
    )  # fmt: skip


def _gemm(product: Product, d_dtype: str, *epilogue: Any) -> Gemm:
    if product.spans:
        return as_grouped_gemm(
            product.subscripts, product.lhs_shape, product.rhs_shape, product.lhs_dtype, d_dtype,
            product.spans, product.sizes, *epilogue, gathered=product.gathered,
            source=product.source,
        )  # fmt: skip
    gemm = as_gemm(
        product.subscripts, product.lhs_shape, product.rhs_shape, product.lhs_dtype, d_dtype,
        *epilogue,
    )  # fmt: skip
    return _in_stack(gemm, product) if product.indexed else gemm


def _in_stack(gemm: Gemm, product: Product) -> Gemm:
    """Returns the same product with an operand that lies in a stack."""
    left = product.indexed == "a"
    apart = prod(product.lhs_shape if left else product.rhs_shape)
    indexed: Any = "a" if left != gemm.swap_ab else "b"
    layout = replace(getattr(gemm.problem, indexed), batch_stride=apart)
    named = {indexed: layout}
    return replace(
        gemm, problem=replace(gemm.problem, indexed=indexed, stack=product.stack, **named)
    )


def _fused(product: Product, function: ClosedJaxpr) -> tuple[Gemm, Fusion, Roles]:
    """Returns the canonical form of a product with an epilogue.

    Which axes are rows and columns decides what of the function is fused; how its operands vary
    decides which axes are. Begins with what broadcasting suggests of the operands, and settles.

    Raises:
      NotAGemm, NotFusable: with the reason.
    """
    if product.spans:
        return _fused_ragged(product, function)
    shapes = product.subscripts, product.lhs_shape, product.rhs_shape
    _, _, out = split(product.subscripts)
    avals: Any = function.in_avals[product.accumulators :]
    expected = [_broadcast_label(aval.shape, out) for aval in avals]
    try:
        found = roles(*shapes, expected)
    except NotAGemm:
        found = roles(*shapes)
    for _ in range(3):
        fusion = fuse(function, product.accumulators, out, found.m, found.n)
        needed = roles(*shapes, fusion.labels)
        if needed == found:
            matrices = fusion.graph.matrices
            d_dtype = matrices[0].dtype if matrices else product.lhs_dtype
            return _gemm(product, d_dtype, fusion.graph, fusion.labels), fusion, found
        found = needed
    raise NotAGemm("the epilogue's operands leave open which axes of the result are rows")


def _fused_ragged(product: Product, function: ClosedJaxpr) -> tuple[Gemm, Fusion, Roles]:
    """Returns the canonical form of a ragged product with an epilogue; raises as `_fused`."""
    found, spans = ragged_roles(product.subscripts), product.spans
    _, _, out = split(product.subscripts)
    rows, merged = None, {}
    aval: Any = function.in_avals[0]
    if not is_contraction(product.subscripts) and spans:
        batch = len(aval.shape) - len(out)
        out = ROW_LETTERS[:batch] + out
        groups = GROUP_LETTERS[:batch] + GROUPS
        found = replace(found, m=out.removesuffix(found.n))
        merged = {found.m: "m", groups: GROUPS} if batch else {}
        rows = GroupedRows(
            product.sizes_operand, replace(spans, step=0) if batch else spans, groups,
            each=spans.step != 0,
        )  # fmt: skip
    elif batch := len(aval.shape) - len(out):
        groups = GROUP_LETTERS[:batch] + GROUPS
        out, merged = out.replace(GROUPS, groups), {groups: GROUPS}
        found = replace(found, batch=groups)
    fusion = fuse(function, product.accumulators, out, found.m, found.n, rows=rows)
    labels = list(fusion.labels)
    if is_contraction(product.subscripts):  # no groups are shared
        for long in merged:
            if any(GROUPS in x and long not in x for x in labels):
                raise NotAGemm("an operand of the epilogue varies along some axes of the groups")
    for long, short in merged.items():
        labels = [x.replace(long, short) for x in labels]
    if any(x in ROW_LETTERS + GROUP_LETTERS for x in "".join(labels)):
        raise NotAGemm("an operand of the epilogue varies along some axes of the rows, not all")
    matrices = fusion.graph.matrices
    d_dtype = matrices[0].dtype if matrices else product.lhs_dtype
    return _gemm(product, d_dtype, fusion.graph, labels), fusion, ragged_roles(product.subscripts)


def _broadcast_label(shape: Sequence[int], out: str) -> str:
    """Returns the letters of the result that an array broadcast against it varies along."""
    if len(shape) > len(out):
        return ""
    aligned = zip(out[len(out) - len(shape) :], shape, strict=True)
    return "".join(letter for letter, extent in aligned if extent != 1)


def _read_again(fusion: Fusion) -> str | None:
    """Returns why XLA should compute all of an epilogue that a kernel can only begin, if it should.

    The rest of the epilogue reads the kernel's results from memory. If one of them is a float32
    matrix, nothing is saved: XLA would also store the product and read it back, but once, in the
    pass that computes the whole epilogue.
    """
    if not fusion.uncovered or all(r.dtype != "float32" for r in fusion.graph.matrices):
        return None
    return f"XLA computes {', '.join(fusion.uncovered)}, and would read a float32 product for that"


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
