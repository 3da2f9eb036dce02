"""JAX's products of complex arrays by an algorithm; see `primitives.complex_products`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from ..primitives import complex_products


def by_parts(function: Callable[..., jax.Array], precision: Any) -> Callable[..., jax.Array]:
    """Returns a product of JAX, whose precision this is, which takes complex arrays, too.

    Args:
      function: of two arrays, or `einsum` of any number; it takes `preferred_element_type`.
      precision: as the user gave it; None: as the context says.
    """
    config: Any = jax.config
    asked = config.jax_default_matmul_precision if precision is None else precision
    if isinstance(asked, str):
        asked = lax.DotAlgorithmPreset.__members__.get(asked)
    of_two = complex_products.by_parts(function, asked)
    if of_two is function:
        return function

    def product(*arrays: Any, **options: Any) -> jax.Array:
        if len(arrays) == 2:
            return of_two(*arrays, **options)
        return function(*arrays, _dot_general=_dot_general, **options)

    return product


def _dot_general(
    lhs: Any, rhs: Any, dimension_numbers: Any, precision: Any = None, **options: Any
) -> jax.Array:
    """The product of two that `einsum` takes of more."""
    named = {"dimension_numbers": dimension_numbers, "precision": precision, **options}
    return by_parts(lax.dot_general, precision)(lhs, rhs, **named)
