"""Rows picked by indices alone, and the transpose of that: rows added up by index.

`sum_rows` is told both ways between rows and their users. Here only one is known, so the transpose
finds the other: it sorts the indices, which puts the users of each row behind one another, and adds
up these runs. That is again gathers, however often a row is picked, so no sum is atomic and equal
input gives equal bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, mlir

from ..fusion.jaxprs import alike_in_shard_map
from ..lowering.mlir_values import mark_rows
from ..lowering.register import Lowering
from .define import Rules, define_primitive
from .segments import mapped_first
from .sum_rows import in_order, picked, wide_dtype

# Rows that are added in one pass. Few: the pass reads as many for each sum, also where a sum has
# fewer. A token's experts are mostly no more.
AT_ONCE = 8


def pick_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns out[r] = x[rows[r]], zeros where `x` has no such row: below 0, or past the last.

    It is linear in `x`. Its transpose adds in float32, rounds once, and has the same bits on every
    run; derivatives of every order and mode, and `vmap`, are made of the two.

    Args:
      x: (S, K).
      rows: (R,) int32.
    """
    return pick_rows_p.bind(*alike_in_shard_map(x, rows))


def _abstract_pick(x: Any, rows: Any) -> Any:
    assert x.ndim == 2 and rows.ndim == 1, (x, rows)
    return x.update(shape=(rows.shape[0], x.shape[1]), weak_type=False)


def _abstract_add(x: Any, rows: Any, *, length: int) -> Any:
    assert x.ndim == 2 and rows.shape == x.shape[:1], (x, rows)
    return x.update(shape=(length, x.shape[1]), weak_type=False)


def _picked(x: jax.Array, rows: jax.Array) -> jax.Array:
    if x.shape[0] == 0:
        return jnp.zeros((rows.shape[0], x.shape[1]), x.dtype)
    return picked(x, rows[:, None])


def _added(x: jax.Array, rows: jax.Array, *, length: int) -> jax.Array:
    """Returns (length, K): out[s] is the sum of x[r] over all r with rows[r] == s."""
    count = x.shape[0]
    if 0 in (count, length):
        return jnp.zeros((length, x.shape[1]), x.dtype)
    owners, order = in_order(jnp.where((rows >= 0) & (rows < length), rows, length), length)
    numbers = jnp.arange(length + 1, dtype=owners.dtype)
    bounds = jnp.searchsorted(owners, numbers, method="scan_unrolled").astype(jnp.int32)
    wide = wide_dtype(x.dtype)

    def user(place: jax.Array) -> jax.Array:
        return picked(x, picked(order, place[:, None], fill=-1)[:, None]).astype(wide)

    return _sums_of_runs(user, bounds[:-1], bounds[1:] - bounds[:-1], count).astype(x.dtype)


def _sums_of_runs(
    value: Callable[[jax.Array], jax.Array], starts: jax.Array, counts: jax.Array, size: int
) -> jax.Array:
    """Returns the sums over runs of elements in a list, (P, K).

    The first elements of a run are added in their order. The rest is added in parts of as many, and
    the parts of each run are a run in a list that is so much shorter: all work together is a
    constant times P + size rows, whatever the counts.

    Args:
      value: gives the elements at some places, (P,) to (P, K); zeros for -1.
      starts, counts: (P,) int32, where each run begins and how many elements it has.
      size: elements in the list; runs do not overlap.
    """

    def first(starts: jax.Array, counts: jax.Array) -> jax.Array:
        total = value(jnp.where(counts > 0, starts, -1))
        for i in range(1, min(AT_ONCE, size)):
            total = total + value(jnp.where(counts > i, starts + i, -1))
        return total

    total = first(starts, counts)
    if size <= AT_ONCE:
        return total
    parts = jnp.maximum(-(-counts // AT_ONCE) - 1, 0)
    ends = jnp.cumsum(parts, dtype=jnp.int32)
    begins = ends - parts
    part = jnp.arange((size - 1) // AT_ONCE, dtype=jnp.int32)  # as many as there can be
    run = jnp.searchsorted(ends, part, side="right", method="scan_unrolled").astype(jnp.int32)

    def of_run(array: jax.Array) -> jax.Array:
        return picked(array, run[:, None])

    number = part - of_run(begins)
    done = AT_ONCE * (number + 1)
    sums = first(of_run(starts) + done, of_run(counts) - done)
    counts = jnp.where(number == 0, of_run(parts), 0)
    rest = _sums_of_runs(lambda at: picked(sums, at[:, None]), part, counts, part.shape[0])
    return total + picked(rest, jnp.where(parts > 0, begins, -1)[:, None])


_lower_pick = mlir.lower_fun(_picked, multiple_results=False)


def _lower_pick_for_cuda(ctx: mlir.LoweringRuleContext, x: Any, rows: Any) -> Any:
    (found,) = _lower_pick(ctx, x, rows)
    mark_rows(found)
    return [found]


# Derivatives.


def _transpose_pick(cotangent: Any, x: Any, rows: Any) -> Any:
    if type(cotangent) is ad.Zero:
        return ad.Zero(x.aval), None
    known = rows.shape[0], x.aval.shape[0]
    if not all(isinstance(count, int) for count in known):
        raise NotImplementedError(
            f"{known[0]} of {known[1]} rows are picked by indices, symbolic numbers: export a "
            "gradient for known ones"
        )
    return add_rows_p.bind(cotangent, rows, length=x.aval.shape[0]), None


def _transpose_add(cotangent: Any, x: Any, rows: Any, *, length: int) -> Any:
    if type(cotangent) is ad.Zero:
        return ad.Zero(x.aval), None
    return pick_rows_p.bind(cotangent, rows), None


# vmap: rows of one index after those of the one before it.


def _flat_rows(rows: jax.Array, length: int) -> jax.Array:
    """Returns row numbers (B, R) as (B * R,), those of index b more by b * `length`."""
    offsets = length * jnp.arange(rows.shape[0], dtype=rows.dtype)[:, None]
    return jnp.where((rows >= 0) & (rows < length), rows + offsets, -1).reshape(-1)


def _batch_pick(axis_data: Any, args: Any, axes: Any) -> tuple[Any, int]:
    x, rows = args[0], mapped_first(axis_data.size, args[1], axes[1])
    if axes[0] is None:
        flat = rows.reshape(-1)
    else:
        x = jnp.moveaxis(x, axes[0], 0)
        flat = _flat_rows(rows, x.shape[1])
        x = x.reshape(-1, x.shape[2])
    out = pick_rows_p.bind(x, flat)
    return out.reshape(*rows.shape, out.shape[1]), 0


def _batch_add(axis_data: Any, args: Any, axes: Any, *, length: int) -> tuple[Any, int]:
    size = axis_data.size
    x, rows = (mapped_first(size, array, axis) for array, axis in zip(args, axes, strict=True))
    out = add_rows_p.bind(
        x.reshape(size * x.shape[1], x.shape[2]), _flat_rows(rows, length), length=size * length
    )
    return out.reshape(size, length, out.shape[1]), 0


pick_rows_p = define_primitive(
    "pick_rows",
    _picked,
    abstract=_abstract_pick,
    rules=Rules(linear_in=(0,), transpose=_transpose_pick, batch=_batch_pick),
    lowering=Lowering(_lower_pick_for_cuda),
)
add_rows_p = define_primitive(
    "add_rows",
    _added,
    abstract=_abstract_add,
    rules=Rules(linear_in=(0,), transpose=_transpose_add, batch=_batch_add),
)
