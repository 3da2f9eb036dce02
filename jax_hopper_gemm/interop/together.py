"""Products of one array, as those of query, key and value, in one launch where that is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax import lax
from jax.extend.core import Literal

from ..dispatch import Device
from ..fusion.jaxprs import ClosedJaxpr
from ..gemm.dtypes import HALVES
from ..gemm.product import Product
from ..gemm.type_legality import MAX_PANELS
from ..lowering.devices import current_device
from ..lowering.route import route
from ..primitives.define import request_of
from ..primitives.dot import hopper_dot_p
from ..primitives.dots import hopper_dots_p
from ..primitives.fused_primitive import hopper_fused_p
from .dependences import NoPlace, dependence, ordered


@dataclass(frozen=True)
class _Member:
    """A product that others may be launched with."""

    number: int  # of its equation
    equation: Any
    product: Product  # with the array that they share on the left
    shared: Any
    right: Any
    operands: tuple[Any, ...] = ()  # of its epilogue
    epilogue: ClosedJaxpr | None = None
    in_place: tuple[int | None, ...] = ()  # of its results, as in `hopper_fused`


def launched_together(equations: Sequence[Any]) -> list[Any]:
    """Returns the equations with products of one array as one, where the cost model expects a gain.

    A launch stands where its last product did, or before what reads a result of it first.
    """
    alike: dict[Any, list[_Member]] = {}
    turned: dict[Any, Any] = {}  # permutations of variables that are transposes
    for number, equation in enumerate(equations):
        if equation.primitive is lax.transpose_p:
            turned[equation.outvars[0]] = equation.params["permutation"]
        elif member := _member(number, equation):
            key = (turned.get(member.right), *_key(member))
            alike.setdefault(key, []).append(member)
    device = current_device()
    several = (members for members in alike.values() if len(members) > 1)
    shared = [same for x in several for same in _by_epilogue(x, device) if len(same) > 1]
    if not shared:
        return list(equations)
    depends = dependence(equations, {x.number for members in shared for x in members})
    groups = [
        faster
        for members in shared
        for group in _independent(members, depends)
        if (faster := _faster(group, device))
    ]
    while groups:
        try:
            return _ordered(equations, groups)
        except NoPlace as found:
            groups = [x for x in groups if x[-1].number not in found.args]
    return list(equations)


def _member(number: int, equation: Any) -> _Member | None:
    """Returns a product of 16-bit matrices that others may be launched with; None for others."""
    if equation.primitive not in (hopper_dot_p, hopper_fused_p):
        return None
    params: dict[str, Any] = equation.params
    product: Product = params["product"]
    epilogue: ClosedJaxpr | None = params.get("jaxpr")
    gated = params.get("num_b", 1) > 1 or product.gate_up
    if gated or product.groups or (epilogue and epilogue.consts):
        return None
    options, subscripts = product.options, product.subscripts
    lhs, rhs, *operands = equation.invars
    if options.recipe or options.batch_invariant or product.out_sharding is not None:
        return None
    if subscripts.batch or not subscripts.out or Literal in (type(lhs), type(rhs)):
        return None
    if lhs.aval.dtype != rhs.aval.dtype or lhs.aval.dtype.name not in HALVES:
        return None
    if isinstance(options.precision, tuple) and len({*options.precision}) > 1:
        return None
    if subscripts.out[-1] not in subscripts.rhs_free:
        product, lhs, rhs = replace(product, subscripts=subscripts.swapped()), rhs, lhs
    taken = params.get("in_place", ())
    return _Member(number, equation, product, lhs, rhs, (*operands,), epilogue, taken)


def _key(member: _Member) -> tuple[Any, ...]:
    """Returns what products that may be launched together have in common."""
    subscripts, shape = member.product.subscripts, member.right.aval.shape
    extents = zip(shape, subscripts.rhs, strict=True)
    rest = tuple(x for x, letter in extents if letter != subscripts.columns[0])
    atoms = member.right, *member.operands, *member.equation.outvars
    dtypes = tuple(x.aval.dtype for x in atoms)
    ctx = member.equation.ctx
    return member.shared, member.product, ctx, rest, member.epilogue is None, dtypes


def _by_epilogue(members: Sequence[_Member], device: Device) -> Iterable[list[_Member]]:
    """Returns the same products by what a kernel computes after them."""
    found: dict[Any, list[_Member]] = {}
    for member in members:
        asked = request_of(_launch([member])) if member.epilogue else None
        fusion = asked and route(asked, device).fusion
        found.setdefault(fusion and fusion.graph, []).append(member)
    return found.values()


def _independent(
    members: Sequence[_Member], depends: Callable[[int, int], bool]
) -> list[list[_Member]]:
    """Returns groups of neighbouring products none of which depends on another of its group."""
    groups: list[list[_Member]] = [[]]
    for member in members:
        after = any(depends(member.number, x.number) for x in groups[-1])
        if after or len(groups[-1]) == MAX_PANELS:
            groups.append([])
        groups[-1].append(member)
    return groups


def _faster(group: list[_Member], device: Device) -> list[_Member] | None:
    """Returns those of a group that are expected to be faster in one launch, or None.

    Where all are not, the widest is left out: it fills the GPU alone.
    """
    while len(group) > 1:
        if route(request_of(_launch(group)), device).path == "hopper":
            return group
        widest = max(group, key=lambda x: x.right.aval.size)
        group = [x for x in group if x is not widest]
    return None


def _launch(group: Sequence[_Member]) -> Any:
    """Returns the equation of the products of a group."""
    operands, in_place, functions = [], [], tuple(x.epilogue for x in group if x.epilogue)
    for member in group:
        taken = [None if x is None else x + len(operands) for x in member.in_place]
        in_place += [*taken, *[None] * (len(member.equation.outvars) - len(taken))]
        operands += member.operands
    product, in_place = group[0].product, tuple(in_place)
    return group[-1].equation.replace(
        primitive=hopper_dots_p,
        params={"product": product, "functions": functions, "in_place": in_place},
        invars=[group[0].shared, *(x.right for x in group), *operands],
        outvars=[out for x in group for out in x.equation.outvars],
    )


def _ordered(equations: Sequence[Any], groups: Sequence[list[_Member]]) -> list[Any]:
    """Returns the equations with a launch for each group, which has its last product's number."""
    place = {member.number: group[-1].number for group in groups for member in group}
    return ordered(
        equations,
        {group[-1].number: _launch(group) for group in groups},
        {x: place.get(i, i) for i, equation in enumerate(equations) for x in equation.outvars},
        (i for i in range(len(equations)) if place.get(i, i) == i),
        lambda number: bool(equations[number].effects),
    )
