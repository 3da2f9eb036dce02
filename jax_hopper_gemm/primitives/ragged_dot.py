"""The JAX primitive `hopper_ragged_dot`: products of rows in groups that only the GPU knows.

Rows are cut into spans by an int32 array of sizes, `Spans` says which span belongs to which group,
and the subscripts are one of the three forms in `spans`. The product is bilinear in its two
arrays; its derivatives are again among the forms, with no array transposed. `jax.vmap` of it is
one flat product, of all matrices' rows behind one another.

Only lowering for CUDA decides between a kernel and XLA. Elsewhere, and where XLA is the answer, the
product lowers to `jax.lax.ragged_dot`, or to one product after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.interpreters import ad, mlir

from .. import sharding
from ..fusion.jaxprs import alike_in_shard_map, traced
from ..gemm.groups import (
    CONTRACTION,
    FORMS,
    GROUPS,
    ROWS,
    ROWS_TRANSPOSED,
    Spans,
    is_contraction,
)
from ..gemm.subscripts import Subscripts
from ..lowering.call import Call
from ..lowering.register import Lowering
from ..lowering.route import Product
from .define import ProductRules, Rules, define_primitive
from .dot import as_cotangent, as_dot_general_params
from .group_sizes import sizes_of_each
from .ragged_dot_sharded import NAME, emit_ragged, product_at, ragged_of_shards
from .ragged_reference import alike, reference_ragged_dot

__all__ = [
    "CONTRACTION",
    "ROWS",
    "ROWS_TRANSPOSED",
    "Spans",
    "hopper_ragged_dot",
    "hopper_ragged_dot_p",
    "reference_ragged_dot",
]


def hopper_ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    *,
    subscripts: Subscripts,
    spans: Spans,
    precision: Any,
    preferred_element_type: Any,
    implementation: str | None,
    max_sms: int | None = None,
) -> jax.Array:
    """Returns a ragged product.

    Rows that belong to no group are 0 in a result of rows, and are left out of a contraction; the
    matrix of an empty group is 0.

    Args:
      lhs: (T, K).
      rhs: weights (W, K, N) by "mk,gkn->mn" or (W, N, K) by "mk,gnk->mn", for a result (T, N); or
        (T, N) by "mk,mn->gkn", for a result (W, K, N).
      sizes: (S,) int32, S + 1 a multiple of `spans.period`. Of several periods each has as many
        rows, as `jax.vmap` makes them.
      subscripts, spans: see `spans`. W is `spans.matrices(S)`.
      precision, preferred_element_type: as in `hopper_dot`.
      implementation: None, "hopper" or "xla".
      max_sms: as in `hopper_dot`.
    """
    lhs, rhs, sizes = alike_in_shard_map(lhs, rhs, sizes)
    return hopper_ragged_dot_p.bind(
        lhs,
        rhs,
        sizes,
        subscripts=subscripts,
        spans=spans,
        precision=precision,
        preferred_element_type=preferred_element_type,
        implementation=implementation,
        max_sms=max_sms,
    )


def product_of(avals: Sequence[Any], out_avals: Sequence[Any], params: dict[str, Any]) -> Product:
    """Returns what a `hopper_ragged_dot_p` between these abstract values asks for."""
    (lhs, rhs, sizes), (out,) = avals, out_avals
    return Product(
        params["subscripts"], lhs.shape, lhs.dtype.name, rhs.shape, rhs.dtype.name,
        out.dtype.name, params["precision"], spans=params["spans"], sizes=sizes.shape[0],
        max_sms=params["max_sms"],
    )  # fmt: skip


def _check(lhs: Any, rhs: Any, sizes: Any, subscripts: Subscripts, spans: Spans) -> None:
    """Asserts what those who bind the primitive see to."""
    assert subscripts in FORMS, subscripts
    assert sizes.ndim == 1 and sizes.dtype == np.int32, sizes
    matrices = spans.matrices(sizes.shape[0])
    assert spans.step in (0, spans.count), spans
    assert lhs.ndim == 2 and rhs.ndim == len(subscripts.rhs), (lhs, rhs)
    if is_contraction(subscripts):
        assert spans.step or spans.periods(sizes.shape[0]) == 1, "periods share a result"
        assert lhs.shape[0] == rhs.shape[0], (lhs, rhs)
    else:
        assert rhs.shape[0] == matrices, (rhs, matrices)
        assert lhs.shape[1] == rhs.shape[subscripts.rhs.index("k")], (lhs, rhs)


def _abstract_eval(lhs: Any, rhs: Any, sizes: Any, **params: Any) -> Any:
    """The dtype is that of `lax.dot_general`, the shape that of `lax.ragged_dot`."""
    _check(lhs, rhs, sizes, params["subscripts"], params["spans"])
    (out,) = traced(partial(alike, **params), lhs, rhs, sizes).out_avals
    return out


# Derivatives.


def _transpose(
    cotangent: Any,
    lhs: Any,
    rhs: Any,
    sizes: Any,
    *,
    subscripts: Subscripts,
    spans: Spans,
    **params: Any,
) -> list[Any]:
    of_lhs = ad.is_undefined_primal(lhs)
    primal = lhs.aval if of_lhs else rhs.aval
    if type(cotangent) is ad.Zero:
        zero = ad.Zero(primal)
        return [zero if of_lhs else None, None if of_lhs else zero, None]
    product = partial(_bind, sizes, spans=spans, **params)
    if subscripts == CONTRACTION:
        gradient = (
            product(rhs, cotangent, subscripts=ROWS_TRANSPOSED)
            if of_lhs
            else product(lhs, cotangent, subscripts=ROWS)
        )
    elif of_lhs:
        other = ROWS_TRANSPOSED if subscripts == ROWS else ROWS
        gradient = product(cotangent, rhs, subscripts=other)
    else:
        pair = (lhs, cotangent) if subscripts == ROWS else (cotangent, lhs)
        gradient = _of_weights(*pair, sizes, spans=spans, **params)
    gradient = as_cotangent(primal, gradient)
    return [gradient if of_lhs else None, None if of_lhs else gradient, None]


def _bind(sizes: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
    return hopper_ragged_dot_p.bind(lhs, rhs, sizes, **params)


def _of_weights(lhs: Any, rhs: Any, sizes: Any, *, spans: Spans, **params: Any) -> Any:
    """Returns the contraction over each group's rows; what periods share is summed in float32."""
    periods = spans.periods(sizes.shape[0])
    if spans.step or periods == 1:
        return _bind(sizes, lhs, rhs, subscripts=CONTRACTION, spans=spans, **params)
    wide = jnp.float32 if _is_narrow(lhs) and _is_narrow(rhs) else None
    params["preferred_element_type"] = wide or params["preferred_element_type"]
    spans = replace(spans, step=spans.count)
    parts = _bind(sizes, lhs, rhs, subscripts=CONTRACTION, spans=spans, **params)
    return parts.reshape(periods, spans.count, *parts.shape[1:]).sum(0)


