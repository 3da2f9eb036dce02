"""A contraction over the rows of groups, added to what is there: weights' gradients that add up."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..fused import accumulator_dtype, fused_dot
from ..ragged import Spans
from .dense import INLINE, Implementation
from .epilogue import Steps, traced
from .explicit import in_auto_axes, is_explicit, partitions, sharding_of_product
from .limit import current_max_sms
from .ragged_axes import RaggedAxes
from .ragged_lax import canonical, lax_ragged_dot_general, left_to_lax, refuse_hopper
from .ragged_sizes import sizes_in_rows


@partial(jax.jit, static_argnums=(4, 5, 6, 7), inline=INLINE)
def scaled_sum(
    lhs: Any,
    rhs: Any,
    sizes: Any,
    operands: tuple[Any, ...],
    numbers: lax.RaggedDotDimensionNumbers,
    options: tuple[Any, ...],
    steps: Steps,
    implementation: Implementation,
) -> jax.Array:
    """Returns `alpha * product + beta * c`, the ragged axis contracted.

    Args:
      lhs, rhs, sizes, numbers: as in `ragged_dot_general`, checked.
      operands: those of alpha, c and beta that `steps.named` names, in this order.
      options: of JAX's product, as pairs.
    """
    out_sharding = dict(options)["out_sharding"]
    if is_explicit(lhs, rhs, sizes, *operands):
        if out_sharding is None:
            axes = RaggedAxes.of(numbers, lhs.ndim, rhs.ndim)
            pair = partitions(lhs), partitions(rhs)
            out_sharding = sharding_of_product(steps.op, axes, *pair, None)
        options = tuple((dict(options) | {"out_sharding": None}).items())

        def product(lhs: Any, rhs: Any, sizes: Any, operands: tuple[Any, ...]) -> jax.Array:
            return scaled_sum(lhs, rhs, sizes, operands, numbers, options, steps, implementation)

        return in_auto_axes(product, out_sharding, lhs, rhs, sizes, operands)
    theirs = partial(lax_ragged_dot_general, ragged_dot_dimension_numbers=numbers, **dict(options))
    if reason := left_to_lax(lhs, rhs, sizes, out_sharding, numbers):
        refuse_hopper(steps.op, reason, implementation)
        dtype = jax.eval_shape(theirs, lhs, rhs, sizes).dtype
        product = theirs(lhs, rhs, sizes, preferred_element_type=accumulator_dtype(dtype))
        return traced(steps.op, steps, (product,), operands, dtype, None).apply(product)
    params = canonical(lhs, rhs, sizes, numbers, dict(options))
    dtype = params["preferred_element_type"] or jnp.result_type(lhs, rhs)
    axes = RaggedAxes.of(numbers, lhs.ndim, rhs.ndim)
    place = steps.named.index("c") if "c" in steps.named else len(operands)

    def of_matrices(left: Any, right: Any, own_sizes: Any, *c: Any, inner: int) -> jax.Array:
        own_sizes = sizes_in_rows(own_sizes, left.shape[0], inner)
        groups = own_sizes.shape[0]
        shape = (groups, left.shape[1], right.shape[1])
        product = jax.ShapeDtypeStruct(shape, accumulator_dtype(dtype))
        own = (*operands[:place], *c, *operands[place + 1 :])
        what = traced(steps.op, steps, (product,), own, dtype, None)
        results = fused_dot(
            what.function, left, (right,), what.operands, subscripts=axes.subscripts,
            precision=params["precision"], product_dtype=dtype, out_dtypes=what.dtypes,
            preactivation="save", implementation=implementation,
            in_place=what.in_place(steps, product), sizes=own_sizes, spans=Spans.plain(groups),
            max_sms=current_max_sms(),
        )  # fmt: skip
        return what.structured(results)

    return axes.mapped(of_matrices, lhs, rhs, sizes, *operands[place : place + 1])
