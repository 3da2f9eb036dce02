"""Complex products by an algorithm: real products of real and imaginary parts.

An algorithm, such as `DotAlgorithmPreset.BF16_BF16_F32_X6`, says how floats are multiplied. JAX
casts complex operands to the algorithm's dtype, which drops their imaginary parts. Here

    (a + ib) (c + id)  =  ac - bd  +  i (ad + bc)

are four products by that algorithm; two where an operand is real.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

COMPLEX = np.dtype("complex64")


def by_parts(function: Callable[..., jax.Array], precision: Any) -> Callable[..., jax.Array]:
    """Returns a product of JAX, whose precision this is, which takes complex arrays, too.

    Args:
      function: of two arrays, or `einsum` of any number; it takes `preferred_element_type`.
      precision: as in the parameters of `dot_general`, or a name.
    """
    if isinstance(precision, str):
        precision = lax.DotAlgorithmPreset.__members__.get(precision)
    if not isinstance(precision, lax.DotAlgorithmPreset | lax.DotAlgorithm):
        return function

    def dot_general(
        lhs: Any, rhs: Any, dimension_numbers: Any, given: Any = None, **options: Any
    ) -> jax.Array:
        """The product of two that `einsum` takes of more."""
        options |= {"dimension_numbers": dimension_numbers, "precision": given}
        return by_parts(lax.dot_general, precision)(lhs, rhs, **options)

    def product(*arrays: Any, preferred_element_type: Any = None, **options: Any) -> jax.Array:
        dtypes = [jnp.result_type(operand) for operand in arrays]
        if len(arrays) != 2:
            options["_dot_general"] = dot_general
        if len(arrays) != 2 or COMPLEX not in dtypes:
            return function(*arrays, preferred_element_type=preferred_element_type, **options)

        def real(x: Any, y: Any) -> jax.Array:
            return function(x, y, preferred_element_type=jnp.dtype(jnp.float32), **options)

        (a, b), (c, d) = (
            (lax.real(x), lax.imag(x)) if dtype == COMPLEX else (x, None)
            for x, dtype in zip(map(jnp.asarray, arrays), dtypes, strict=True)
        )
        if b is None:
            parts = real(a, c), real(a, d)
        elif d is None:
            parts = real(a, c), real(b, c)
        else:
            parts = real(a, c) - real(b, d), real(a, d) + real(b, c)
        return lax.complex(*parts).astype(preferred_element_type or COMPLEX)

    return product
