"""A product and a function of it as one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from .contraction import split
from .primitive import hopper_dot
from .routing import Route


def fused_dot(
    function: Callable[..., Any],
    lhs: jax.Array,
    rights: Sequence[jax.Array],
    operands: Sequence[jax.Array],
    *,
    subscripts: str,
    precision: Any,
    product_dtype: Any,
    out_dtypes: Sequence[Any] | None,
    preactivation: str,
    implementation: str | None,
    in_place: int | None = None,
    out_sharding: Any = None,
) -> Any:
    """Returns `function(product, *operands)`, or of two products, gate and up.

    Args:
      function: of the product in float32 (float64, complex and integer products as they are).
      lhs: the left operand.
      rights: one right operand; or gate and up; or both stacked along an axis of extent 2.
      operands: what the function takes besides.
      subscripts: as of `hopper_dot`.
      precision: parameter of `lax.dot_general_p`.
      product_dtype: dtype of the product by JAX's rules.
      out_dtypes: dtypes of the results.
      preactivation: "save" or "recompute".
      implementation: None or "hopper".
      in_place: which operand's memory the first result may take.
      out_sharding: of the product.
    """
    del preactivation, in_place
    wide = jax.numpy.issubdtype(product_dtype, jax.numpy.floating) and product_dtype.itemsize <= 4
    options: dict[str, Any] = dict(
        precision=precision,
        preferred_element_type=jax.numpy.dtype("float32") if wide else product_dtype,
        out_sharding=out_sharding,
        implementation=implementation,
    )
    left, right, out = split(subscripts)
    stacked = [x for x in right if x not in left + out]
    if stacked:
        axis = right.index(stacked[0])
        rights = [lax.index_in_dim(rights[0], i, axis, keepdims=False) for i in range(2)]
        subscripts = f"{left},{right.replace(stacked[0], '')}->{out}"
    products = [hopper_dot(lhs, right, subscripts=subscripts, **options) for right in rights]
    results = function(*products, *operands)
    if out_dtypes is None:
        return results
    flat = results if isinstance(results, tuple) else (results,)
    cast = tuple(x if d is None else x.astype(d) for x, d in zip(flat, out_dtypes, strict=True))
    return cast if isinstance(results, tuple) else cast[0]


def fused_route(equation: Any, device: Any, *, kernel_only: bool) -> tuple[str, Route] | None:
    """Returns what an equation of a traced program asks for, as text, and how it runs.

    None where the equation is not a fused product.
    """
    del equation, device, kernel_only
    return None
