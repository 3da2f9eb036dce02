"""Rematerialisation policies that know our products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jax import lax

from ..gemm.groups import GROUP
from ..primitives.dot import as_dot_general_params, hopper_dot_p
from ..primitives.fused_dot import hopper_fused_p
from ..primitives.ragged_dot import hopper_ragged_dot_p


def checkpoint_policy(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `policy` for `jax.checkpoint`, with our products judged as the dots they stand for.

    JAX's `dots_saveable` and `dots_with_no_batch_dims_saveable` look for `lax.dot_general_p` by
    name; without this they recompute products of this library in the backward pass. A product with
    an epilogue is one dot: what is saved is all that its kernel writes. A ragged product is a dot
    of its rows with one matrix.

    Args:
      policy: one of `jax.checkpoint_policies`, or any function of the same arguments.
    """

    def wrapped(primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive is hopper_dot_p:
            primitive, params = lax.dot_general_p, as_dot_general_params(**params)
        elif primitive is hopper_fused_p:
            primitive, params = lax.dot_general_p, _product_params(params["accumulate"])
            avals = avals[:2]
        elif primitive is hopper_ragged_dot_p:
            subscripts = params["subscripts"].without(GROUP)
            options = {key: params[key] for key in ("precision", "preferred_element_type")}
            primitive, avals = lax.dot_general_p, avals[:2]
            params = as_dot_general_params(
                subscripts=subscripts, out_sharding=None, implementation=None, **options
            )
        return policy(primitive, *avals, **params)

    return wrapped


def _product_params(accumulate: Any) -> dict[str, Any]:
    """Returns the parameters of the `lax.dot_general_p` that a `hopper_fused_p` begins with.

    Where gate and up are stacked along a letter of their own, that is the gate's product.
    """
    rhs = "".join(x for x in accumulate.subscripts.rhs if x not in accumulate.subscripts.gate_up)
    return as_dot_general_params(
        subscripts=replace(accumulate.subscripts, rhs=rhs),
        precision=accumulate.precision,
        preferred_element_type=accumulate.dtype,
        out_sharding=accumulate.out_sharding,
        implementation=accumulate.implementation,
    )
