"""`report_products`: which products of a function are taken, which are not, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jax import lax
from jax.extend import source_info_util
from jax.extend.core import jaxprs_in_params

from ..interop.rewrite_jaxpr import ENTERED, RAGGED, Rewriting, reason_left, rewritten, traced_call
from ..lowering.route import array_text
from ..ops import checks
from ..ops.dense import Implementation
from ..ops.substitute import as_hopper_dot
from ..primitives.define import PRODUCTS, request_of
from .explanation import Explanation, explanation_of
from .find_product import Program, TracedProduct


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
    """

    product: str
    line: str
    within: tuple[str, ...]
    taken: bool
    path: str
    reason: str
    explanation: Explanation | None = None

    def __str__(self) -> str:
        verdict = "taken" if self.taken else "left"
        place = " > ".join((*self.within, self.line))
        return f"{verdict:<6}{self.path:<7} {self.product}\n      at {place}\n      {self.reason}"


@dataclass(frozen=True)
class ProductReport:
    """The products of a function, in the order of its program. `str` makes it a report."""

    products: tuple[FoundProduct, ...]

    @property
    def taken(self) -> tuple[FoundProduct, ...]:
        return tuple(x for x in self.products if x.taken)

    @property
    def left(self) -> tuple[FoundProduct, ...]:
        return tuple(x for x in self.products if not x.taken)

    def __str__(self) -> str:
        kernels = sum(x.path == "hopper" for x in self.products)
        number = len(self.products)
        head = (
            f"{number} {'product' if number == 1 else 'products'}: {len(self.taken)} taken, "
            f"{kernels} of them on kernels; {len(self.left)} left to JAX"
        )
        return "\n".join([head, *map(str, self.products)])


def report_products(
    function: Callable[..., Any], *args: Any, implementation: Implementation = None, **kwargs: Any
) -> ProductReport:
    """Returns what `accelerate(function)` does with each product, on this process's GPU or an H200.

    The function is traced, not run. Products of loops, branches and calls are listed once, with
    what is around them; those of derivatives where the function takes them, as `jax.grad(f)` does.
    Whether XLA partitions the program over several devices is not known while tracing.

    Args:
      function: any function that `accelerate` takes, or one that it returned.
      *args, **kwargs: the function's; arrays may be `jax.ShapeDtypeStruct`s.
      implementation: as in `accelerate`.
    """
    checks.check_accelerated("report_products", function, implementation)
    program, _, _ = traced_call(function, args, kwargs)
    if implementation != "xla":
        program = rewritten(program, Rewriting(implementation))
    return ProductReport(tuple(_products_in(Program(program), implementation)))


def _products_in(
    program: Program,
    implementation: Implementation,
    within: tuple[str, ...] = (),
    closed_to: str | None = None,
) -> Iterator[FoundProduct]:
    """Yields the products of a program; `closed_to` names what holds it and is left as it is."""
    for equation in program.jaxpr.eqns:
        if equation.primitive in PRODUCTS:
            yield _taken(program, equation, within)
        elif equation.primitive is lax.dot_general_p or equation.primitive.name == RAGGED:
            yield _left(equation, implementation, within, closed_to)
        else:
            name = equation.primitive.name
            outside = closed_to or (None if name in ENTERED else name)
            inner = list(jaxprs_in_params(equation.params))
            for i, jaxpr in enumerate(inner):
                place = _name_of(equation, i)
                yield from _products_in(
                    program.inner(equation, jaxpr), implementation, (*within, place), outside
                )


def _taken(program: Program, equation: Any, within: tuple[str, ...]) -> FoundProduct:
    explanation = explanation_of(
        TracedProduct(program, equation), equation.params["product"].options.implementation
    )
    line = source_info_util.summarize(equation.source_info)
    return FoundProduct(
        explanation.product, line, within, True, explanation.path, explanation.reason, explanation
    )


def _left(
    equation: Any, implementation: Implementation, within: tuple[str, ...], closed_to: str | None
) -> FoundProduct:
    avals = [atom.aval for atom in equation.invars[:2]]
    text = " x ".join(array_text(x.shape, x.dtype.name) for x in avals)
    if equation.primitive is lax.dot_general_p:
        text = str(request_of(as_hopper_dot(equation, None)))
    if implementation == "xla":
        reason = "implementation='xla'"
    elif closed_to:
        reason = f"it is part of {closed_to}, which is left as it is"
    else:
        reason = str(reason_left(equation))
    line = source_info_util.summarize(equation.source_info)
    return FoundProduct(text, line, within, False, "xla", reason)


def _name_of(equation: Any, index: int) -> str:
    """Returns what a program within an equation is to a person."""
    name, params = equation.primitive.name, equation.params
    if name in ("jit", "pjit"):
        return f"jit({params['name']})"
    if name == "scan":
        return f"scan of {params['length']}" if "length" in params else "scan"
    if name == "cond":
        return f"cond branch {index}"
    if name == "while":
        keys = [key for key in params if key.endswith("_jaxpr")]
        return f"while {keys[index].removesuffix('_jaxpr')}"
    return "checkpoint" if name.startswith("remat") else name
