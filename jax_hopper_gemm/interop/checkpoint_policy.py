"""Rematerialisation policies that know our products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax

from ..primitives.define import dot_general_of


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
        if (dot := dot_general_of(primitive, params)) is None:
            return policy(primitive, *avals, **params)
        return policy(lax.dot_general_p, *avals[:2], **dot)

    return wrapped
