"""Policies of `jax.checkpoint` that treat our products as dots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jax import lax

from ..gemm.groups import GROUP
from ..gemm.product import Product
from ..primitives.define import PRODUCTS
from ..primitives.dot import dot_general_of


def checkpoint_policy(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `policy` for `jax.checkpoint`, which then treats our products as dots.

    JAX's `dots_saveable` and `dots_with_no_batch_dims_saveable` look for `lax.dot_general_p` by
    name; without this function they recompute products of this library in the backward pass. A
    product with an epilogue is one dot, and all results of its kernel are saved. A ragged product
    is a dot of its rows with one matrix.

    Args:
      policy: one of `jax.checkpoint_policies`, or any function of the same arguments.
    """

    def wrapped(primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive not in PRODUCTS:
            return policy(primitive, *avals, **params)
        return policy(lax.dot_general_p, *avals[:2], **_dot_of(params["product"]))

    return wrapped


def _dot_of(product: Product) -> dict[str, Any]:
    """Returns the parameters of the `lax.dot_general_p` that a product begins with.

    That of one group, and where gate and up are stacked, the gate's.
    """
    subscripts = product.subscripts.without(product.gate_up)
    if product.groups:
        subscripts = subscripts.without(GROUP)
    return dot_general_of(replace(product, subscripts=subscripts))[1]
