"""Rematerialisation: policies of `jax.checkpoint` are asked of our products as of dots.

JAX's `dots_saveable` and those like it look for `lax.dot_general_p` itself; they would have our
products computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import Offloadable, Recompute, Saveable
from jax.extend.core import Var

from ..gemm.groups import GROUP
from ..gemm.product import Product
from ..gemm.subscripts import DotGeneral
from ..lowering.devices import permuted_sharding

Policy = Callable[..., Any]
_SPACES = {"device": jax.memory.Space.Device, "pinned_host": jax.memory.Space.Host}


def dot_general_of(product: Product) -> tuple[DotGeneral, dict[str, Any]]:
    """Returns the `lax.dot_general_p` that a `hopper_dot_p` stands for, and its parameters."""
    precision, subscripts = product.options.precision, product.subscripts
    # A precision may tell the operands apart: only one that does not lets them change places.
    same = precision is None or (isinstance(precision, tuple) and precision[0] == precision[1])
    dot = subscripts.dot_general(may_swap=same)
    return dot, product.options.of_dot() | {
        "dimension_numbers": dot.dimension_numbers,
        "out_sharding": permuted_sharding(product.out_sharding, dot.order),
    }


def _case_of(policy: Policy, equation: Any) -> Any:
    """Returns what a policy says: `Saveable`, `Recompute` or an `Offloadable`.

    It is asked of the product itself first: it may save everything. A product with an epilogue is
    one dot, and all results of its kernel are saved. A ragged product is a dot of its rows with one
    matrix; where gate and up are stacked, it is the gate's.
    """
    avals = [x.aval for x in equation.invars]
    said = policy(equation.primitive, *avals, **equation.params)
    if said is False or said is Recompute:
        product: Product = equation.params["product"]
        subscripts = product.subscripts.without(product.gate_up)
        if product.groups:
            subscripts = subscripts.without(GROUP)
        _, dot = dot_general_of(replace(product, subscripts=subscripts))
        said = policy(lax.dot_general_p, *avals[:2], **dot)
    return (Saveable if said else Recompute) if isinstance(said, bool) else said


def remat_rule(
    policy: Policy, unknown: Sequence[bool], there: Sequence[bool], equation: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
    """Splits an equation between the forward pass and the backward pass.

    Args:
      unknown: which operands only the backward pass knows.
      there: which operands the backward pass has.

    Returns:
      Its equation of either pass, which results are unknown and there, and what the forward pass
      keeps for the other.
    """
    no, yes = ([x] * len(equation.outvars) for x in (False, True))
    needed = [
        x for x, has in zip(equation.invars, there, strict=True) if isinstance(x, Var) and not has
    ]
    if any(unknown):
        return None, equation, yes, yes, needed
    case = _case_of(policy, equation)
    if case is Saveable:
        return equation, None, no, no, []
    if isinstance(case, Offloadable):
        forward, back, kept = _offloaded(equation, case)
        return forward, back, no, yes, kept
    return equation, equation, no, yes, needed


def _offloaded(equation: Any, case: Offloadable) -> tuple[Any, Any, list[Any]]:
    """Returns equations of a product that also moves its results away, and of their way back."""
    count = len(equation.outvars)

    def moved(xs: Sequence[Any], to: str) -> list[Any]:
        return [jax.device_put(x, _SPACES[to]) for x in xs]

    def forward(*operands: Any) -> list[Any]:
        found = equation.primitive.bind(*operands, **equation.params)
        results = found if equation.primitive.multiple_results else [found]
        return [*results, *moved(results, case.dst)]

    def back(*kept: Any) -> list[Any]:
        return moved(kept, case.src)

    def called(function: Callable[..., Any], avals: Sequence[Any]) -> Any:
        (call,) = jax.make_jaxpr(jax.jit(function))(*avals).eqns
        return call

    first = called(forward, [x.aval for x in equation.invars])
    kept = [Var(x.aval) for x in first.outvars[count:]]
    second = called(back, [x.aval for x in kept])
    return (
        first.replace(invars=equation.invars, outvars=[*equation.outvars, *kept]),
        second.replace(invars=kept, outvars=equation.outvars),
        kept,
    )
