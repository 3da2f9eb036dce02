"""What an epilogue of a grouped product does with groups: three linear primitives.

Rows, an array's first axis, are cut into runs by `sizes`; a run belongs to a group, which has an
entry of its own in arrays with an axis of groups, or to none (see `gemm.groups`).

- `segment_broadcast` gives each row its group's entry,
- `segment_sum` adds up the rows of each group: one is the other's transpose,
- `segment_mask` puts 0 in the rows of no group.

`vmap` over sizes gives all arrays further axes in front of the rows and of `sizes`; those of groups
have them too, or are shared. Kernels read a group's entry where it lies, and store no other rows
than those of groups: `fusion` knows the first and the last by their names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend.core import Literal, Primitive

from ..fusion.jaxprs import ClosedJaxpr, pruned
from ..fusion.memo import memoised
from ..gemm.dtypes import OPERANDS
from ..gemm.groups import VARLEN_K, Groups
from ..gemm.product import Options, Product
from ..gemm.spec import TMA_ALIGNMENT
from .define import Rules, define_primitive, mapped_first
from .group_sizes import group_of_rows
from .ragged_dot import hopper_ragged_dot
from .ragged_reference import zero_unless


def segment_broadcast(
    x: jax.Array, sizes: jax.Array, groups: Groups, length: int, rounded: Any = None
) -> jax.Array:
    """Returns for each row its group's entry; 0 for a row of no group.

    Args:
      x: (W, ...), an entry for each matrix of `groups`.
      sizes: (S,) int32.
      groups, length: which runs of that many rows belong to which group.
      rounded: the gradient adds up cotangents, if they are wider, in this dtype: as matrices of
        them are kept. The sum is float32.

    Returns:
      (length, ...).
    """
    return segment_broadcast_p.bind(
        x, sizes, groups=groups, length=length, rounded=rounded and np.dtype(rounded), each=False
    )


def segment_mask(x: jax.Array, sizes: jax.Array, groups: Groups) -> jax.Array:
    """Returns `x`, (T, ...), with 0 in the rows of no group."""
    return segment_mask_p.bind(x, sizes, groups=groups)


def _over_batch(function: Any, count: int, *axes: int | None) -> Any:
    """Returns a function mapped along `count` first axes of the arguments whose axis is 0."""
    for _ in range(count):
        function = jax.vmap(function, axes)
    return function


def _owners(sizes: jax.Array, groups: Groups, length: int) -> jax.Array:
    """Returns the number of each row's matrix; -1 for a row of no group."""
    of = partial(group_of_rows, groups=groups, length=length)
    return _over_batch(of, sizes.ndim - 1, 0)(sizes)


def _rows_of_groups(
    x: Any, sizes: Any, *, groups: Groups, length: int, rounded: Any, each: bool
) -> jax.Array:
    owners, batch = _owners(sizes, groups, length), sizes.ndim - 1
    if groups.count == 0:  # there is no entry to take
        return jnp.zeros(owners.shape + x.shape[1 + batch * each :], x.dtype)
    take = _over_batch(
        lambda x, i: x.at[jnp.maximum(i, 0)].get(mode="clip"), batch, 0 if each else None, 0
    )
    return zero_unless(owners >= 0, take(x, owners))


def _live_rows(x: Any, sizes: Any, *, groups: Groups) -> jax.Array:
    return zero_unless(_owners(sizes, groups, x.shape[sizes.ndim - 1]) >= 0, x)


def _sum_of_groups(x: Any, sizes: Any, *, groups: Groups) -> jax.Array:
    """The product of the rows with ones: same input, same bits, whoever multiplies."""
    sum_dtype = np.promote_types(x.dtype, np.float32)
    options = Options(precision=(lax.Precision.HIGHEST,) * 2, preferred_element_type=sum_dtype)
    product = Product(VARLEN_K, options, groups=groups)
    # As many columns of ones as are in the shortest line that a kernel reads.
    read = x.dtype.name in OPERANDS and x.dtype != np.float32
    count = TMA_ALIGNMENT // x.dtype.itemsize if read else 1

    def of(x: jax.Array, sizes: jax.Array) -> jax.Array:
        rows, *own = x.shape
        ones, columns = jnp.ones((rows, count), x.dtype), x.reshape(rows, math.prod(own))
        sums = hopper_ragged_dot(ones, columns, sizes, product)[:, 0]
        return sums.reshape(sums.shape[0], *own)

    return _over_batch(of, sizes.ndim - 1, 0, 0)(x, sizes)


