"""The forms of a product that a kernel may be asked for: what is read in place or copied first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ..dispatch import fma_ns, pass_ns
from ..gemm.dtypes import DTYPES
from ..gemm.groups import is_varlen_k, weights_in_order
from ..gemm.simt import VECTOR
from .canonical import is_simt, reads_any_major
from .origins import Origin
from .request import Request

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


def forms_of(request: Request, origins: Sequence[Origin]) -> list[Form]:
    """Returns what a kernel may be asked for, what writes least first; also the product itself."""
    if request.blocks or request.symbolic:  # scales lie as the operands do
        return [Form(request)]
    through = _stored(request, origins) or Form(request)
    across = _across_k(through)
    in_place = _gathering(_indexing(through, origins), origins)
    narrow = _narrow(through, origins)
    in_narrow = [_gathering(_indexing(narrow, origins), origins), narrow] if narrow else []
    ordered = _ordered(through, origins)
    asked = [ordered, through] if in_place == through else [in_place, ordered, through]
    joined = _joined(ordered or Form(request))
    along = (_along_k(request, operands) for operands in ALONG_K)
    forms = (across, *in_narrow, *asked, Form(request), *along, joined)
    return list(dict.fromkeys(filter(None, forms)))


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
        if stored := through_transpose(request, operand, origins[operand]):
            request, numbers = stored, numbers + places
    if not numbers:
        return None
    if request.groups and not weights_in_order(request.subscripts):
        return None
    return Form(request, numbers)


def through_transpose(request: Request, operand: int, origin: Origin) -> Request | None:
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
        hidden = not all(visible(form, origins, i) for i in operands)
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
    form, contracted = Form(request), request.subscripts.contracted
    for i, labels in enumerate((request.subscripts.lhs, request.subscripts.rhs)):
        if i in operands and labels[-1:] not in contracted and "ab"[i] != request.gathered:
            along_k = "".join(x for x in labels if x not in contracted) + contracted
            form = _transposed(form, i, tuple(map(labels.index, along_k)))
    return form if form.copied else None


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
    """Returns the same product of a transpose of the left or the right operand, by their axes."""
    request = form.request.permuted(operand, permutation)
    numbers = range(1, 1 + request.num_b) if operand else (0,)
    return replace(
        form, request=request, copied=form.copied + tuple((i, permutation) for i in numbers)
    )


def visible(form: Form, origins: Sequence[Origin], operand: int) -> bool:
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
        if origin.picked_of is not None and visible(form, origins, i):
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
    numbers = [i for i in stacked if visible(form, origins, i)]
    if not numbers:
        return form
    i = max(numbers, key=lambda i: prod(shapes[i]))
    indexing: Any = replace(request, indexed="ab"[i], stack=origins[i].stack)
    return replace(form, request=indexing)
