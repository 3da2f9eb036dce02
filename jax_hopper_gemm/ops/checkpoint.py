"""Rematerialisation policies that know our products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax

from ..primitive import as_dot_general_params, hopper_dot_p


def checkpoint_policy(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `policy` for `jax.checkpoint`, with our products judged as the dots they stand for.

    JAX's `dots_saveable` and `dots_with_no_batch_dims_saveable` look for `lax.dot_general_p` by
    name; without this they recompute products of this library in the backward pass.

    Args:
      policy: one of `jax.checkpoint_policies`, or any function of the same arguments.
    """

    def wrapped(primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive is hopper_dot_p:
            primitive, params = lax.dot_general_p, as_dot_general_params(**params)
        return policy(primitive, *avals, **params)

    return wrapped