def _transpose_rows(
    cotangent: Any, x: Any, sizes: Any, *, groups: Groups, length: int, rounded: Any, each: bool
) -> list[Any]:
    batch = sizes.ndim - 1
    matrix = np.prod(cotangent.shape[batch + 1 :]) > 1  # else few numbers, kept as they are
    if rounded is not None and matrix and rounded.itemsize < cotangent.dtype.itemsize:
        cotangent = cotangent.astype(rounded)
    sums = segment_sum_p.bind(cotangent, sizes, groups=groups)
    if not each:
        sums = jnp.sum(sums, range(batch))
    return [sums.astype(x.aval.dtype), None]


def _transpose_sum(cotangent: Any, x: Any, sizes: Any, *, groups: Groups) -> list[Any]:
    batch = sizes.ndim - 1
    rows = segment_broadcast_p.bind(
        cotangent, sizes, groups=groups, length=x.aval.shape[batch], rounded=None, each=batch > 0
    )
    return [rows.astype(x.aval.dtype), None]


@memoised
def without_masks(
    closed: ClosedJaxpr, outputs: Sequence[bool], kept: Sequence[bool]
) -> tuple[ClosedJaxpr, list[bool]]:
    """Returns a function without `segment_mask` that make no difference, and which inputs it has.

    `outputs` tells which are read by products alone, to which rows of no group are nothing; `kept`
    is as in `jaxprs.pruned`.
    """
    jaxpr = closed.jaxpr
    before = {e.outvars[0]: e.invars[0] for e in jaxpr.eqns if e.primitive is segment_mask_p}
    equations = [
        e.replace(invars=[before.get(e.invars[0], e.invars[0]), *e.invars[1:]])
        if e.primitive is segment_sum_p and not isinstance(e.invars[0], Literal)
        else e
        for e in jaxpr.eqns
    ]
    outvars = [
        before.get(x, x) if free and not isinstance(x, Literal) else x
        for x, free in zip(jaxpr.outvars, outputs, strict=True)
    ]
    closed = closed.replace(jaxpr=jaxpr.replace(eqns=equations, outvars=outvars))
    return pruned(closed, [True] * len(outvars), kept)


def mapped_shared(size: int, x: Any, axis: int | None, batch: tuple[int, ...], each: bool) -> Any:
    """Returns an array that had the axes `batch` in front (`each`) or was shared, mapped in front.

    It stays as it is if it is shared along the new axis too.
    """
    if axis is None and not each:
        return x
    x = mapped_first(size, x, axis)
    if each:
        return x
    own = x.shape[1:]
    return jnp.broadcast_to(lax.expand_dims(x, range(1, 1 + len(batch))), (size, *batch, *own))


def _batch_rows(
    axis_data: Any, args: Any, axes: Any, *, each: bool, **params: Any
) -> tuple[Any, int | None]:
    (x, sizes), (x_axis, sizes_axis) = args, axes
    batch, out_axis = sizes.ndim - 1, None
    if sizes_axis is not None:
        sizes, batch, out_axis = jnp.moveaxis(sizes, sizes_axis, 0), batch - 1, 0
        shared = x_axis is None and not each
        x = mapped_shared(axis_data.size, x, x_axis, sizes.shape[1:-1], each)
        each = not shared
    elif x_axis is not None:  # one of the entry's axes
        x, out_axis = jnp.moveaxis(x, x_axis, 1 + batch * each), batch + 1
    return segment_broadcast_p.bind(x, sizes, each=each, **params), out_axis


def _batch_as_rows(
    primitive: Primitive, axis_data: Any, args: Any, axes: Any, **params: Any
) -> tuple[Any, int]:
    """Maps a primitive whose operand has rows, not entries of groups."""
    (x, sizes), (x_axis, sizes_axis), columns = args, axes, args[1].ndim
    if sizes_axis is None:
        return primitive.bind(jnp.moveaxis(x, x_axis, columns), sizes, **params), columns
    x, sizes = mapped_first(axis_data.size, x, x_axis), jnp.moveaxis(sizes, sizes_axis, 0)
    return primitive.bind(x, sizes, **params), 0


segment_broadcast_p = define_primitive(
    "rows_of_groups",
    _rows_of_groups,
    rules=Rules(linear_in=(0,), transpose=_transpose_rows, batch=_batch_rows),
)
segment_mask_p = define_primitive(
    "live_rows",
    _live_rows,
    rules=Rules(
        linear_in=(0,),
        transpose=lambda ct, x, sizes, **params: [segment_mask_p.bind(ct, sizes, **params), None],
        batch=lambda *args, **params: _batch_as_rows(segment_mask_p, *args, **params),
    ),
)
segment_sum_p = define_primitive(
    "sum_of_groups",
    _sum_of_groups,
    rules=Rules(
        linear_in=(0,),
        transpose=_transpose_sum,
        batch=lambda *args, **params: _batch_as_rows(segment_sum_p, *args, **params),
    ),
)
