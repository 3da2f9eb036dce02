"""`ProductReport`: which products of a program are taken, which are not, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from jax import lax
from jax.extend import source_info_util
from jax.extend.core import jaxprs_in_params

from ..gemm.product import Options
from ..interop.converted import is_jaxs
from ..interop.fuse_jaxpr import refusals, saved_us
from ..interop.rewrite_jaxpr import ENTERED, ROWS_APART, Rewriting, reason_left
from ..lowering.request import array_text
from ..ops.dense import Implementation
from ..ops.substitute import as_hopper_dot
from ..primitives.define import PRODUCTS, request_of
from ..primitives.dots import hopper_dots_p
from ..primitives.experimental import flops_of
from ..primitives.fused_primitive import hopper_fused_p
from .explanation import Explanation, explanation_of
from .find_product import Program, TracedProduct, as_by_xla, by_recipe


@dataclass(frozen=True)
class FoundProduct:
    """A product in a program.

    Attributes:
      product: what is multiplied, as text.
      line: where the program asks for it: file, line and function.
      within: the loops and calls around it, outermost first.
      taken: whether it is one of this library; a kernel runs it if `path` says so.
      path: "hopper" (a kernel of this library) or "xla".
      reason: why.
      explanation: how it runs, as `explain` says it; None where no kernel is asked.
      flops: multiplications and additions of one run of the whole function.
      fused: what its kernel computes besides; or why nothing, where something follows it.
      saved_us: what that is expected to save in each run of the product, in microseconds.
      runs: of the product, in one of the function: the lengths of the scans around it.
    """

    product: str
    line: str
    within: tuple[str, ...]
    taken: bool
    path: str
    reason: str
    explanation: Explanation | None = None
    flops: int = 0
    fused: str = ""
    saved_us: float = 0.0
    runs: int = 1

    @property
    def runner(self) -> str:
        """What runs it: "kernel", "XLA", or "not replaced"."""
        return "kernel" if self.path == "hopper" else "XLA" if self.taken else "not replaced"

    @property
    def place(self) -> str:
        """The loops and calls around it, then its line; JAX's own functions have none."""
        return " > ".join(filter(None, (*self.within, self.line)))


@dataclass(frozen=True)
class ProductReport:
    """The products of a function, in the order of its program.

    `str` makes it a report: equal products once, those of most FLOPs first.

    Attributes:
      products: what each one multiplies, at which line, what runs it and why.
    """

    products: tuple[FoundProduct, ...]

    @property
    def taken(self) -> tuple[FoundProduct, ...]:
        """Those that are this library's, on a kernel or on XLA."""
        return tuple(x for x in self.products if x.taken)

    @property
    def left(self) -> tuple[FoundProduct, ...]:
        """Those that stay JAX's own."""
        return tuple(x for x in self.products if not x.taken)

    @property
    def flops(self) -> int:
        """Multiplications and additions of all products in one run of the function."""
        return sum(x.flops for x in self.products)

    @property
    def kernel_share(self) -> float:
        """The part of all FLOPs that kernels of this library run."""
        return sum(x.flops for x in self.products if x.path == "hopper") / max(1, self.flops)

    @property
    def saved_us(self) -> float:
        """What fusion is expected to save in one run of the function, in microseconds."""
        return sum(x.saved_us * x.runs for x in self.products)

    def __str__(self) -> str:
        runners = Counter(x.runner for x in self.products)
        number = len(self.products)
        lines = [
            f"{number} {'product' if number == 1 else 'products'}: {runners['kernel']} on kernels, "
            f"{runners['XLA']} on XLA, {runners['not replaced']} not replaced",
            f"{self.kernel_share:.1%} of {self.flops:.3g} FLOPs on kernels",
        ]
        if self.saved_us:
            lines.append(f"fusion is expected to save {self.saved_us:.0f} us")
        groups: dict[Any, list[FoundProduct]] = {}
        for x in self.products:
            groups.setdefault((x.runner, x.product, x.reason, x.fused), []).append(x)
        for equal in sorted(groups.values(), key=lambda equal: -sum(x.flops for x in equal)):
            lines += self._lines(equal)
        return "\n".join(lines)

    def _lines(self, equal: Sequence[FoundProduct]) -> list[str]:
        first, share = equal[0], sum(x.flops for x in equal) / max(1, self.flops)
        times = sum(x.runs for x in equal)
        places = list(dict.fromkeys(x.place for x in equal if x.place))
        others = f" and {len(places) - 1} more" if len(places) > 1 else ""
        number = f"x {times}" if times > 1 else ""
        lines = [f"{first.runner:<13}{share:>5.1%} {number:<6} {first.product}"]
        if places:
            lines.append(f"      at {places[0]}{others}")
        lines.append(f"      {first.reason}")
        if first.fused:
            saved = sum(x.saved_us * x.runs for x in equal)
            lines.append(f"      {first.fused}" + (f"; saves {saved:.0f} us" if saved else ""))
        return lines