def _is_narrow(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 4


# vmap.


def _batch(
    axis_data: Any, args: Any, axes: Any, *, subscripts: Subscripts, spans: Spans, **params: Any
) -> tuple[Any, int]:
    bind = partial(hopper_ragged_dot_p.bind, subscripts=subscripts, **params)
    if axis_data.size == 0:
        avals = map(_unmapped, args, axes)
        out = jax.eval_shape(partial(bind, spans=spans), *avals)
        return jnp.zeros((0, *out.shape), out.dtype), 0
    if free := _free_letter(subscripts, axes):
        return _batch_free(bind, axis_data.size, args, axes, subscripts, free, spans)
    return _batch_rows(bind, axis_data.size, args, axes, subscripts, spans), 0


def _unmapped(array: Any, axis: int | None) -> jax.ShapeDtypeStruct:
    shape = [extent for i, extent in enumerate(array.shape) if i != axis]
    return jax.ShapeDtypeStruct(shape, array.dtype)


def _free_letter(subscripts: Subscripts, axes: Any) -> tuple[int, str] | None:
    """Returns the one operand that is mapped, and its letter that all rows have in common.

    None where the rows themselves are mapped.
    """
    mapped = [i for i, axis in enumerate(axes) if axis is not None]
    if mapped == [1]:
        return 1, "n"
    return (0, "k") if mapped == [0] and subscripts == CONTRACTION else None


def _batch_free(
    bind: Any,
    size: int,
    args: Any,
    axes: Any,
    subscripts: Subscripts,
    free: tuple[int, str],
    spans: Spans,
) -> tuple[Any, int]:
    """Maps one operand by a longer axis: its mapped one joins `free`."""
    operand, letter = free
    labels = (subscripts.lhs, subscripts.rhs)[operand]
    args, axis = list(args), labels.index(letter)
    array = jnp.moveaxis(args[operand], axes[operand], axis)
    shape = array.shape
    args[operand] = array.reshape(*shape[:axis], size * shape[axis + 1], *shape[axis + 2 :])
    out = bind(*args, spans=spans)
    axis = subscripts.out.index(letter)
    shape = (*out.shape[:axis], size, out.shape[axis] // size, *out.shape[axis + 1 :])
    return out.reshape(shape), axis


def _batch_rows(
    bind: Any, size: int, args: Any, axes: Any, subscripts: Subscripts, spans: Spans
) -> Any:
    """Maps by more rows: those of each matrix behind one another, each with its own periods."""

    def whole(array: Any, axis: int | None) -> Any:
        if axis is None:
            return jnp.broadcast_to(array, (size, *array.shape))
        return jnp.moveaxis(array, axis, 0)

    lhs, (rhs, rhs_axis), given = whole(args[0], axes[0]), (args[1], axes[1]), args[2]
    if axes[2] is not None:
        given = jnp.moveaxis(given, axes[2], 0)
    length, count = lhs.shape[1], given.shape[-1]
    periods, matrices = spans.periods(count), spans.matrices(count)
    contraction = subscripts == CONTRACTION
    if contraction:
        rhs, step = whole(rhs, rhs_axis), spans.count
        rhs = rhs.reshape(size * length, rhs.shape[-1])
    elif rhs_axis is None and (periods == 1 or not spans.step):
        step = 0
    else:
        rhs, step = whole(rhs, rhs_axis), spans.count
        matrix = rhs.shape[2:]
        if periods > 1 and not spans.step:
            rhs = jnp.broadcast_to(rhs[:, None], (size, periods, matrices, *matrix))
        rhs = rhs.reshape(size * spans.count * periods, *matrix)
    sizes = sizes_of_each(given, length, size)
    flat = replace(spans, step=step)
    out = bind(lhs.reshape(size * length, lhs.shape[-1]), rhs, sizes, spans=flat)
    return out.reshape(size, matrices if contraction else length, *out.shape[1:])


# Lowering.


_lower_to_xla = mlir.lower_fun(reference_ragged_dot, multiple_results=False)


def _lower_for_cuda(
    ctx: mlir.LoweringRuleContext, lhs: Any, rhs: Any, sizes: Any, **params: Any
) -> Any:
    launched = None
    if params["implementation"] != "xla":
        product = product_of(ctx.avals_in, ctx.avals_out, params)
        call = Call(product, (lhs, rhs), sizes=sizes)
        launched = call.lower(ctx, params["implementation"])
    return launched or _lower_to_xla(ctx, lhs, rhs, sizes, **params)


def _lower_partitioned(
    ctx: mlir.LoweringRuleContext, lhs: Any, rhs: Any, sizes: Any, **params: Any
) -> Any:
    if params["implementation"] == "xla" or not sharding.applies(ctx):
        return None
    product = product_of(ctx.avals_in, ctx.avals_out, params)
    return emit_ragged(
        ctx, Call(product, (lhs, rhs), sizes=sizes), precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
        implementation=params["implementation"],
    )  # fmt: skip


def _dot_general(params: dict[str, Any]) -> dict[str, Any]:
    """A ragged product is a dot of its rows with one matrix."""
    options = {key: params[key] for key in ("precision", "preferred_element_type")}
    subscripts = params["subscripts"].without(GROUPS)
    return as_dot_general_params({"subscripts": subscripts, "out_sharding": None} | options)


hopper_ragged_dot_p = define_primitive(
    NAME,
    reference_ragged_dot,
    abstract=_abstract_eval,
    rules=Rules(linear_in=(0, 1), transpose=_transpose, batch=_batch),
    lowering=Lowering(_lower_for_cuda, _lower_partitioned, itemgetter("implementation")),
    product=ProductRules(product_of, _dot_general),
)
sharding.register(NAME, partial(ragged_of_shards, hopper_ragged_dot_p.bind), product_at)
