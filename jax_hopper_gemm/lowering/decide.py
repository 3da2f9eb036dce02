"""The decision how a product runs, given what its operands are made of.

Lowering asks here and emits the answer; `explain` asks here and prints it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ..dispatch import Device, fma_ns, pass_ns, slower_than_in_tf32, widening_ns
from ..fusion.jaxprs import ClosedJaxpr
from ..fusion.memo import memoised
from ..gemm.dtypes import DTYPES
from ..gemm.groups import is_varlen_k, weights_in_order
from ..gemm.simt import VECTOR
from .canonical import is_simt, reads_any_major, rounds_operands
from .origins import Origin
from .request import Request
from .route import Route, read_for, route

MIN_ROWS_WRITTEN = 1024  # for which XLA writes weights in 16 bits, that a kernel could convert
# Operands, left and right, that XLA copies to lie along K: all, if a kernel reads no other one.
ALONG_K = (0,), (1,), (0, 1)
ACROSS_GAIN = 0.04  # measured: of SGEMM's time, where an operand does not lie along K


@dataclass(frozen=True)
class Form:
    """A product that a kernel may be asked for in place of another one.

    If it gathers rows of an operand, or indexes a stack, that operand is the `array` of its
    `Source`.
    """

    request: Request
    stored: tuple[int, ...] = ()  # operands that are read as they are stored, before a transpose
    # By operand, how XLA transposes it first: 8-bit operands are multiplied along K alone, the
    # contracted axes must be one, and SGEMM is faster across K. No copy is made where XLA writes
    # the operand in this order.
    copied: tuple[tuple[int, tuple[int, ...]], ...] = ()
    widened: tuple[int, ...] = ()  # operands that a kernel converts to 16 bits on chip
    why: str = ""  # said of a form that copies operands though a kernel reads them as they lie


@dataclass(frozen=True)
class Decision:
    """How a product runs."""

    form: Form  # what is asked for
    route: Route
    reason: str  # that of the route, and what XLA writes first that no kernel reads in place


def decide(
    request: Request, origins: Sequence[Origin], device: Device, *, kernel_only: bool
) -> Decision:
    """Returns the first form of a product that some kernel can run, and how; else the product.

    Args:
      request: of the operands as they are.
      origins: of the left operand, and of the right one or of gate and up.
    """
    read = read_for(request, device)
    return _decided(request.function, request, origins, device, kernel_only, read)


@memoised
def _decided(
    function: ClosedJaxpr | None,
    request: Request,
    origins: Sequence[Origin],
    device: Device,
    kernel_only: bool,
    read: tuple[Any, ...],
) -> Decision:
    """Returns the same; `function` is the request's, `read` is `read_for`."""
    if request.panels and (reason := _read_in_place(request, origins)):
        return Decision(Form(request), Route("xla", reason, "model"), reason)
    forms = forms_of(request, origins)
    if rounds_operands(request):
        forms = _quickest_first(forms, origins, device)
    routes: list[Route] = []
    for form in forms:
        # XLA may take longer for the product as it is than for that of a form's transposes.
        transposing_ns = _transposing_ns(form, origins) if rounds_operands(request) else 0.0
        anyway = kernel_only or transposing_ns > 0
        found = route(form.request, device, kernel_only=anyway)
        slower = _slower_than_written(form, found, forms, device) if form.request.k_group else None
        if transposing_ns and not kernel_only:
            slower = _slower_than_xla(request, found, transposing_ns, device)
        if slower:
            found = Route("xla", slower, "model", found.gemm)
        routes.append(found)
        # Where no kernel is to convert an operand, one may run the product of what XLA makes of it.
        if found.path == "hopper" or (found.supported and not form.widened):
            break
    form, chosen = forms[len(routes) - 1], routes[-1]
    if not chosen.supported:
        form, chosen = Form(request), routes[forms.index(Form(request))]
    elif chosen.path == "xla" and form.copied:  # for no kernel
        form = Form(request)
    reason = chosen.reason
    if chosen.path == "hopper" and form.why:
        reason = f"{reason}; {form.why}"
    elif len(routes) > 1 and chosen.path == "hopper":
        reason = f"{reason}; XLA {_written_first(forms[0], form)}: {routes[0].reason}"
    return Decision(form, chosen, reason)


