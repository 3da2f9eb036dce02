"""Dense products: `matmul`, `dot_general` and `einsum` of two operands."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from . import checks
from .substitute import with_hopper_dot

Implementation = Literal["hopper", "xla"] | None


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Multiplies two arrays by the rules of `jax.numpy.matmul`.

    On a Hopper GPU a product of bfloat16 or float16 arrays runs on a kernel of this library where
    that is the faster way (`explain` says which), everything else on XLA. Kernels accumulate in
    float32. Both gradients are products of the same kind and take the operands as they lie in
    memory. A product of two dtypes runs on XLA; so do the gradients of one that asks for float32
    from 16-bit operands, whose cotangent is float32, in JAX as here.

    Args:
      a: (..., M, K) or (K,). Leading axes broadcast against those of `b`.
      b: (..., K, N) or (K,).
      precision: as in `jax.numpy.matmul`. Products of 16-bit floats are exact in float32, so a
        `Precision` changes nothing on our kernels; an algorithm that does not accumulate in
        float32 goes to XLA.
      preferred_element_type: dtype of the result; the promoted dtype of the operands if None.
      out_sharding: sharding of the result, for explicit mesh axes.
      implementation: None takes a kernel where it is the faster way; "hopper" insists on a
        kernel; "xla" is `jax.numpy.matmul` itself.

    Returns:
      (..., M, N); without M or N where that operand has one axis.

    Raises:
      ValueError: K differs between the operands, or leading axes do not broadcast.
      TypeError: an operand is not an array.
      NotImplementedError: `implementation="hopper"` and no kernel can run the product.
    """
    a, b = checks.as_arrays("matmul", a=a, b=b)
    checks.check_matmul(a, b)
    return _run(
        jnp.matmul, a, b, implementation, precision=precision,
        preferred_element_type=preferred_element_type, out_sharding=out_sharding,
    )  # fmt: skip


def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: Any = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Contracts two arrays by the rules of `jax.lax.dot_general`.

    Kernels read either operand with any axis contiguous: nothing is transposed in memory. It
    fits where Flax takes a `dot_general`.

    Args:
      lhs, rhs: the operands.
      dimension_numbers: ((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)).
      precision, preferred_element_type, out_sharding, implementation: as in `matmul`.

    Returns:
      The batch axes, then the other axes of `lhs`, then those of `rhs`.

    Raises:
      ValueError: paired axes differ in extent, repeat or do not exist.
      TypeError: an operand is not an array, or `dimension_numbers` has another structure.
      NotImplementedError: `implementation="hopper"` and no kernel can run the product.
    """
    lhs, rhs = checks.as_arrays("dot_general", lhs=lhs, rhs=rhs)
    dimension_numbers = checks.check_dot_general(lhs, rhs, dimension_numbers)
    return _run(
        lax.dot_general, lhs, rhs, implementation, dimension_numbers=dimension_numbers,
        precision=precision, preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )  # fmt: skip


def einsum(
    subscripts: str,
    /,
    *operands: ArrayLike,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Contracts two arrays by the rules of `jax.numpy.einsum`.

    The kernel writes the result's axes in the order asked for: "bthd,hde->bthe" copies nothing.

    Args:
      subscripts: such as "mk,kn->mn".
      *operands: two arrays.
      precision, preferred_element_type, out_sharding, implementation: as in `matmul`.

    Raises:
      ValueError: other than two operands, or an index with two extents.
      TypeError: an operand is not an array, or `subscripts` is not a string.
      NotImplementedError: `implementation="hopper"` and no kernel can run the product.
    """
    checks.check_einsum(subscripts, operands)
    lhs, rhs = checks.as_arrays("einsum", lhs=operands[0], rhs=operands[1])
    return _run(
        _einsum, lhs, rhs, implementation, subscripts=subscripts, precision=precision,
        preferred_element_type=preferred_element_type, out_sharding=out_sharding,
    )  # fmt: skip


def _einsum(lhs: jax.Array, rhs: jax.Array, *, subscripts: str, **options: Any) -> jax.Array:
    return jnp.einsum(subscripts, lhs, rhs, **options)


def _run(
    function: Any, lhs: Any, rhs: Any, implementation: Implementation, **options: Any
) -> jax.Array:
    checks.check_implementation(function.__name__.lstrip("_"), implementation)
    if isinstance(options["precision"], list):
        options["precision"] = tuple(options["precision"])
    return _traced(function, lhs, rhs, implementation, tuple(options.items()))


# One trace for equal arguments. Inlined at once, so that the caller's program holds the bare
# product and lowering sees its operands; from JAX 0.12 on `inline=True` means later.
_Inline = getattr(jax, "Inline", None)
_INLINE: Any = _Inline.JAX_EARLY if _Inline else True


@partial(jax.jit, static_argnums=(0, 3, 4), inline=_INLINE)
def _traced(
    function: Any, lhs: Any, rhs: Any, implementation: Implementation, options: tuple[Any, ...]
) -> jax.Array:
    function = partial(function, **dict(options))
    if implementation == "xla":
        return function(lhs, rhs)
    return with_hopper_dot(function, lhs, rhs, implementation)
