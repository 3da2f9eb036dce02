"""The JAX primitive `hopper_ragged_dot`: products of rows in groups that only the GPU knows.

Rows are cut into runs by an int32 array of sizes, `Groups` says which run belongs to which group,
and the subscripts are one of the three forms in `gemm.groups`. The product is bilinear in its two
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
    DGRAD,
    FORMS,
    GROUP,
    VARLEN_K,
    VARLEN_M_KN,
    VARLEN_M_NK,
    GroupedAxis,
    Groups,
    is_varlen_k,
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


def hopper_ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    *,
    subscripts: Subscripts,
    groups: Groups,
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
      sizes: (S,) int32, S + 1 a multiple of `groups.period`. Of several periods each has as many
        rows, as `jax.vmap` makes them.
      subscripts, groups: see `gemm.groups`. W is `groups.matrices(S)`.
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
        groups=groups,
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
        out.dtype.name, params["precision"],
        groups=GroupedAxis.of(params["subscripts"], params["groups"], sizes.shape[0]),
        max_sms=params["max_sms"],
    )  # fmt: skip


def _check(lhs: Any, rhs: Any, sizes: Any, subscripts: Subscripts, groups: Groups) -> None:
    """Asserts what those who bind the primitive see to."""
    assert subscripts in FORMS, subscripts
    assert sizes.ndim == 1 and sizes.dtype == np.int32, sizes
    matrices = groups.matrices(sizes.shape[0])
    assert groups.step in (0, groups.count), groups
    assert not groups.step or groups.periods(sizes.shape[0]), groups
    assert lhs.ndim == 2 and rhs.ndim == len(subscripts.rhs), (lhs, rhs)
    if is_varlen_k(subscripts):
        assert groups.step or groups.periods(sizes.shape[0]) == 1, "periods share a result"
        assert lhs.shape[0] == rhs.shape[0], (lhs, rhs)
    else:
        assert rhs.shape[0] == matrices, (rhs, matrices)
        assert lhs.shape[1] == rhs.shape[subscripts.rhs.index("k")], (lhs, rhs)


def _abstract_eval(lhs: Any, rhs: Any, sizes: Any, **params: Any) -> Any:
    """The dtype is that of `lax.dot_general`, the shape that of `lax.ragged_dot`."""
    _check(lhs, rhs, sizes, params["subscripts"], params["groups"])
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
    groups: Groups,
    **params: Any,
) -> list[Any]:
    of_lhs = ad.is_undefined_primal(lhs)
    primal = lhs.aval if of_lhs else rhs.aval
    if type(cotangent) is ad.Zero:
        zero = ad.Zero(primal)
        return [zero if of_lhs else None, None if of_lhs else zero, None]
    product = partial(_bind, sizes, groups=groups, **params)
    if subscripts == VARLEN_K:
        gradient = (
            product(rhs, cotangent, subscripts=VARLEN_M_NK)
            if of_lhs
            else product(lhs, cotangent, subscripts=VARLEN_M_KN)
        )
    elif of_lhs:
        gradient = product(cotangent, rhs, subscripts=DGRAD[subscripts])
    else:
        pair = (lhs, cotangent) if subscripts == VARLEN_M_KN else (cotangent, lhs)
        gradient = _of_weights(*pair, sizes, groups=groups, **params)
    gradient = as_cotangent(primal, gradient)
    return [gradient if of_lhs else None, None if of_lhs else gradient, None]


def _bind(sizes: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
    return hopper_ragged_dot_p.bind(lhs, rhs, sizes, **params)


def _of_weights(lhs: Any, rhs: Any, sizes: Any, *, groups: Groups, **params: Any) -> Any:
    """Returns the contraction over each group's rows; what periods share is summed in float32."""
    periods = groups.periods(sizes.shape[0])
    if groups.step or periods == 1:
        return _bind(sizes, lhs, rhs, subscripts=VARLEN_K, groups=groups, **params)
    wide = jnp.float32 if _is_narrow(lhs) and _is_narrow(rhs) else None
    params["preferred_element_type"] = wide or params["preferred_element_type"]
    groups = replace(groups, step=groups.count)
    parts = _bind(sizes, lhs, rhs, subscripts=VARLEN_K, groups=groups, **params)
    return parts.reshape(periods, groups.count, *parts.shape[1:]).sum(0)


def _is_narrow(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 4


# vmap.


def _batch(
    axis_data: Any, args: Any, axes: Any, *, subscripts: Subscripts, groups: Groups, **params: Any
) -> tuple[Any, int]:
    bind = partial(hopper_ragged_dot_p.bind, subscripts=subscripts, **params)
    if axis_data.size == 0:
        avals = map(_unmapped, args, axes)
        out = jax.eval_shape(partial(bind, groups=groups), *avals)
        return jnp.zeros((0, *out.shape), out.dtype), 0
    if free := _free_letter(subscripts, axes):
        return _batch_free(bind, axis_data.size, args, axes, subscripts, free, groups)
    return _batch_rows(bind, axis_data.size, args, axes, subscripts, groups), 0


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
    return (0, "k") if mapped == [0] and subscripts == VARLEN_K else None


def _batch_free(
    bind: Any,
    size: int,
    args: Any,
    axes: Any,
    subscripts: Subscripts,
    free: tuple[int, str],
    groups: Groups,
) -> tuple[Any, int]:
    """Maps one operand by a longer axis: its mapped one joins `free`."""
    operand, letter = free
    labels = (subscripts.lhs, subscripts.rhs)[operand]
    args, axis = list(args), labels.index(letter)
    array = jnp.moveaxis(args[operand], axes[operand], axis)
    shape = array.shape
    args[operand] = array.reshape(*shape[:axis], size * shape[axis + 1], *shape[axis + 2 :])
    out = bind(*args, groups=groups)
    axis = subscripts.out.index(letter)
    shape = (*out.shape[:axis], size, out.shape[axis] // size, *out.shape[axis + 1 :])
    return out.reshape(shape), axis


def _batch_rows(
    bind: Any, size: int, args: Any, axes: Any, subscripts: Subscripts, groups: Groups
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
    periods, matrices = groups.periods(count), groups.matrices(count)
    contraction = subscripts == VARLEN_K
    if contraction:
        rhs, step = whole(rhs, rhs_axis), groups.count
        rhs = rhs.reshape(size * length, rhs.shape[-1])
    elif rhs_axis is None and (periods == 1 or not groups.step):
        step = 0
    else:
        rhs, step = whole(rhs, rhs_axis), groups.count
        matrix = rhs.shape[2:]
        if periods > 1 and not groups.step:
            rhs = jnp.broadcast_to(rhs[:, None], (size, periods, matrices, *matrix))
        rhs = rhs.reshape(size * groups.count * periods, *matrix)
    sizes = sizes_of_each(given, length, size)
    flat = replace(groups, step=step)
    out = bind(lhs.reshape(size * length, lhs.shape[-1]), rhs, sizes, groups=flat)
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
    subscripts = params["subscripts"].without(GROUP)
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