def _read_in_place(request: Request, origins: Sequence[Origin]) -> str | None:
    """Returns why products of one array are not launched together, that read more in place alone.

    XLA would copy an operand out of its stack, transpose it, or write it in 16 bits.
    """
    if any(x.stack is not None for x in origins):
        return "an operand is one array of a stack, which kernels of one product read there"
    if any(x.widened is not None for x in origins):
        return "an operand has 8 or 4 bits, which kernels of one product convert"
    if len({x.permutation if _through(request, 1, x) else None for x in origins[1:]}) > 1:
        return "right operands lie differently, as transposes of what they are made of"
    return None


def forms_of(request: Request, origins: Sequence[Origin]) -> list[Form]:
    """Returns what a kernel may be asked for, what writes least first; also the product itself."""
    if request.blocks or request.symbolic:  # scales lie as the operands do
        return [Form(request)]
    through = _stored(request, origins) or Form(request)
    across = _across_k(through)
    in_place = _gathering(_indexing(through, origins), origins)
    narrow = _narrow(through, origins)
    forms = [across] if across else []
    if narrow:
        forms += [_gathering(_indexing(narrow, origins), origins), narrow]
    ordered = _ordered(through, origins)
    asked = [ordered, through] if in_place == through else [in_place, ordered, through]
    joined = _joined(ordered or Form(request))
    along = (_along_k(request, operands) for operands in ALONG_K)
    for form in (*asked, Form(request), *along, joined):
        if form is not None and form not in forms:
            forms.append(form)
    return forms


def _slower_than_written(
    form: Form, found: Route, forms: Sequence[Form], device: Device
) -> str | None:
    """Returns why a kernel should not convert and scale operands, but read what XLA makes of them.

    Scales of groups along K cost the tensor cores time in each tile of rows, XLA's pass none. Of
    few rows it would not be repaid. Nor is it taken where a row's bits must not depend on how many
    there are.
    """
    if found.path != "hopper" or form.request.options.batch_invariant:
        return None
    if not found.gemm or found.gemm.problem.m < MIN_ROWS_WRITTEN:
        return None
    written = (route(x.request, device, kernel_only=True) for x in forms if not x.widened)
    instead = next((x for x in written if x.path == "hopper"), None)
    if instead is None:
        return None
    request, left = form.request, 0 in form.widened
    elements = prod(request.lhs_shape if left else request.rhs_shape) * len(form.widened)
    narrow = request.lhs_dtype if left else request.rhs_dtype
    device = device.limited_to(request.options.max_sms)
    here = found.expected_ns(device)
    there = instead.expected_ns(device) + widening_ns(elements, narrow)
    if here <= there:
        return None
    return (
        f"a kernel that converts it is expected to take {here / 1e3:.1f} us, XLA's conversion and "
        f"the product of its result {there / 1e3:.1f} us"
    )


def _quickest_first(forms: Sequence[Form], origins: Sequence[Origin], device: Device) -> list[Form]:
    """Returns forms in the order of what a kernel and the transposes that it reads should take."""

    def expected_ns(form: Form) -> float:
        found = route(form.request, device, kernel_only=True)
        if found.path != "hopper":
            return math.inf
        return found.expected_ns(device) + _transposing_ns(form, origins)

    return sorted(forms, key=expected_ns)


def _slower_than_xla(
    request: Request, found: Route, transposing_ns: float, device: Device
) -> str | None:
    """Returns why a kernel in TF32 should not read transposes, but XLA run the product as it is."""
    as_it_is, device = route(request, device).gemm, device.limited_to(request.options.max_sms)
    if found.path != "hopper" or as_it_is is None:
        return None
    ns = found.expected_ns(device) + transposing_ns
    return slower_than_in_tf32(as_it_is.problem, ns, device)


def _transposing_ns(form: Form, origins: Sequence[Origin]) -> float:
    """Returns the expected time in which XLA makes the transposes that a kernel reads."""
    request = form.request
    hidden = {i for i in range(len(origins)) if not _visible(form, origins, i)}
    written = hidden | {operand for operand, _ in form.copied}
    shapes = [request.lhs_shape, *[request.rhs_shape] * (len(origins) - 1)]
    itemsize = DTYPES[request.lhs_dtype].itemsize
    return sum(pass_ns(2 * itemsize * prod(shapes[i])) for i in written)


