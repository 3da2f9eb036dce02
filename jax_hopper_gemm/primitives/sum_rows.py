"""Rows moved and added up, with a derivative that moves rows too.

The transpose of a gather is a scatter, whose sums on a GPU are atomic and so have other bits on
every run. But whoever moves rows knows both ways: `sum_rows` is told, for each row of the result,
which rows it adds, and for each row of its operand, which results that is part of. Its transpose
is itself with the two exchanged.

A ragged product on a kernel reads picked rows where they lie: lowering for CUDA marks them, and the
product takes the array that they are picked from in their place. The picked rows are then left
without a use, and XLA never writes them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, mlir

from ..lowering.mlir_values import mark_rows
from ..lowering.register import Lowering
from .define import Rules, define_primitive


def sum_rows(x: jax.Array, sources: jax.Array, users: jax.Array) -> jax.Array:
    """Returns out[r] = sum over j of x[sources[r, j]], added in the order of j.

    Sums of 16-bit floats are made in float32 and rounded once. It is linear in `x`; derivatives of
    every order and mode, and `vmap` over any argument, are again `sum_rows`.

    Args:
      x: (S, ...).
      sources: (R, J) int32, rows of `x`; -1 adds nothing.
      users: (S, P) int32, the same relation from the other side: row s of `x` is part of the rows
        users[s, :] of the result, -1 being none. Only derivatives read it, and take it on trust.

    Returns:
      (R, ...), in the dtype of `x`.
    """
    varying = [jax.typeof(a).manual_axis_type.varying for a in (x, sources, users)]
    together = frozenset().union(*varying)
    x, sources, users = (
        lax.pcast(a, tuple(together - own), to="varying") if together - own else a
        for a, own in zip((x, sources, users), varying, strict=True)
    )
    return sum_rows_p.bind(x, sources, users)


def _abstract_eval(x: Any, sources: Any, users: Any) -> Any:
    assert sources.ndim == users.ndim == 2 and users.shape[0] == x.shape[0]
    return x.update(shape=(sources.shape[0], *x.shape[1:]), weak_type=False)


def _gathered(x: jax.Array, sources: jax.Array, users: jax.Array) -> jax.Array:
    del users
    if sources.shape[1] == 1:
        return picked(x, sources)
    wide = wide_dtype(x.dtype)
    total = jnp.zeros((sources.shape[0], *x.shape[1:]), wide)
    for j in range(sources.shape[1]):
        taken = picked(x, sources[:, j : j + 1]).astype(wide)
        total = taken if j == 0 else total + taken
    return total.astype(x.dtype)


def wide_dtype(dtype: Any) -> Any:
    """Returns the dtype in which rows of `dtype` are added up."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.dtype(jnp.float32) if narrow else dtype


def picked(x: jax.Array, indices: jax.Array, *, fill: int = 0) -> jax.Array:
    """Returns the rows of `x` that indices (R, 1) pick; `fill` for an index that no row has."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, x.ndim)), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    return lax.gather(
        x, indices, numbers, (1, *x.shape[1:]), mode=lax.GatherScatterMode.FILL_OR_DROP,
        fill_value=fill,
    )  # fmt: skip


_lower = mlir.lower_fun(_gathered, multiple_results=False)


def _lower_for_cuda(ctx: mlir.LoweringRuleContext, x: Any, sources: Any, users: Any) -> Any:
    (rows,) = _lower(ctx, x, sources, users)
    array, indices = map(_shape, ctx.avals_in[:2])
    if len(array) == 2 and indices[1] == 1:
        mark_rows(rows)
    return [rows]


def _shape(aval: Any) -> tuple[int, ...]:
    return aval.shape


def _transpose(cotangent: Any, x: Any, sources: Any, users: Any) -> Any:
    if isinstance(cotangent, ad.Zero):
        return ad.Zero(x.aval), None, None
    return sum_rows_p.bind(cotangent, users, sources), None, None


def _batch(axis_data: Any, operands: Any, axes: Any) -> tuple[Any, int]:
    """Maps by flattening: rows of one index after those of the one before it.

    An `x` that all share is not repeated: it is then part of so many more results.
    """
    size = axis_data.size
    x, sources, users = (
        a if axis is None else jnp.moveaxis(a, axis, 0)
        for a, axis in zip(operands, axes, strict=True)
    )
    sources, users = (
        a if axis is not None else jnp.broadcast_to(a, (size, *a.shape))
        for a, axis in zip((sources, users), axes[1:], strict=True)
    )
    length, results = users.shape[1], sources.shape[1]
    users = _shifted(users, results)
    if axes[0] is None:
        users = jnp.moveaxis(users, 0, 1).reshape(length, -1)
    else:
        x = x.reshape(size * length, *x.shape[2:])
        sources, users = _shifted(sources, length), users.reshape(size * length, -1)
    flat = sum_rows_p.bind(x, sources.reshape(size * results, -1), users)
    return flat.reshape(size, results, *flat.shape[1:]), 0


def _shifted(rows: jax.Array, by: int) -> jax.Array:
    """Returns row numbers (B, ., .), those of index b more by b * `by`; -1 stays."""
    offsets = by * jnp.arange(rows.shape[0], dtype=rows.dtype)[:, None, None]
    return jnp.where(rows < 0, -1, rows + offsets)


sum_rows_p = define_primitive(
    "sum_rows",
    _gathered,
    abstract=_abstract_eval,
    rules=Rules(linear_in=(0,), transpose=_transpose, batch=_batch),
    lowering=Lowering(_lower_for_cuda),
)


def in_order(groups: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Sorts int32 numbers from 0 to `count`, stably.

    Returns:
      The sorted numbers, and for each its place before.
    """
    size = groups.shape[0]
    if (count + 1) * size < 2**32:
        # One key holds number and place: all differ, and XLA sorts single integers by radix.
        key = groups.astype(jnp.uint32) * size + jnp.arange(size, dtype=jnp.uint32)
        key = jnp.sort(key)
        return (key // max(size, 1)).astype(jnp.int32), (key % max(size, 1)).astype(jnp.int32)
    places = jnp.arange(size, dtype=jnp.int32)
    number, place = lax.sort((groups, places), num_keys=1, is_stable=True)
    return number, place
