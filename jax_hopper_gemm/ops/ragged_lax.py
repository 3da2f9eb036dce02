"""What of ragged products is JAX's own: some of them whole, dtypes and precision of all."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax

from .explicit import is_explicit
from .ragged_axes import RaggedAxes

# Taken here, so that it stays JAX's own where `intercept_ragged_dot` puts ours in its place.
lax_ragged_dot_general = lax.ragged_dot_general
BASIC = lax.RaggedDotDimensionNumbers((([1], [1]), ([], [])), [0], [0])


def left_to_lax(
    lhs: Any,
    rhs: Any,
    sizes: Any,
    out_sharding: Any,
    numbers: lax.RaggedDotDimensionNumbers | None = None,
) -> str | None:
    """Returns why JAX's own product is the answer whatever the GPU; None where it is not."""
    if out_sharding is not None and not is_explicit(lhs, rhs, sizes):
        return "out_sharding came, and its arrays have no Explicit mesh axes"
    axes = RaggedAxes.of(numbers or BASIC, np.ndim(lhs), np.ndim(rhs))
    if axes.kind == "contraction" and axes.outer:
        return "it contracts axes outside of the ragged one"
    return None


def refuse_hopper(op: str, reason: str, implementation: str | None) -> None:
    """Raises if the user insists on a kernel, and JAX's own product is the answer."""
    if implementation == "hopper":
        raise NotImplementedError(f"implementation='hopper': no kernel runs {op}: {reason}")


def canonical(lhs: Any, rhs: Any, sizes: Any, numbers: Any, options: Any) -> dict[str, Any]:
    """Returns precision and dtype as JAX puts them into its own product, whose rules hold."""
    if numbers.rhs_group_dimensions:  # fewer than there are sizes, with an offset
        groups = rhs.shape[numbers.rhs_group_dimensions[0]]
        sizes = jax.ShapeDtypeStruct((*sizes.shape[:-1], groups), sizes.dtype)
    function = partial(lax_ragged_dot_general, ragged_dot_dimension_numbers=numbers, **options)
    equations = jax.make_jaxpr(function)(lhs, rhs, sizes).jaxpr.eqns
    (params,) = (e.params for e in equations if e.primitive.name == "ragged_dot_general")
    return {key: params[key] for key in ("precision", "preferred_element_type")}
