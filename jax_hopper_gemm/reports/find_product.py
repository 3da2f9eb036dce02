"""The one product that a call of ours becomes, found by tracing it on shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

from ..lowering.origins import Origin
from ..lowering.route import Request
from ..primitives.define import PRODUCTS, apart_of, request_of
from .jaxpr_values import Program, origins_of

# Arguments that are arrays, or tuples of such; others are part of the program.
ARRAYS = (
    "bias", "residual", "alpha", "beta", "c", "epilogue_operands", "group_sizes", "group_offset",
    "row_indices", "row_scale",
)  # fmt: skip


@dataclass(frozen=True)
class TracedProduct:
    """A product, and what surrounds it.

    Attributes:
      program: that it is part of.
      equation: there; one of `PRODUCTS`.
      following: names of the operations that follow it.
    """

    program: Program
    equation: Any
    following: tuple[str, ...] = ()

    @cached_property
    def request(self) -> Request:
        """Of the operands as they are."""
        return request_of(self.equation)

    def origins(self) -> tuple[Origin, ...]:
        """Returns what the operands are made of."""
        return origins_of(self.program, self.equation, self.request)

    def apart(self) -> TracedProduct | None:
        """Returns the product without its epilogue that lowering asks for where none runs it whole.

        One of two that are alike, for gate and up. None where XLA then computes all.
        """
        if (function := apart_of(self.equation)) is None:
            return None
        avals = [atom.aval for atom in self.equation.invars]
        program = Program(jax.make_jaxpr(function)(*avals), self.program, self.equation)
        equation = next(e for e in program.jaxpr.eqns if e.primitive in PRODUCTS)
        assert self.request.function
        return TracedProduct(program, equation, _operations(self.request.function.jaxpr.eqns))


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

    program = Program(jax.make_jaxpr(call)(a, b, arrays))
    equations = program.jaxpr.eqns
    numbers = [i for i, e in enumerate(equations) if e.primitive in PRODUCTS]
    if not numbers:
        return None
    (i,) = numbers
    return TracedProduct(program, equations[i], _operations(equations[i + 1 :]))


# Operations that say where elements lie, which rows are live and what the dtype is, not what is
# computed.
SILENT = frozenset(
    {
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "live_rows",
        "mesh_cast",
        "reshape",
        "reshard",
        "rows_of_groups",
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
