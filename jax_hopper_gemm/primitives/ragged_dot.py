"""The JAX primitive `hopper_ragged_dot`: products of rows in groups that only the GPU knows.

Rows are cut into runs by an int32 array of sizes, `Groups` says which run belongs to which group,
and the subscripts are one of the three forms in `gemm.groups`. The product is bilinear in its two
arrays; its derivatives are again among the forms, with no array transposed. `jax.vmap` of it is
one flat product, of all matrices' rows behind one another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.interpreters import ad, mlir

from .. import sharding
from ..fusion.jaxprs import traced, varying_together
from ..gemm.groups import (
    DGRAD,
    FORMS,
    VARLEN_K,
    VARLEN_K_T,
    VARLEN_M_KN,
    VARLEN_M_NK,
    is_varlen_k,
)
from ..gemm.product import Product
from ..gemm.subscripts import Subscripts
from ..lowering.call import Call
from ..lowering.emit import lower_call
from ..lowering.register import Lowering
from ..lowering.request import Request
from .define import Rules, define_primitive, mapped_first
from .dot import as_cotangent, entering
from .group_sizes import sizes_of_each
from .ragged_dot_sharded import NAME, call_at, emit_ragged, ragged_of_shards
from .ragged_reference import array_like_product, reference_ragged_dot


def hopper_ragged_dot(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, product: Product
) -> jax.Array:
    """Returns a ragged product.

    Rows that belong to no group are 0 in a result of rows, and are left out of a contraction; the
    matrix of an empty group is 0.

    Args:
      lhs: (T, K).
      rhs: weights (W, K, N) by "mk,gkn->mn" or (W, N, K) by "mk,gnk->mn", for a result (T, N); or
        (T, N) by "mk,mn->gkn", for a result (W, K, N). W is `groups.matrices(S)`. Or lhs (K, T) and
        rhs (N, T) by "km,nm->gkn" where all sizes are multiples of `PROMOTION_K`, as T is.
      sizes: (S,) int32, S + 1 a multiple of `groups.period`. Of several periods each has as many
        rows, as `jax.vmap` makes them.
      product: see `gemm.groups`; its precision and dtype are canonical.
    """
    lhs, rhs, sizes = varying_together(lhs, rhs, sizes)
    return hopper_ragged_dot_p.bind(lhs, rhs, sizes, product=product)


def _abstract_eval(lhs: Any, rhs: Any, sizes: Any, *, product: Product) -> Any:
    """The dtype is that of `lax.dot_general`, the shape that of `lax.ragged_dot`."""
    # Those who bind the primitive see to all that is asserted.
    subscripts, groups = product.subscripts, product.groups
    assert subscripts in (*FORMS, VARLEN_K_T), subscripts
    assert groups and product.out_sharding is None and product.batch == 0, product
    assert sizes.ndim == 1 and sizes.dtype == np.int32, sizes
    matrices = groups.matrices(sizes.shape[0])
    assert groups.step in (0, groups.count), groups
    assert not groups.step or groups.periods(sizes.shape[0]), groups
    assert lhs.ndim == 2 and rhs.ndim == len(subscripts.rhs), (lhs, rhs)
    if is_varlen_k(subscripts):
        own = groups.step == groups.count
        assert own or groups.periods(sizes.shape[0]) == 1, "periods share a result"
    else:
        assert rhs.shape[0] == matrices, (rhs, matrices)
    (out,) = traced(partial(array_like_product, product=product), lhs, rhs, sizes).out_avals
    return out


# Derivatives.


def _transpose(cotangent: Any, lhs: Any, rhs: Any, sizes: Any, *, product: Product) -> list[Any]:
    of_lhs = ad.is_undefined_primal(lhs)
    primal, other = (lhs.aval, rhs) if of_lhs else (rhs.aval, lhs)
    cotangent, options = entering(primal, cotangent, other, product.options, 1 if of_lhs else 0)
    product, subscripts = replace(product, options=options), product.subscripts
    cotangent_right = subscripts == VARLEN_K or (not of_lhs and subscripts == VARLEN_M_KN)
    if options.recipe and cotangent_right:
        product = product.with_options(recipe=options.recipe.swapped())
    if subscripts == VARLEN_K and of_lhs:
        gradient = _by_form(VARLEN_M_NK, rhs, cotangent, sizes, product)
    elif subscripts == VARLEN_K:
        gradient = _by_form(VARLEN_M_KN, lhs, cotangent, sizes, product)
    elif of_lhs:
        gradient = _by_form(DGRAD[subscripts], cotangent, rhs, sizes, product)
    else:
        pair = (lhs, cotangent) if subscripts == VARLEN_M_KN else (cotangent, lhs)
        gradient = _of_weights(*pair, sizes, product)
    gradient = as_cotangent(primal, gradient)
    return [gradient if of_lhs else None, None if of_lhs else gradient, None]


def _by_form(subscripts: Subscripts, lhs: Any, rhs: Any, sizes: Any, product: Product) -> Any:
    gradient = replace(product, subscripts=subscripts)
    return hopper_ragged_dot_p.bind(lhs, rhs, sizes, product=gradient)


def _of_weights(lhs: Any, rhs: Any, sizes: Any, product: Product) -> Any:
    """Returns the contraction over each group's rows; what periods share is summed in float32."""
    assert (groups := product.groups)
    periods = groups.periods(sizes.shape[0])
    if groups.step == groups.count or periods == 1:
        return _by_form(VARLEN_K, lhs, rhs, sizes, product)
    if all(jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4 for x in (lhs, rhs)):
        product = product.with_options(preferred_element_type=np.dtype(np.float32))
    product = replace(product, groups=replace(groups, step=groups.count))
    parts = _by_form(VARLEN_K, lhs, rhs, sizes, product)
    return parts.reshape(periods, groups.count, *parts.shape[1:]).sum(0)


