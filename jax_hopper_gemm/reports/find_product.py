"""The one product that a call of ours becomes, found by tracing it on shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

from ..lowering.route import Product
from ..primitives.dot import hopper_dot_p, product_of
from ..primitives.fused_dot import hopper_fused_p
from ..primitives.fused_dot import product_of as fused_product_of
from ..primitives.gather_rows import pick_rows_p
from ..primitives.ragged_dot import hopper_ragged_dot_p
from ..primitives.ragged_dot import product_of as ragged_product_of

PRODUCTS = (hopper_dot_p, hopper_fused_p, hopper_ragged_dot_p)

# Arguments that are arrays, or tuples of such; others are part of the program.
ARRAYS = (
    "bias", "residual", "alpha", "beta", "c", "epilogue_operands", "group_sizes", "group_offset",
    "row_indices", "row_scale",
)  # fmt: skip


@dataclass(frozen=True)
class TracedProduct:
    """A product, and what surrounds it.

    Attributes:
      forms: what a kernel may be asked for, what is tried first in front: where rows are picked,
        the product that does so itself; then the product of what was picked.
      rest: names of the operations that follow it.
    """

    forms: tuple[Product, ...]
    rest: tuple[str, ...]


def traced_product(
    function: Callable[..., Any], a: Any, b: Any, options: dict[str, Any]
) -> TracedProduct | None:
    """Returns the product that `function(a, b, **options)` becomes; None if JAX's own does it."""
    arrays = {
        name: x
        for name, x in options.items()
        if name in ARRAYS and any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(x))
    }

    def call(a: Any, b: Any, arrays: dict[str, Any]) -> Any:
        return function(a, b, **{**options, **arrays})

    equations = jax.make_jaxpr(call)(a, b, arrays).jaxpr.eqns
    found = [i for i, e in enumerate(equations) if e.primitive in PRODUCTS]
    if not found:
        return None
    (i,) = found
    equation, rest = equations[i], _operations(equations[i + 1 :])
    product = product_of_equation(equation)
    picking = (e for e in equations[:i] if e.primitive is pick_rows_p)
    sources: list[Any] = [e.invars[0].aval for e in picking if e.outvars[0] is equation.invars[0]]
    forms = [
        replace(product, groups=replace(product.groups, gathered="a", source_rows=x.shape[0]))
        for x in sources
        if product.groups
    ]
    return TracedProduct((*forms, product), rest)


def product_of_equation(equation: Any) -> Product:
    """Returns what one of `PRODUCTS` asks for."""
    avals, out = [v.aval for v in equation.invars], equation.outvars[0].aval
    if equation.primitive is hopper_fused_p:
        return fused_product_of(avals, equation.params)
    lhs, rhs, *sizes = avals
    if sizes:
        return ragged_product_of(lhs, rhs, sizes[0], out, equation.params)
    return product_of(lhs, rhs, out, equation.params)


# Operations that say where elements lie and what their dtype is, not what is computed.
SILENT = frozenset(
    {
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "mesh_cast",
        "reshape",
        "reshard",
        "squeeze",
        "transpose",
    }  # fmt: skip
)


def _operations(equations: Sequence[Any]) -> tuple[str, ...]:
    """Returns the names of what equations compute, each once, in order."""
    names: list[str] = []
    for equation in equations:
        inner = list(jaxprs_in_params(equation.params))
        for jaxpr in inner:
            names += _operations(getattr(jaxpr, "jaxpr", jaxpr).eqns)
        if not inner and equation.primitive.name not in SILENT:
            names.append(equation.primitive.name)
    return tuple(dict.fromkeys(names))