def _written_first(form: Form, taken: Form) -> str:
    """Returns what XLA does before a product that `taken` does not read as `form` would."""
    if form.widened != taken.widened:
        return "converts an operand to 16 bits first"
    if form.request.gathered != taken.request.gathered:
        return "writes the rows first that are picked"
    if form.request.indexed != taken.request.indexed:
        return "copies an operand out of its stack first"
    return "transposes an operand first"


def _stored(request: Request, origins: Sequence[Origin]) -> Form | None:
    """Returns the same product of the arrays that operands are transposes of.

    XLA folds a transpose into its own products, but would copy the operand of a custom call. None
    where there is no transpose, or no kernel that could read what it was made of.
    """
    if request.indexed or (request.groups and is_varlen_k(request.subscripts)):
        return None
    if len({origin.permutation for origin in origins[1:]}) > 1:  # gate and up lie differently
        return None
    numbers: tuple[int, ...] = ()
    for operand, places in enumerate(((0,), tuple(range(1, len(origins))))):
        if operand == 0 and request.groups:
            continue
        if stored := _through(request, operand, origins[operand]):
            request, numbers = stored, numbers + places
    if not numbers:
        return None
    if request.groups and not weights_in_order(request.subscripts):
        return None
    return Form(request, numbers)


def _through(request: Request, operand: int, origin: Origin) -> Request | None:
    """Returns the product of the array that an operand is a transpose of.

    None where it is none, or where XLA copies that array for its own product, too.
    """
    if (axes := origin.permutation) is None:
        return None
    stored = request.permuted(operand, sorted(range(len(axes)), key=axes.__getitem__))
    return None if stored.is_scattered(operand) else stored


def _narrow(form: Form, origins: Sequence[Origin]) -> Form | None:
    """Returns the same product of arrays of 8 or 4 bits that operands are made of.

    Those on the right, or the left one: one side is converted. Their scales, if any, are those of
    groups along the contracted axis. None where there are no such arrays.
    """
    request, rights = form.request, range(1, len(origins))
    for operands, letters, field in (
        (tuple(rights), request.subscripts.rhs, "rhs_dtype"),
        ((0,), request.subscripts.lhs, "lhs_dtype"),
    ):
        (widened, *others) = {origins[i].widened for i in operands}
        hidden = not all(_visible(form, origins, i) for i in operands)
        if widened is None or others or hidden:
            continue
        along = letters[widened.axis] if widened.group else ""
        if along not in request.subscripts.contracted or (widened.group and field == "lhs_dtype"):
            continue
        named: Any = {field: widened.dtype}
        return replace(
            form, request=replace(request, k_group=widened.group, **named), widened=operands
        )
    return None


def copied_along_k(request: Request) -> Request:
    """Returns what is asked of a kernel where XLA copies operands to lie along K, if it must."""
    form = _along_k(request, ALONG_K[-1])
    return form.request if form else request


def _along_k(request: Request, operands: Sequence[int]) -> Form | None:
    """Returns the same product of copies that lie along K, where tensor cores read no others.

    XLA's own products do the same. None where nothing would change.
    """
    row = DTYPES.get(request.lhs_dtype)
    if row is None or row.majors != ("k",) or request.indexed or reads_any_major(request):
        return None
    if request.groups and is_varlen_k(request.subscripts):
        return None
    subscripts, contracted = request.subscripts, request.subscripts.contracted
    copied: list[tuple[int, tuple[int, ...]]] = []
    for i in operands:
        labels = subscripts.rhs if i else subscripts.lhs
        if labels[-1:] in contracted or (request.gathered and "ab"[i] == request.gathered):
            continue
        along_k = "".join(x for x in labels if x not in contracted) + contracted
        permutation = tuple(map(labels.index, along_k))
        request = request.permuted(i, permutation)
        numbers = range(1, 1 + request.num_b) if i else (0,)
        copied += [(number, permutation) for number in numbers]
    return Form(request, copied=tuple(copied)) if copied else None


