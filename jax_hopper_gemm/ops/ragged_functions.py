"""Functions of ragged products: what `ragged_dot` with an epilogue and grouped gated units run."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..fused import accumulator_dtype, fused_dot
from ..picks import pick_rows
from ..ragged import ROWS
from .dense import INLINE, Implementation, Preactivation
from .epilogue import Gate, Steps, traced
from .explicit import (
    in_auto_axes,
    is_explicit,
    partitions,
    sharding_of_product,
    shardings_of_results,
)
from .limit import current_max_sms
from .ragged_axes import RaggedAxes
from .ragged_lax import BASIC, canonical, left_to_lax
from .ragged_sizes import as_int32, spans_of


def run_grouped(
    op: str,
    lhs: Any,
    rights: tuple[Any, ...],
    sizes: Any,
    offset: Any,
    operands: tuple[Any, ...],
    function: Steps | Gate,
    precision: Any,
    preferred: Any,
    preactivation: Preactivation,
    implementation: Implementation,
    out_sharding: Any = None,
    rows: Any = None,
) -> Any:
    """Returns a function of ragged products.

    Args:
      op: what the user called, for messages.
      lhs: (M, K), or what `rows` pick from.
      rights: weights (G, K, N); or gate and up, or both in one array (G, K, 2, N).
      operands: the function's; those of rank 3 have an entry for each group.
      preferred: dtype of the product, or a tuple of the results' dtypes.
      rows: (M,) indices of rows of `lhs`, or None.
    """
    if isinstance(precision, list):
        precision = tuple(precision)
    if is_explicit(lhs, *rights, sizes, rows, *operands):

        def grouped(*args: Any) -> Any:
            lhs, rights, sizes, offset, operands, rows = args
            return run_grouped(
                op, lhs, rights, sizes, offset, operands, function, precision, preferred,
                preactivation, implementation, None, rows,
            )  # fmt: skip

        arrays = lhs, rights, sizes, offset, operands, rows
        if out_sharding is None:
            weights = partitions(rights[0])
            pair = partitions(lhs), (*weights[:2], weights[-1])
            out_sharding = sharding_of_product(op, RaggedAxes.of(BASIC, 2, 3), *pair, rows)
        if getattr(function, "epilogue", None) is not None:
            shape = (lhs if rows is None else rows).shape[0], rights[0].shape[-1]
            out_sharding = shardings_of_results(grouped, arrays, out_sharding, shape)
        return in_auto_axes(grouped, out_sharding, *arrays)
    if out_sharding is not None:
        raise ValueError(f"{op}: {left_to_lax(lhs, rights[0], sizes, out_sharding)}")
    dtypes = None
    if isinstance(preferred, tuple | list):
        dtypes, preferred = tuple(preferred), None
    options = (("precision", precision), ("preferred_element_type", preferred))
    return _traced_grouped(
        lhs, rights, sizes, offset, rows, operands, op, function, options, dtypes, preactivation,
        implementation,
    )  # fmt: skip


@partial(jax.jit, static_argnums=range(6, 12), inline=INLINE)
def _traced_grouped(
    lhs: Any,
    rights: tuple[Any, ...],
    sizes: Any,
    offset: Any,
    rows: Any,
    operands: tuple[Any, ...],
    op: str,
    function: Steps | Gate,
    options: tuple[Any, ...],
    dtypes: tuple[Any, ...] | None,
    preactivation: Preactivation,
    implementation: Implementation,
) -> Any:
    lhs = rows_of(lhs, rows)
    groups, k, *planes, n = rights[0].shape
    weights = jax.ShapeDtypeStruct((groups, k, n), rights[0].dtype)
    params = canonical(lhs, weights, sizes, BASIC, dict(options))
    dtype = params["preferred_element_type"] or jnp.result_type(lhs, weights)
    length = lhs.shape[0]
    product = jax.ShapeDtypeStruct((length, n), accumulator_dtype(dtype))
    products = (product,) * (2 if planes else len(rights))
    seen = [
        jax.ShapeDtypeStruct((length, x.shape[2]), x.dtype) if jnp.ndim(x) == 3 else x
        for x in operands
    ]
    what = traced(op, function, products, seen, dtype, dtypes)
    sizes, spans = spans_of(as_int32(sizes), offset, groups, length)
    results = fused_dot(
        what.function, lhs, rights, (*operands, *what.operands[len(operands) :]),
        subscripts=ROWS.replace("kn", "kcn") if planes else ROWS, precision=params["precision"],
        product_dtype=dtype, out_dtypes=what.dtypes, preactivation=preactivation,
        implementation=implementation, sizes=sizes, spans=spans, max_sms=current_max_sms(),
    )  # fmt: skip
    return what.structured(results)


def rows_of(lhs: Any, rows: Any) -> Any:
    """Returns the rows of `lhs` that indices pick; all where these are None."""
    return lhs if rows is None else pick_rows(lhs, as_int32(rows, least=-1))