# vmap.


def _batch(axis_data: Any, args: Any, axes: Any, *, product: Product) -> tuple[Any, int]:
    if axis_data.size == 0:
        avals = [
            jax.ShapeDtypeStruct([n for i, n in enumerate(x.shape) if i != axis], x.dtype)
            for x, axis in zip(args, axes, strict=True)
        ]
        out = jax.eval_shape(partial(hopper_ragged_dot_p.bind, product=product), *avals)
        return jnp.zeros((0, *out.shape), out.dtype), 0
    mapped = [i for i, axis in enumerate(axes) if axis is not None]
    if mapped == [1]:  # all rows have the mapped axis in common
        return _batch_free(axis_data.size, args, axes, product, 1, "n")
    if mapped == [0] and product.subscripts == VARLEN_K:
        return _batch_free(axis_data.size, args, axes, product, 0, "k")
    return _batch_rows(axis_data.size, args, axes, product), 0


def _batch_free(
    size: int, args: Any, axes: Any, product: Product, operand: int, letter: str
) -> tuple[Any, int]:
    """Maps one operand by a longer axis: its mapped one joins that of a letter."""
    subscripts = product.subscripts
    args, axis = list(args), (subscripts.lhs, subscripts.rhs)[operand].index(letter)
    array = jnp.moveaxis(args[operand], axes[operand], axis)
    shape = array.shape
    args[operand] = array.reshape(*shape[:axis], size * shape[axis + 1], *shape[axis + 2 :])
    out = hopper_ragged_dot_p.bind(*args, product=product)
    axis = subscripts.out.index(letter)
    shape = (*out.shape[:axis], size, out.shape[axis] // size, *out.shape[axis + 1 :])
    return out.reshape(shape), axis


def _batch_rows(size: int, args: Any, axes: Any, product: Product) -> Any:
    """Maps by more rows: those of each matrix behind one another, each with its own periods."""
    assert (groups := product.groups)

    lhs, (rhs, rhs_axis), sizes = mapped_first(size, args[0], axes[0]), (args[1], axes[1]), args[2]
    if axes[2] is not None:
        sizes = jnp.moveaxis(sizes, axes[2], 0)
    length, count = lhs.shape[1], sizes.shape[-1]
    periods, matrices = groups.periods(count), groups.matrices(count)
    contraction = product.subscripts == VARLEN_K
    if contraction:
        rhs, step = mapped_first(size, rhs, rhs_axis), groups.count
        rhs = rhs.reshape(size * length, rhs.shape[-1])
    elif rhs_axis is None and (periods == 1 or not groups.step):
        step = 0
    else:
        rhs, step = mapped_first(size, rhs, rhs_axis), groups.count
        matrix = rhs.shape[2:]
        if periods > 1 and not groups.step:
            rhs = jnp.broadcast_to(rhs[:, None], (size, periods, matrices, *matrix))
        rhs = rhs.reshape(size * groups.count * periods, *matrix)
    sizes = sizes_of_each(sizes, length, size)
    flat = replace(product, groups=replace(groups, step=step))
    out = hopper_ragged_dot_p.bind(
        lhs.reshape(size * length, lhs.shape[-1]), rhs, sizes, product=flat
    )
    return out.reshape(size, matrices if contraction else length, *out.shape[1:])


# Lowering.


def _request_of(avals: Sequence[Any], out_avals: Sequence[Any], *, product: Product) -> Request:
    lhs, rhs, sizes = avals
    return Request.of(product, lhs, rhs, out_avals[0], sizes)


def _lower(
    emit: Callable[..., Any], ctx: mlir.LoweringRuleContext, *values: Any, product: Product
) -> Any:
    *factors, sizes = values
    request = _request_of(ctx.avals_in, ctx.avals_out, product=product)
    return emit(ctx, Call(request, tuple(factors), sizes=sizes))


hopper_ragged_dot_p = define_primitive(
    NAME,
    reference_ragged_dot,
    abstract=_abstract_eval,
    rules=Rules(linear_in=(0, 1), transpose=_transpose, batch=_batch),
    lowering=Lowering(partial(_lower, lower_call), partial(_lower, emit_ragged)),
    request_of=_request_of,
)
sharding.register(NAME, partial(ragged_of_shards, hopper_ragged_dot_p.bind), call_at)
