"""Runs a JAX function with its `dot_general` computed by `hopper_dot`.

`jnp.matmul` and `jnp.einsum` say what their arguments mean: promotion, broadcasting, weak types,
sharding, precision. Tracing them and putting our product where theirs stands keeps every one of
those rules, in every version of JAX, without writing them down again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal

from ..dot_general import permuted_result, rearranged, to_subscripts
from ..primitive import hopper_dot


def with_hopper_dot(
    function: Callable[..., jax.Array], lhs: Any, rhs: Any, implementation: str | None
) -> jax.Array:
    """Returns `function(lhs, rhs)`; a transpose that follows the product becomes part of it."""
    closed = jax.make_jaxpr(function)(lhs, rhs)
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.constvars + jaxpr.invars, [*closed.consts, lhs, rhs], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    transposes = _transposes_of_products(jaxpr)
    for equation in jaxpr.eqns:
        if equation.outvars[0] in values:
            continue  # a transpose that became part of its product
        operands = [read(atom) for atom in equation.invars]
        results = equation.outvars
        if equation.primitive is lax.dot_general_p:
            permutation = None
            if transpose := transposes.get(results[0]):
                permutation, results = transpose.params["permutation"], transpose.outvars
            outputs = _product(
                *operands, permutation=permutation, implementation=implementation, **equation.params
            )
        else:
            outputs = equation.primitive.bind(*operands, **equation.params)
        if not equation.primitive.multiple_results:
            outputs = [outputs]
        values.update(zip(results, outputs, strict=True))
    (out,) = jaxpr.outvars
    return read(out)


def _transposes_of_products(jaxpr: Any) -> dict[Any, Any]:
    """Returns, by the variable of a product, the transpose that alone uses it."""
    uses = Counter(
        atom
        for atom in chain(*(equation.invars for equation in jaxpr.eqns), jaxpr.outvars)
        if not isinstance(atom, Literal)
    )
    products = {e.outvars[0] for e in jaxpr.eqns if e.primitive is lax.dot_general_p}
    return {
        equation.invars[0]: equation
        for equation in jaxpr.eqns
        if equation.primitive is lax.transpose_p
        and equation.invars[0] in products
        and uses[equation.invars[0]] == 1
    }


def _product(
    lhs: Any,
    rhs: Any,
    *,
    permutation: tuple[int, ...] | None,
    dimension_numbers: Any,
    out_sharding: Any,
    **params: Any,
) -> jax.Array:
    subscripts = to_subscripts(dimension_numbers, lhs.ndim, rhs.ndim)
    if permutation is not None:
        subscripts = permuted_result(subscripts, permutation)
        out_sharding = rearranged(out_sharding, permutation)
    return hopper_dot(lhs, rhs, subscripts=subscripts, out_sharding=out_sharding, **params)
