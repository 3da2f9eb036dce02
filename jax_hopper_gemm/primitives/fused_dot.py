"""Products with an epilogue: a JAX function of the product, computed by the kernel that makes it.

The product may be a ragged one: then an array of sizes, which cuts the rows into runs, is the
first operand of the function, too. What of it varies by groups, or is 0 in rows of no group, stands
in the function as segment primitives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from ..fusion.jaxprs import abstract, traced, varying_together
from ..gemm.dtypes import residual_of
from ..gemm.groups import Groups, is_varlen_k
from ..gemm.product import Product
from .accumulators import accumulators_of
from .define import accumulator_dtype
from .fused_primitive import hopper_fused_p, reference_fused
from .scaled_dot import scaled_dot
from .segments import segment_broadcast, segment_mask


def fused_dot(
    function: Callable[..., Any],
    factors: Sequence[jax.Array],
    operands: Sequence[Any],
    product: Product,
    *,
    out_dtypes: Sequence[Any],
    in_place: Sequence[int | None] = (),
    sizes: jax.Array | None = None,
    blocks: tuple[Any, Any] | None = None,
) -> list[jax.Array]:
    """Returns the results of `function(product, *operands)`, or `function(gate, up, *operands)`.

    The function sees products as float32 arrays of the result's axes; of types that float32
    cannot hold they keep their own. It closes over no array.

    With `sizes` the product is a ragged one. Of a contraction the function sees the matrices of
    all W groups, (W, K, N), that of an empty one as 0, and its operands as they are. Of T rows in
    groups an operand of rank 3, (W, 1, N) or (W, 1, 1), has an entry for each group: the function
    sees (T, N) or (T, 1), each row's own. Rows of no group are 0 in the product, in such operands,
    and in results of the product's shape, whatever the function makes of them. The gradient by such
    an operand is summed in float32 over the rows of each group, of cotangents as wide as those of
    the product.

    Args:
      factors: the left operand, and the right one; or gate and up, of one shape; or one array that
        stacks them, along an axis of extent 2 whose letter stands nowhere else in its subscripts.
      product: its options are canonical. `preferred_element_type` is the dtype of the product
        without a function.
      out_dtypes: those that the results are cast to.
      in_place: of the first results, the operand whose memory each may take, if both are alike.
      sizes: of a ragged product, as in `hopper_ragged_dot`.
      blocks: scales of blocks of both operands, as in `scaled_dot`.
    """
    operands = tuple(map(jnp.asarray, operands))
    groups, dtype = product.groups, accumulator_dtype(product.options.preferred_element_type)
    product = product.with_options(preferred_element_type=dtype)
    of_rows = groups if groups and not is_varlen_k(product.subscripts) else None
    if groups:
        assert sizes is not None
        *factors, sizes = varying_together(*factors, sizes)
        by_group = tuple(of_rows is not None and x.ndim == 3 for x in operands)
        residual = residual_of(factors[0].dtype.name)
        function = partial(_by_rows, function, by_group, groups, residual)
        pairs = zip(operands, by_group, strict=True)
        operands = (sizes, *(lax.squeeze(x, (1,)) if each else x for x, each in pairs))
        in_place = [None if x is None else x + 1 for x in in_place]
    else:
        factors = varying_together(*factors)
    lhs, *right_operands = factors
    accumulators = abstract(
        partial(accumulators_of, product, by_xla=True),
        lhs, right_operands, *operands[: product.num_sizes_operands],
    )  # fmt: skip
    products = len(accumulators)

    def completed(*args: Any) -> list[Any]:
        """Returns the results in their dtypes; of rows in groups 0 in rows of no group."""
        outputs = jax.tree.leaves(function(*args))
        cast = [lax.convert_element_type(x, to) for x, to in zip(outputs, out_dtypes, strict=True)]
        if of_rows is None:
            return cast
        return [
            segment_mask(x, args[products], of_rows)
            if x.shape == args[0].shape and not any(output is y for y in args[:products])
            else x
            for x, output in zip(cast, outputs, strict=True)
        ]

    params = {
        "jaxpr": traced(completed, *accumulators, *operands),
        "product": product,
        "num_b": len(right_operands),
        "in_place": tuple(in_place),
    }
    if blocks:
        return scaled_dot(factors, blocks, product, operands, params["jaxpr"], params["in_place"])
    if product.options.implementation == "xla":
        return reference_fused(*factors, *operands, **params, by_xla=product.options.by_jax)
    return hopper_fused_p.bind(*factors, *operands, **params)


def _by_rows(
    function: Callable[..., Any], by_group: tuple[bool, ...], groups: Groups, dtype: Any, *args: Any
) -> Any:
    """Returns `function` of products and operands, those `by_group` taken to the rows.

    `args` are products, sizes, operands; gradients by those `by_group` are summed in `dtype`.
    """
    count = len(args) - 1 - len(by_group)
    products, sizes, operands = args[:count], args[count], args[count + 1 :]
    length = products[0].shape[0]
    operands = [
        segment_broadcast(x, sizes, groups, length, dtype) if each else x
        for x, each in zip(operands, by_group, strict=True)
    ]
    return function(*products, *operands)
