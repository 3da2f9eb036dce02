"""The decision how a product runs, given what its operands are made of.

Lowering asks here and emits the answer; `explain` asks here and prints it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ..dispatch import Device, pass_ns, slower_than_in_tf32, widening_ns
from ..fusion.memo import memoised
from ..gemm.dtypes import DTYPES
from .canonical import rounds_operands
from .forms import Form, forms_of, through_transpose, visible
from .origins import Origin
from .request import Request
from .route import Route, read_for, route

MIN_ROWS_WRITTEN = 512  # for which XLA writes weights in 16 bits, that a kernel could convert
# Measured on an H200: of their expected time, what kernels of so many rows take whose groups along
# K have scales. It was 0.84 to 0.92 of 36 products.
TAKEN_OF_EXPECTED = 0.87


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
    return _decided(request, origins, device, kernel_only, read)


@memoised
def _decided(
    request: Request,
    origins: Sequence[Origin],
    device: Device,
    kernel_only: bool,
    read: tuple[Any, ...],
) -> Decision:
    """Returns the same; `read` is `read_for`."""
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
        if slower:  # XLA runs the product as it is written
            gemm = route(request, device).gemm if transposing_ns else found.gemm
            found = Route("xla", slower, "model", gemm)
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
    if len({x.permutation if through_transpose(request, 1, x) else None for x in origins[1:]}) > 1:
        return "right operands lie differently, as transposes of what they are made of"
    return None


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
    here = TAKEN_OF_EXPECTED * found.expected_ns(device)
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
    hidden = {i for i in range(len(origins)) if not visible(form, origins, i)}
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
