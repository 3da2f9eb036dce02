"""Functions of ragged products: what `ragged_dot` with an epilogue and grouped gated units run."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, typeof
from jax.core import Tracer

from ..fusion.memo import memoised
from ..primitives.fused_dot import accumulator_dtype, fused_dot
from ..primitives.gather_rows import pick_rows
from ..primitives.group_sizes import as_int32, sizes_in_rows, spans_of
from ..primitives.ragged_dot import ROWS, Spans
from .dense import INLINE, Implementation, Preactivation
from .explicit_axes import (
    in_auto_axes,
    is_explicit,
    partitions,
    sharding_of_product,
    shardings_of_results,
)
from .ragged_axes import RaggedAxes
from .settled import Settled, settled
from .sm_limit import current_max_sms
from .steps import Gate, Steps, traced


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
    length = (lhs if rows is None else rows).shape[0]
    types = typeof(lhs), typeof(rights[0]), typeof(sizes)
    own, seen = settled(
        op, function, lambda: _wide_products(*types, length, len(rights), options),
        tuple(_seen_from_rows(operands, length)), eager=not isinstance(lhs, Tracer),
    )  # fmt: skip
    if all(x.ndim < 3 for x in seen[len(operands) :]):  # of rank 3 it would be by groups
        operands = (*operands, *seen[len(operands) :])
    else:
        own = function
    return _traced_grouped(
        lhs, rights, sizes, offset, rows, operands, op, own, options, dtypes, preactivation,
        implementation,
    )  # fmt: skip


def _seen_from_rows(operands: tuple[Any, ...], length: int) -> list[Any]:
    """Returns the function's operands as it sees them: of entries for groups each row's own."""
    return [
        jax.ShapeDtypeStruct((length, x.shape[2]), x.dtype) if jnp.ndim(x) == 3 else x
        for x in operands
    ]


@memoised
def _wide_products(
    lhs: Any, right: Any, sizes: Any, length: int, rights: int, options: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Returns the products as the function sees them.

    Args:
      lhs, right, sizes: abstract values.
      length: rows of the product.
      rights: how many arrays hold weights.
    """
    groups, k, *planes, n = right.shape
    lhs = jax.ShapeDtypeStruct((length, *lhs.shape[1:]), lhs.dtype)
    weights = jax.ShapeDtypeStruct((groups, k, n), right.dtype)
    params = canonical(lhs, weights, sizes, BASIC, dict(options))
    dtype = params["preferred_element_type"] or jnp.result_type(lhs, weights)
    product = jax.ShapeDtypeStruct((length, n), accumulator_dtype(dtype))
    return (product,) * (2 if planes else rights)


@partial(jax.jit, static_argnums=range(6, 12), inline=INLINE)
def _traced_grouped(
    lhs: Any,
    rights: tuple[Any, ...],
    sizes: Any,
    offset: Any,
    rows: Any,
    operands: tuple[Any, ...],
    op: str,
    function: Steps | Gate | Settled,
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
    types = typeof(lhs), typeof(rights[0]), typeof(sizes)
    products = _wide_products(*types, length, len(rights), options)
    seen = _seen_from_rows(operands, length)
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

        def typed(lhs: Any, rhs: Any, sizes: Any, operands: tuple[Any, ...]) -> jax.Array:
            return scaled_sum(lhs, rhs, sizes, operands, numbers, options, steps, implementation)

        return in_auto_axes(typed, out_sharding, lhs, rhs, sizes, operands)
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
            in_place=what.in_place(steps.named, product), sizes=own_sizes,
            spans=Spans.plain(groups), max_sms=current_max_sms(),
        )  # fmt: skip
        return what.structured(results)

    return axes.mapped(of_matrices, lhs, rhs, sizes, *operands[place : place + 1])
