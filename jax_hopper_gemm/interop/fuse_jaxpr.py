"""Fusion of a program: products of ours take along the equations around them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from ..dispatch import Device, pass_ns
from ..fusion.jumps import read_across_a_jump
from ..fusion.memo import memoised, structure
from ..fusion.residuals import variables
from ..gemm.dtypes import DTYPES
from ..gemm.groups import is_varlen_k
from ..lowering.devices import current_device
from ..lowering.forms import copied_along_k
from ..lowering.request import Request
from ..lowering.route import route
from ..primitives.define import accumulator_dtype, request_of
from ..primitives.fused_primitive import hopper_fused_p
from ..primitives.ragged_dot import hopper_ragged_dot_p
from .dependences import Dependences, NoPlace, ordered
from .halves import of_one_array, with_halves
from .inlined import inlined, with_constants
from .kinds import PRODUCTS, Along, nbytes
from .placement import in_place, updates_ordered
from .program import Program, Region
from .regions import Regions
from .together import launched_together
from .wide import Function, widened


def fused(equations: Sequence[Any], results: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Returns equations and results of a jaxpr, whose products, those of ours, have epilogues.

    A product takes along what the cost model expects to be faster in its kernel than in XLA.
    """
    if not any(equation.primitive in PRODUCTS for equation in equations):
        return list(equations), list(results)
    held: dict[int, Any] = {}
    equations, results = inlined(equations, results, held)
    whole = set[Any]()  # results of products that do not stand as two

    def may_be_a_gate(product: Any) -> bool:
        return product.outvars[0] not in whole and _runs(product)

    while True:
        try:
            return with_constants(*_fused(*with_halves(equations, results, may_be_a_gate)), held)
        except _NoGate as error:
            whole.update(error.args)


class _NoGate(Exception):
    """Products, whose results it has, stand as two though these are no gate of one kernel."""


def _fused(
    equations: list[Any], results: list[Any], wholes: dict[tuple[int, ...], Any]
) -> tuple[list[Any], list[Any]]:
    program = Program(equations, results)
    kernels = _Launches(equations, wholes)
    alone = kernels.absent()  # products that take nothing along
    apart: set[tuple[int, ...]] = set()
    unsummed: set[tuple[int, Along]] = set()
    dependences = Dependences(program, alone)
    search = Regions(dependences)
    while True:
        together = {x.products for x in search.regions}
        if no_gates := [x.outvars[0] for pair, x in wholes.items() if pair not in together]:
            raise _NoGate(*no_gates)
        found = {x: kernels.of(x) for x in search.regions if x.whole}
        launches = {x: launch for x, (launch, _) in found.items()}
        reasons = {x: refusal for x, (_, refusal) in found.items() if refusal}
        refused = [*reasons, *(x for x in search.regions if not x.whole)]
        if not refused:
            try:
                new = launched_together(_ordered(dependences, launches, results))
                return updates_ordered(new, results), results
            except NoPlace as error:
                refused = [*error.args]
        for region in refused:  # less of it is tried
            refusal = reasons.get(region)
            if region.sums and not (refusal and refusal.of_less):
                along = min(region.sums)  # columns first
                unsummed.update((number, along) for number in region.products)
            elif len(region.products) > 1:
                apart.add(region.products)
            else:
                alone.update(region.products)
        if alone != dependences.alone:
            dependences = Dependences(program, alone)
        search = Regions(dependences, apart, unsummed)


class Refusal(NamedTuple):
    """Why XLA should compute what follows a product."""

    reason: str
    of_less: bool = False  # whether it holds for less of that, too


