"""Which path a product takes and why: the answer that lowering follows and `explain` shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

import jax
from jax.lax import DotAlgorithmPreset, Precision

from .. import dispatch
from ..dispatch.canonical import (
    Gemm,
    NotAGemm,
    Roles,
    ShapedProduct,
    as_gemm,
    roles,
    with_whole_lines,
)
from ..fusion import Fusion, GroupedRows, NotFusable, fuse
from ..fusion.jaxprs import ClosedJaxpr
from ..fusion.memo import memoised
from ..gemm.bf16_parts import PRESETS
from ..gemm.dtypes import DTYPES, HALVES, OPERANDS, converts, multiply, short_name
from ..gemm.grid import ceil_div
from ..gemm.groups import GROUP, is_varlen_k
from ..gemm.legality import MAX_TILE_N
from ..gemm.problem import BlockScales, GemmProblem
from ..gemm.product import Options
from ..gemm.raster import RasterOrder
from ..gemm.spec import PROMOTION_K, SCALES_ALIGNMENT, GemmSpec
from ..launch.plan import LaunchPlan, make_plan

# Axes in front of the rows of a ragged product, and of its groups.
ROW_LETTERS, GROUP_LETTERS = "ABCDEFGH", "STUVWXYZ"


@dataclass(frozen=True)
class Request(ShapedProduct):
    """What is asked of one product of arrays of known extents."""

    options: Options = Options()
    num_b: int = 1  # 2 for a gate and an up operand in two arrays of one shape
    # The epilogue, over the accumulators and its operands, or None. Of a ragged product of rows it
    # knows groups by the segment primitives. Where `vmap` added axes, its accumulators have the
    # rows in several, those of a contraction the groups.
    function: ClosedJaxpr | None = None
    # Operand of the function that is the groups' sizes, before `vmap` put them behind one another.
    sizes_operand: int | None = None
    indexed: Literal["a", "b"] | None = None  # operand that is one array of a stack
    stack: int = 1  # of so many
    # Rows of the left and of the right operand that share a scale for each 128 of K, (1 or 128);
    # None: there are no scales.
    blocks: tuple[int, int] | None = None
    # Elements along K that share a scale in each column of the right operand, which a kernel
    # converts; 0: there are no such scales.
    k_group: int = 0

    def __hash__(self) -> int:
        """Is asked often: what mostly tells requests of a program apart is enough."""
        return hash((self.lhs_shape, self.rhs_shape, self.out_dtype, self.function))

    @property
    def gathered(self) -> Literal["a", "b"] | None:
        """The operand whose rows the kernel gathers, if it does."""
        return self.groups.gathered if self.groups else None

    @property
    def accumulators(self) -> int:
        return 2 if self.num_b == 2 or self.gate_up else 1

    @property
    def symbolic(self) -> bool:
        """Whether an extent is known only when an exported program runs."""
        return not all(isinstance(x, int) for x in self.lhs_shape + self.rhs_shape)

    def __str__(self) -> str:
        lhs = array_text(self.lhs_shape, self.lhs_dtype)
        rhs = " and ".join([array_text(self.rhs_shape, self.rhs_dtype)] * self.num_b)
        text = f"{lhs} x {rhs} by '{self.subscripts}' into {short_name(self.out_dtype)}"
        if self.blocks:
            rows = " and ".join(f"{rows}x{PROMOTION_K}" for rows in self.blocks)
            text += f", scales of blocks of {rows}"
        if self.k_group:
            text += f", scales of {self.k_group} along K"
        if self.groups:
            of = "contracted in" if is_varlen_k(self.subscripts) else "in"
            text += f", rows {of} {self.groups.matrices} groups"
        return f"{text} with an epilogue" if self.function else text


@dataclass(frozen=True, eq=False)
class Route:
    """How one product runs: one object while `route` remembers the answer."""

    path: Literal["hopper", "xla"]  # a kernel of ours, or XLA's own product
    reason: str
    # What decided: "table", "user table", "model", or "unsupported" where no kernel can run it.
    source: str
    gemm: Gemm | None = None  # its canonical form, where it has one
    spec: GemmSpec | None = None  # the kernel; like its order and plan None with "xla"
    raster_order: RasterOrder | None = None
    num_sms: int = 0  # that the launch may use
    fusion: Fusion | None = None  # what of the epilogue the kernel computes
    roles: Roles | None = None  # the axes that the epilogue was read for

    @cached_property
    def plan(self) -> LaunchPlan | None:
        """The kernel's launch, made when it is emitted: most routes are only weighed."""
        if not (self.gemm and self.spec and self.raster_order):
            return None
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
    if reason := _request_violation(request):
        return Route("xla", reason, "unsupported")
    read = read_for(request, device)
    device = device.limited_to(request.options.max_sms)
    # With block scales XLA would multiply float32 numbers.
    kernel_only = kernel_only or request.options.batch_invariant or request.blocks is not None
    return _route(request.function, request, device, kernel_only, read)


