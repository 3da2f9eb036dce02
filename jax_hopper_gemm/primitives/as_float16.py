"""The JAX primitive `as_float16`: float32 numbers as float16 has them, in float32.

XLA leaves out a conversion to float16 and back, and `lax.reduce_precision` makes zeros of subnormal
numbers, as gradients often are.
"""

from __future__ import annotations

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from .define import Rules, define_primitive

_FLOAT16 = jnp.finfo(jnp.float16)
_SMALLEST = np.float32(_FLOAT16.tiny)  # normal number
_STEP = np.float32(_FLOAT16.smallest_subnormal)


def _reference(x: jax.Array) -> jax.Array:
    steps = lax.round(lax.div(x, lax.full_like(x, _STEP)), lax.RoundingMethod.TO_NEAREST_EVEN)
    small = lax.lt(lax.abs(x), lax.full_like(x, _SMALLEST))
    digits = _FLOAT16.nexp, _FLOAT16.nmant
    return lax.select(
        small, lax.mul(steps, lax.full_like(x, _STEP)), lax.reduce_precision(x, *digits)
    )


as_float16_p = define_primitive(
    "as_float16",
    _reference,
    rules=Rules(
        linear_in=(0,), transpose=lambda cotangent, _: [as_float16_p.bind(cotangent)],
        batch=lambda _, operands, axes: (as_float16_p.bind(*operands), *axes),
    ),
)  # fmt: skip