class _Launches:
    """The equations that stand for the regions of a program, and why XLA should compute some."""

    def __init__(self, equations: Sequence[Any], wholes: Mapping[tuple[int, ...], Any]):
        self._equations, self._device = equations, current_device()
        self._wholes = wholes  # by numbers of the two products that stand for each
        self._makers = {x: equation for equation in equations for x in equation.outvars}
        self._known: dict[Any, tuple[Any, Refusal | None]] = {}  # by content of a region
        self._alike: dict[Any, tuple[dict[str, Any], Refusal | None]] = {}  # by its structure

    def absent(self) -> set[int]:
        """Returns the numbers of products that no kernel runs, whatever follows them."""
        products = {i: x for i, x in enumerate(self._equations) if x.primitive in PRODUCTS}
        alike = {_asked(x): x for x in products.values()}
        runs = {asked: _runs(x) for asked, x in alike.items()}
        return {i for i, x in products.items() if not runs[_asked(x)]}

    def of(self, region: Region) -> tuple[Any, Refusal | None]:
        """Returns the equation of a region, and why none should stand for it, or None."""
        if (content := region.content) not in self._known:
            self._known[content] = self._weighed(region)
        return self._known[content]

    def _weighed(self, region: Region) -> tuple[Any, Refusal | None]:
        """Returns the same; what regions of one structure have in common is found once."""
        products = [self._equations[number] for number in region.products]
        lhs, _, *sizes = products[0].invars
        function = Function(
            (*(x.outvars[0] for x in products), *sizes, *region.operands), tuple(region.outputs),
            tuple(self._equations[number] for number in region.equations),
        )  # fmt: skip
        empty = tuple(_empty_rows(self._equations, region, function.invars)) if sizes else ()
        as_stored, again = "columns" in region.sums, [x.aval for x in region.kept]
        whole = self._wholes.get(region.products)
        apart = [whole] if whole else products  # what runs without the region
        asked = map(_asked, (*products, *apart))
        placed = in_place(region, self._equations, len(sizes))
        alike = (written := structure(function)) and (written, *asked, empty, as_stored, *again)
        known = self._alike.get(alike) if alike else None
        params, refusal = known or (_params(products, function, empty, as_stored), None)
        launch = products[-1].replace(
            primitive=hopper_fused_p,
            params={**params, "in_place": placed},
            invars=[lhs, *(x.invars[1] for x in products), *sizes, *region.operands],
            outvars=region.outputs,
        )
        if known is None:
            refusal = _refusal(apart, region, launch, self._device)
            if alike:
                self._alike[alike] = params, refusal
        if refusal:
            return launch, refusal
        of_one = of_one_array(launch, self._makers, self._device)
        copies = whole and of_one is launch
        return of_one, Refusal("it would copy halves of weights") if copies else None


def _asked(product: Any) -> tuple[Any, ...]:
    """Returns what tells a product from others of the same program, whatever its operands are."""
    return (id(product.params["product"]), product.ctx, *(x.aval for x in product.invars))


def _runs(product: Any) -> bool:
    """Whether a kernel runs a product, whatever follows it."""
    request = copied_along_k(request_of(product))
    return route(request, current_device(), kernel_only=True).path == "hopper"


def _params(
    products: Sequence[Any], function: Function, empty: tuple[int, ...], as_stored: bool
) -> dict[str, Any]:
    """Returns parameters of the equation that stands for a region, all but `in_place`.

    What is stored and decides a jump, as in `where(y > 0.5, y, 0)`, is rounded before: derivatives,
    which are computed of what is stored, then jump for the same elements.
    """
    stored = dict.fromkeys(function.outvars)
    as_stored = as_stored or bool(read_across_a_jump(function.eqns, stored, kinks=True))
    first, count = products[0], len(products)
    dtype = accumulator_dtype(first.outvars[0].aval.dtype)
    product = first.params["product"].with_options(preferred_element_type=dtype)
    with first.ctx.manager:  # of its mesh
        jaxpr = widened(function, count, product.groups, empty, as_stored)
    return {"jaxpr": jaxpr, "product": product, "num_b": count}


def _empty_rows(equations: Sequence[Any], region: Region, inputs: Sequence[Any]) -> Iterable[int]:
    """Yields the numbers of a ragged region's inputs that have 0 in the rows of no group.

    They are ragged products of rows in the same groups.
    """
    first = equations[region.products[0]]
    product, sizes = first.params["product"], first.invars[2]
    if is_varlen_k(product.subscripts) or sizes.aval.ndim > 1:
        return
    makers = {x: e for e in equations for x in e.outvars if e.primitive is hopper_ragged_dot_p}
    for number in range(len(region.products) + 1, len(inputs)):
        if (maker := makers.get(inputs[number])) and inputs[number].aval.ndim == 2:
            other = maker.params["product"]
            same = maker.invars[2] is sizes and other.groups == product.groups
            if same and not is_varlen_k(other.subscripts):
                yield number