def read_for(request: Request, device: dispatch.Device) -> tuple[Any, ...]:
    """Returns the function that chooses a product's kernel, and the tables that it reads."""
    invariant = request.options.batch_invariant
    whole = device.limited_to(request.options.max_sms)
    whole = replace(whole, comm_overlap=False) if whole.comm_overlap else whole
    choose = dispatch.choose_invariant if invariant else dispatch.choose
    return choose, dispatch.tables_of(whole)


@memoised
def _route(
    function: ClosedJaxpr | None,
    request: Request,
    device: dispatch.Device,
    kernel_only: bool,
    read: tuple[Any, ...],
) -> Route:
    """Returns the same; `read` is `read_for`."""
    choose, _ = read
    fusion, found_roles = None, None
    try:
        if function is None:
            gemm = _bare_gemm(request)
        else:
            gemm, fusion, found_roles = _fused(request, function)
    except (NotAGemm, NotFusable) as error:
        return Route("xla", str(error), "unsupported")
    if fusion and fusion.uncovered and request.options.batch_invariant:
        reason = f"XLA would compute {', '.join(fusion.uncovered)}, in an order of its own"
        return Route("xla", reason, "unsupported", gemm, fusion=fusion, roles=found_roles)
    decision = choose(gemm.problem, device, kernel_only=kernel_only)
    reason = _read_again(fusion) if fusion and not request.groups else None
    if reason and not kernel_only:
        return Route("xla", reason, "model", gemm, fusion=fusion, roles=found_roles)
    if decision.spec is None or decision.raster_order is None:
        return Route(
            "xla", decision.reason, decision.source, gemm, fusion=fusion, roles=found_roles
        )
    return Route(
        "hopper", decision.reason, decision.source, gemm, decision.spec, decision.raster_order,
        device.num_sms, fusion, found_roles,
    )  # fmt: skip


def canonical(request: Request) -> Gemm | None:
    """Returns the canonical form of a product without an epilogue, if a kernel may be asked for it.

    No kernel is chosen.
    """
    if _request_violation(request):
        return None
    try:
        return _bare_gemm(request)
    except NotAGemm:
        return None


def _gemm(request: Request, fusion: Fusion | None = None, labels: Sequence[str] = ()) -> Gemm:
    gemm = as_gemm(request, fusion.graph if fusion else None, labels)
    if request.k_group:
        scale_letters(request, gemm.problem)  # raises where scales do not lie as B does
        gemm = replace(gemm, problem=replace(gemm.problem, k_group=request.k_group))
    if request.blocks:
        gemm = replace(gemm, problem=_with_scales(gemm, request))
    elif _is_simt(request):
        gemm = replace(gemm, problem=replace(gemm.problem, simt=True))
    elif terms := _bf16_terms(request):
        gemm = replace(gemm, problem=replace(gemm.problem, bf16_terms=terms))
    elif _is_promoted(request):
        gemm = replace(gemm, problem=replace(gemm.problem, promoted=True))
    if request.indexed:
        return _in_stack(gemm, request)
    measured = {request.lhs_dtype, request.rhs_dtype} <= set(HALVES)
    if request.groups or gemm.problem.up_offset or not measured:
        return gemm
    return with_whole_lines(gemm, request)


_bare_gemm = memoised(_gemm)


def _with_scales(gemm: Gemm, request: Request) -> GemmProblem:
    """Returns a problem with block scales, in arrays as `scale_shape` has them."""
    assert request.blocks
    p = gemm.problem
    a_block, b_block = request.blocks[::-1] if gemm.swap_ab else request.blocks
    matrices = prod(request.extents[x] for x in request.subscripts.batch)
    if not request.groups and p.l != matrices:
        raise NotAGemm("rows that share scales lie in several places")

    def scales(block: int, lines: int) -> BlockScales:
        along_k, length = scale_shape(block, lines, p.k)
        return BlockScales(block, length, 0 if p.groups_k else along_k * length)

    return replace(p, promoted=True, a_scales=scales(a_block, p.m), b_scales=scales(b_block, p.n))


def scale_shape(block: int, lines: int, k: int) -> tuple[int, int]:
    """Returns the shape of a matrix's block scales as a kernel reads them, by 128 of K first.

    Behind the last are as many more as a copy into a stage may read.
    """
    length = ceil_div(lines, block)
    step, more = (16, MAX_TILE_N + 16) if block == 1 else (SCALES_ALIGNMENT, SCALES_ALIGNMENT)
    return ceil_div(k, PROMOTION_K), ceil_div(length, step) * step + more


