"""`explain`: what runs a product, or each product of a function, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol, overload

import jax
from jax.extend.core import jaxprs_in_params
from jax.interpreters import partial_eval as pe

from .. import ops
from ..interop.converted import is_jaxs
from ..interop.rewrite_jaxpr import Rewriting, rewritten, traced_call
from ..lowering.devices import current_device
from ..ops import checks
from ..ops.dense import Implementation
from ..ops.recipes import Recipe, as_recipe
from ..primitives.define import PRODUCTS
from .explanation import Explanation, explanation_of
from .find_product import Program, TracedProduct, by_recipe, operations_of
from .product_report import ProductReport, jaxs_own, products_in

# Functions that are one product each.
FUNCTIONS = (
    ops.matmul, ops.dot_general, ops.einsum, ops.ragged_dot, ops.ragged_dot_general,
    ops.gated_linear_unit,
)  # fmt: skip


class Open(Protocol):
    """The type of functions that to a type checker take any keyword, as jitted ones; no product."""

    def __call__(self, *args: Any, no_product_has_this: Any, **kwargs: Any) -> Any: ...


class Product(Protocol):
    """The type of `FUNCTIONS`, by which a type checker knows them."""

    def __call__(
        self, *args: Any, implementation: Implementation = None,
        batch_invariant: bool | None = None, **kwargs: Any,
    ) -> Any: ...  # fmt: skip


@overload  # no product has the keyword of `Open`, so the two do not meet
def explain(  # pyright: ignore[reportOverlappingOverload]
    function: Open, /, *args: Any, implementation: Implementation = None, fuse: bool = True,
    recipe: Recipe | None = None, **kwargs: Any,
) -> ProductReport: ...  # fmt: skip
@overload
def explain(
    function: Product, /, *args: Any, implementation: Implementation = None,
    recipe: Recipe | None = None, **kwargs: Any,
) -> Explanation: ...  # fmt: skip
@overload
def explain(  # pyright: ignore[reportOverlappingOverload]
    function: Callable[..., object], /, *args: Any, implementation: Implementation = None,
    fuse: bool = True, recipe: Recipe | None = None, **kwargs: Any,
) -> ProductReport: ...  # fmt: skip
def explain(
    function: Callable[..., Any],
    /,
    *args: Any,
    implementation: Implementation = None,
    fuse: bool = True,
    recipe: Recipe | None = None,
    **kwargs: Any,
) -> Explanation | ProductReport:
    """Returns what runs a product, or each product of a function, and why. Runs nothing.

    It answers for this process's GPU, or for an H200 where that has none.

        print(jhg.explain(jhg.matmul, a, b, bias=bias, activation="gelu"))  # one product
        print(jhg.explain(train_step, state, batch))  # all that `accelerate(train_step)` replaces

    Whether a kernel can run a product, be it faster or not, is said by
    `explain(jhg.matmul, a, b, implementation="hopper").path == "hopper"`.

    Args:
      function: `matmul`, `dot_general`, `einsum`, `ragged_dot`, `ragged_dot_general` or
        `gated_linear_unit`; or any function that `accelerate` takes, or that it returned. Functions
        of Flax nnx modules: `jax_hopper_gemm.nn.explain`.
      *args, **kwargs: the function's; arrays may be `jax.ShapeDtypeStruct`s.
      implementation, recipe: a product's own arguments, or those of `accelerate`.
      fuse: as in `accelerate`, of a function that it returned too; not for one product.

    Returns:
      Of one product an `Explanation`. Its operands are arrays of their own: in a program they may
      be transposes, or arrays of a stack, which kernels read where they lie.
      Of a function a `ProductReport` of what `accelerate` does with it. Products of loops, branches
      and calls are listed once, with what is around them; those of derivatives where the function
      takes them, as `jax.grad(f)` does; those that no result needs are not.
      Whether XLA partitions the program over several devices is not known while tracing.

    Raises:
      ValueError, TypeError: as the function would; or a call is no product, or several, as one of
        `einsum` may be, and one of weights with zero points.
    """
    if not any(function is x for x in FUNCTIONS):
        checks.check_accelerated("explain", function, implementation, fuse)
        program, arrays, _ = traced_call(function, args, kwargs)
        as_recipe("explain", recipe)
        rewriting = Rewriting(implementation, fuse, recipe, (True,) * len(arrays))
        if implementation != "xla":
            program = rewritten(program, rewriting)
        # Without what nothing reads, as JAX lowers it.
        live, _ = pe.dce_jaxpr(program.jaxpr, [True] * len(program.out_avals), True)
        return ProductReport(tuple(products_in(Program(live), rewriting)))
    if fuse is not True:
        raise TypeError(f"explain: {function.__name__} is one product, and has no argument fuse")
    if implementation != "xla":  # whose program has no product of ours
        kwargs["implementation"] = implementation
    if recipe is not None:
        kwargs["recipe"] = recipe
    program, _, _ = traced_call(function, args, kwargs)
    return replace(
        _explained(function.__name__, Program(program), implementation),
        devices=max(getattr(getattr(x, "sharding", None), "num_devices", None) or 1
                    for x in (1, *jax.tree.leaves((args, kwargs)))),
    )  # fmt: skip


def _explained(name: str, program: Program, implementation: Implementation) -> Explanation:
    """Returns how the one product of a program runs."""
    found = [*_products_of(program)]
    if len(found) != 1:
        raise ValueError(
            f"explain: this call of {name} is {len(found)} products, not one: explain a function "
            f"that calls {name}, for a report of all"
        )
    ((program, number),) = found
    equation, *after = program.jaxpr.eqns[number:]
    if not is_jaxs(equation):
        if inside := by_recipe(program, equation):  # of gate and up the second one
            program = inside
            *_, equation = (e for e in inside.jaxpr.eqns if e.primitive in PRODUCTS)
        product = TracedProduct(program, equation, operations_of(after))
        return explanation_of(product, implementation)
    own = jaxs_own(equation)
    return Explanation(own.product, current_device(), "xla", own.reason, "unsupported")


def _products_of(program: Program) -> Iterator[tuple[Program, int]]:
    """Yields the programs with products, and where these stand."""
    for number, equation in enumerate(program.jaxpr.eqns):
        if equation.primitive in PRODUCTS or is_jaxs(equation):
            yield program, number
        else:
            for jaxpr in jaxprs_in_params(equation.params):
                yield from _products_of(program.inner(equation, jaxpr))