def products_in(
    program: Program,
    rewriting: Rewriting,
    within: tuple[str, ...] = (),
    closed_to: str | None = None,
    runs: int = 1,
) -> Iterator[FoundProduct]:
    """Yields the products of a program.

    Args:
      closed_to: what holds the program and is left as it is.
      runs: how often the program runs.
    """
    equations = program.jaxpr.eqns
    asked = rewriting.fuse and rewriting.implementation != "xla" and not closed_to
    reasons = refusals(equations, program.jaxpr.outvars) if asked else {}
    for number, equation in enumerate(equations):
        name, product = equation.primitive.name, None
        if apart := by_recipe(program, equation):
            program.lower_as(apart)
        elif equation.primitive in PRODUCTS:
            product = _taken(program, equation, reasons.get(number))
            inside = as_by_xla(program, equation) if product.path == "xla" else None
            apart = inside if equation.primitive is hopper_dots_p else None
        elif is_jaxs(equation):
            product = jaxs_own(equation, rewriting.implementation, closed_to)
        else:
            outside = closed_to or (None if name in ENTERED else name)
            inner = list(jaxprs_in_params(equation.params))
            times = runs * equation.params.get("length", 1) if name == "scan" else runs
            for i, jaxpr in enumerate(inner):
                place = (*within, _name_of(equation, i))
                inside = program.inner(equation, jaxpr)
                yield from products_in(inside, rewriting, place, outside, times)
        if product and not apart:
            yield replace(product, within=within, flops=runs * product.flops, runs=runs)
        if apart:
            line = source_info_util.summarize(equation.source_info)
            alone = rewriting._replace(fuse=False)
            for product in products_in(apart, alone, within, closed_to, runs):
                yield replace(product, line=line)


def _taken(program: Program, equation: Any, refusal: str | None) -> FoundProduct:
    product = equation.params["product"]
    explanation = explanation_of(TracedProduct(program, equation), product.options.implementation)
    saved, fused = 0.0, ""
    if explanation.path == "hopper" and explanation.epilogue:
        fuses = equation.primitive in (hopper_fused_p, hopper_dots_p)
        saved = saved_us(equation) if fuses else 0.0
        fused = f"fused: {explanation.epilogue}"
    elif refusal:
        fused = f"not fused: {refusal}"
    return FoundProduct(
        explanation.product, source_info_util.summarize(equation.source_info), (), True,
        explanation.path, explanation.reason, explanation, flops_of(request_of(equation)), fused,
        saved,
    )  # fmt: skip


def jaxs_own(
    equation: Any, implementation: Implementation = None, closed_to: str | None = None
) -> FoundProduct:
    """Returns a product of JAX, or of JAX's grouped ones, that stays its own."""
    avals = [atom.aval for atom in equation.invars[:2]]
    text = " x ".join(array_text(x.shape, x.dtype.name) for x in avals)
    if equation.primitive is lax.dot_general_p:
        request = request_of(as_hopper_dot(equation, Options()))
        text, flops = str(request), flops_of(request)
    else:
        flops = 2 * prod(avals[0].shape) * avals[1].shape[-1]
    if implementation == "xla":
        reason = "implementation='xla'"
    elif closed_to:
        reason = f"it is part of {closed_to}, which is left as it is"
    else:
        reason = reason_left(equation) or ROWS_APART  # as transposes after it have them
    line = source_info_util.summarize(equation.source_info)
    return FoundProduct(text, line, (), False, "xla", reason, flops=flops)


def _name_of(equation: Any, index: int) -> str:
    """Returns what a program within an equation is to a person."""
    name, params = equation.primitive.name, equation.params
    if name == "jit":
        return f"jit({params['name']})"
    if name == "scan":
        return f"scan of {params['length']}" if "length" in params else "scan"
    if name == "cond":
        return f"cond branch {index}"
    if name == "while":
        keys = [key for key in params if key.endswith("_jaxpr")]
        return f"while {keys[index].removesuffix('_jaxpr')}"
    return "checkpoint" if name.startswith("remat") else name