def _across_k(form: Form) -> Form | None:
    """Returns the same product of copies that do not lie along K, where FMA units repay these.

    TMA brings such operands into stages as they lie there. None where nothing would change.
    """
    request = form.request
    if not is_simt(request) or request.groups or request.indexed or request.num_b > 1:
        return None
    subscripts, extents = request.subscripts, request.extents
    batch, contracted = subscripts.batch, subscripts.contracted
    free = subscripts.lhs_free, subscripts.rhs_free
    if any(prod(extents[x] for x in lines) % VECTOR for lines in free):
        return None  # TMA brings whole vectors
    saved = ACROSS_GAIN * fma_ns(prod(extents.values()))
    for i, letters in enumerate((subscripts.lhs, subscripts.rhs)):
        moved = 2 * DTYPES["float32"].itemsize * prod(extents[x] for x in letters)
        if letters[-1:] not in free[i] and pass_ns(moved) < saved:
            own = "".join(x for x in letters if x in batch)
            form = _transposed(form, i, tuple(map(letters.index, own + contracted + free[i])))
    why = "XLA first transposes what lies along K, which FMA units read slower than that takes"
    return replace(form, why=why) if form.copied else None


def _ordered(form: Form, origins: Sequence[Origin]) -> Form | None:
    """Returns the same product of operands whose axes lie as in what they are computed from.

    XLA then writes them like that: for the products of attention the probabilities lie as the
    logits. None where nothing would change.
    """
    if not reads_in_order(form.request):
        return None
    for i, origin in enumerate(origins):
        if origin.layout is not None and i not in form.stored:
            form = _transposed(form, i, origin.layout)
    return form if form.copied else None


def reads_in_order(request: Request) -> bool:
    """Whether the order matters in which axes of an operand's sources lie: `Origin.layout`."""
    others = request.groups or request.indexed or request.num_b > 1
    return bool(request.subscripts.batch) and not others


def _joined(form: Form) -> Form | None:
    """Returns the same product of a copy whose contracted axes lie as in the other operand.

    There they are neighbours, so they are one K in both. The smaller operand is copied, as for
    XLA's own products. None where nothing would change, or they are no neighbours.
    """
    request = form.request
    subscripts, contracted = request.subscripts, request.subscripts.contracted
    several = request.num_b > 1 or request.panels
    if request.groups or request.indexed or several or len(contracted) < 2:
        return None
    letters = subscripts.lhs, subscripts.rhs
    small = 0 if prod(request.lhs_shape) < prod(request.rhs_shape) else 1
    own, other = letters[small], letters[1 - small]
    joined = "".join(x for x in other if x in contracted)
    batch = "".join(x for x in own if x in subscripts.batch)
    free = "".join(x for x in own if x not in batch + contracted)
    wanted = batch + (free + joined if own[-1] in contracted else joined + free)
    if joined not in other or wanted == own or small in dict(form.copied):
        return None
    return _transposed(form, small, tuple(map(own.index, wanted)))


def _transposed(form: Form, operand: int, permutation: tuple[int, ...]) -> Form:
    """Returns the same product of an operand's transpose, by axes of the operand."""
    request = form.request.permuted(operand, permutation)
    return replace(form, request=request, copied=(*form.copied, (operand, permutation)))


def _visible(form: Form, origins: Sequence[Origin], operand: int) -> bool:
    """Whether nothing hides what an operand, or the array that it is a transpose of, is part of."""
    return origins[operand].permutation is None or operand in form.stored


def _gathering(form: Form, origins: Sequence[Origin]) -> Form:
    """Returns the same product that gathers the rows which an operand picks of another array.

    Of a ragged product; of two such operands the left one is gathered.
    """
    request = form.request
    if request.groups is None or request.gathered:
        return form
    count = 2 if is_varlen_k(request.subscripts) and len(origins) == 2 else 1
    for i, origin in enumerate(origins[:count]):
        if origin.picked_of is not None and _visible(form, origins, i):
            named: Any = "ab"[i]
            axis = replace(request.groups, gathered=named, source_rows=origin.picked_of)
            return replace(form, request=replace(request, groups=axis))
    return form


def _indexing(form: Form, origins: Sequence[Origin]) -> Form:
    """Returns the same product that reads an operand, one array of a stack, within the stack.

    XLA would copy it for a custom call. Of two such operands it is the larger one.
    """
    request = form.request
    if request.groups or request.indexed or len(origins) > 2:
        return form
    shapes = request.lhs_shape, request.rhs_shape
    stacked = (i for i, origin in enumerate(origins) if origin.stack is not None)
    numbers = [i for i in stacked if _visible(form, origins, i)]
    if not numbers:
        return form
    i = max(numbers, key=lambda i: prod(shapes[i]))
    indexing: Any = replace(request, indexed="ab"[i], stack=origins[i].stack)
    return replace(form, request=indexing)