def scale_letters(request: Request, problem: GemmProblem) -> tuple[str, str]:
    """Returns the letters of the right operand that count matrices, and those of columns.

    Raises:
      NotAGemm: they are not neighbours, in this order, in the result.
    """
    subscripts, extents = request.subscripts, request.extents
    if request.groups:
        return GROUP, "n"
    free = [x for x in subscripts.out if x in subscripts.rhs]
    for i in range(len(free) + 1):
        sizes = [prod(extents[x] for x in part) for part in (free[:i], free[i:])]
        if sizes == [problem.l if problem.b.batch_stride and problem.l > 1 else 1, problem.n]:
            return "".join(free[:i]), "".join(free[i:])
    raise NotAGemm("scales along K, and the columns of the right operand are no neighbours")


def _in_stack(gemm: Gemm, request: Request) -> Gemm:
    """Returns the same product with an operand that lies in a stack."""
    left = request.indexed == "a"
    apart = prod(request.lhs_shape if left else request.rhs_shape)
    indexed: Any = "a" if left != gemm.swap_ab else "b"
    layout = replace(getattr(gemm.problem, indexed), batch_stride=apart)
    named = {indexed: layout}
    return replace(
        gemm, problem=replace(gemm.problem, indexed=indexed, stack=request.stack, **named)
    )


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
            return _gemm(request, fusion, fusion.labels), fusion, found
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
    return _gemm(request, fusion, labels), fusion, roles(request)


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


def _request_violation(request: Request) -> str | None:
    """Returns why no kernel can serve a product that no `GemmProblem` can express."""
    if request.symbolic:
        return "an extent is symbolic; a kernel is launched for extents that are known"
    dtypes = request.lhs_dtype, request.rhs_dtype
    converted = converts(*dtypes) or converts(*dtypes[::-1])
    if dtypes[0] != dtypes[1] and not (multiply(*dtypes) or converted):
        return f"the operands are {' and '.join(dtypes)}; kernels take two operands of one dtype"
    precision = request.options.precision
    if precision is None or isinstance(precision, tuple | Precision):
        return None
    # Products of two operands are exact in float32, where the kernels add them: no `Precision`
    # asks for more, and the dtype's algorithms ask for just that.
    if precision == DotAlgorithmPreset.DEFAULT or _bf16_terms(request) or _is_simt(request):
        return None
    if dtypes[0] in OPERANDS:
        row = DTYPES[dtypes[0]]
        if getattr(precision, "name", None) in (row.algorithm, row.promoted_algorithm):
            return None
    return f"precision is {precision}; kernels for {dtypes[0]} accumulate in float32"


def _bf16_terms(request: Request) -> int:
    """Returns of how many products of bfloat16 parts those of float32 numbers are to be sums."""
    if (request.lhs_dtype, request.rhs_dtype) != ("float32", "float32"):
        return 0
    name = getattr(request.options.precision, "name", None)
    return next((terms for terms, preset in PRESETS.items() if preset == name), 0)


def reads_any_major(request: Request) -> bool:
    """Whether kernels for the precision pass float32 through registers, from any layout."""
    return _bf16_terms(request) > 0 or _is_simt(request)


def _is_simt(request: Request) -> bool:
    """Whether the products of float32 numbers are to be summed in IEEE float32."""
    if (request.lhs_dtype, request.rhs_dtype) != ("float32", "float32"):
        return False
    precision = request.options.precision
    precisions = precision if isinstance(precision, tuple) else (precision,)
    return not {Precision.HIGHEST, DotAlgorithmPreset.F32_F32_F32}.isdisjoint(precisions)


def _is_promoted(request: Request) -> bool:
    """Whether a product of 8-bit floats keeps all digits of float32 in its sums.

    As XLA has it: any `Precision` but the default asks for that, and an algorithm by its name.
    """
    row, precision = DTYPES.get(request.lhs_dtype), request.options.precision
    if row is None or not row.promoted_algorithm or precision is None:
        return False
    if isinstance(precision, DotAlgorithmPreset):
        return precision.name == row.promoted_algorithm
    precisions = precision if isinstance(precision, tuple) else (precision,)
    return any(x not in (None, Precision.DEFAULT) for x in precisions)


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


@memoised
def _local_cuda_devices() -> Sequence[Any]:
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:  # no CUDA backend here
        return ()


def array_text(shape: Sequence[int], dtype: str) -> str:
    """Returns an array as JAX prints it: "bf16[128,4096]"."""
    return f"{short_name(dtype)}[{','.join(map(str, shape))}]"