def _refusal(
    products: Sequence[Any], region: Region, launch: Any, device: Device
) -> Refusal | None:
    """Returns why XLA should compute what follows a region's products; None if a kernel should."""
    atoms = (*(x.outvars[0] for x in products), *region.operands, *region.outputs)
    requests = tuple(map(request_of, products))
    moved, again = (sum(nbytes(x) for x in group) for group in (atoms, region.kept))
    twice = "columns" in region.sums  # what meets statistics of its rows is read after them
    times = expected_us(request_of(launch), requests, moved, 0 if twice else again, device)
    if isinstance(times, Refusal):
        return times
    together, apart = times
    if together < apart:
        return None
    return Refusal(f"expected {together:.1f} us with what follows, {apart:.1f} us apart")


@memoised
def expected_us(
    launch: Request, products: Sequence[Request], moved: int, again: int, device: Device
) -> tuple[float, float] | Refusal:
    """Returns the times of one kernel, and of its products and what XLA computes after them.

    Or why no kernel computes all of it.

    Args:
      moved: bytes that XLA reads and writes after the products.
      again: bytes that it reads after the kernel, as of values that are computed anew.
    """
    launch, *products = map(copied_along_k, (launch, *products))
    whole = route(launch, device)
    if whole.uncovered:
        of_rows = launch.groups and not is_varlen_k(launch.subscripts)
        zeros = ", as rows of no group are 0 in what it stores" if of_rows else ""
        return Refusal(f"no kernel computes {', '.join(whole.uncovered)}{zeros}")
    if whole.path != "hopper":
        # A table decides of the plain product, whatever its epilogue is.
        return Refusal(whole.reason, of_less=whole.source in ("table", "user table"))
    alone = [route(request, device, kernel_only=True) for request in products]
    for x in alone:
        if x.path != "hopper":
            return Refusal(x.reason)
    together_ns = whole.expected_ns(device) + (pass_ns(again) if again else 0.0)
    apart_ns = sum(x.expected_ns(device) for x in alone) + pass_ns(moved)
    return together_ns / 1e3, apart_ns / 1e3


def refusals(equations: Sequence[Any], results: Sequence[Any]) -> dict[int, str]:
    """Returns, by the number of a product without an epilogue, why it takes nothing along.

    Products that nothing follows which a kernel computes are left out.
    """
    reasons: dict[int, str] = {}
    kernels = _Launches(equations, {})
    for region in Regions(Dependences(Program([*equations], [*results]))).regions:
        if not region.whole:
            continue
        _, refusal = kernels.of(region)
        reason = refusal.reason if refusal else "it would wait for what it reads"
        reasons.update(dict.fromkeys(region.products, reason))
    return reasons


def saved_us(equation: Any) -> float:
    """Returns what epilogues in a kernel are expected to save; 0 where no kernel computes them."""
    request = request_of(equation)
    atoms = (*equation.invars[1 + len(request.rhs_shapes) :], *equation.outvars)
    moved, products = sum(nbytes(x) for x in atoms), list[Request]()
    for each in request.apart:
        assert each.function
        stored = each.accumulators * prod(each.function.in_avals[0].shape)
        moved += stored * DTYPES[each.lhs_dtype].itemsize
        of, pairs = each.subscripts, zip(each.subscripts.rhs, each.rhs_shape, strict=True)
        rhs, shape = zip(*(x for x in pairs if x[0] not in each.gate_up), strict=True)
        bare = replace(
            each, function=None, num_b=1, out_dtype=each.lhs_dtype, rhs_shape=shape,
            subscripts=replace(of, rhs="".join(rhs)),
        )  # fmt: skip
        products += [bare] * each.accumulators
    times = expected_us(request, products, moved, 0, current_device())
    return 0.0 if isinstance(times, Refusal) else times[1] - times[0]


def _ordered(
    dependences: Dependences, launches: dict[Region, Any], results: Sequence[Any]
) -> list[Any]:
    """Returns the equations of a program with its regions, each where its last equation was.

    Equations that nothing reads any more are left out.
    """
    kinds, program = dependences.kinds, dependences.program
    within = {number: region for region in launches for number in region.products}
    ends = {max(*x.products, *x.equations): x for x in launches}
    makers: dict[Any, Any] = program.makers | {x: y for y in launches for x in y.outputs}

    def stays(name: Any) -> bool:
        if name in within:  # not stored
            raise NoPlace(within[name])
        return name not in launches and kinds[name] == "other"

    roots: list[Any] = [
        ends.get(number, number)
        for number, kind in enumerate(kinds)
        if kind == "other" or number in ends or (kind == "product" and number not in within)
    ]
    roots += [makers[x] for x in reversed(variables(results)) if x in makers]
    return ordered(program.equations, launches, makers, roots, stays)
