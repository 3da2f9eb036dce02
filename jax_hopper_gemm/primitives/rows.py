"""Rows moved and added up, with derivatives that move rows too.

The transpose of a gather is a scatter, whose sums on a GPU are atomic and so have other bits on
every run. Here no sum is atomic, and equal input gives equal bits:

- `sum_rows` is told both ways between rows and their users: for each row of the result, which rows
  it adds, and for each row of its operand, which results that is part of. Its transpose is itself
  with the two exchanged.
- `pick_rows` knows one way alone, so its transpose finds the other: it sorts the indices, which
  puts the users of each row behind one another, and adds up these runs.

A ragged product on a kernel reads picked rows where they lie: lowering for CUDA marks them, and the
product takes the array that they are picked from in their place. The picked rows are then left
without a use, and XLA never writes them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir

from ..fusion.jaxprs import varying_together
from ..lowering.devices import devices_of
from ..lowering.origins import mark_rows
from ..lowering.register import Lowering, lower_fun_once
from .define import Rules, accumulator_dtype, define_primitive, mapped_first
from .group_sizes import count_up_to

# Rows that `add_rows` adds in one pass. Few: the pass reads as many for each sum, also where a sum
# has fewer. A token's experts are mostly no more.
AT_ONCE = 8


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
    return sum_rows_p.bind(*varying_together(x, sources, users))


def _abstract_eval(x: Any, sources: Any, users: Any) -> Any:
    assert sources.ndim == users.ndim == 2 and users.shape[0] == x.shape[0]
    return x.update(shape=(sources.shape[0], *x.shape[1:]), weak_type=False)


def _gathered(x: jax.Array, sources: jax.Array, users: jax.Array) -> jax.Array:
    del users
    if sources.shape[1] == 1:
        return picked(x, sources)
    wide = accumulator_dtype(x.dtype)
    total = jnp.zeros((sources.shape[0], *x.shape[1:]), wide)
    for j in range(sources.shape[1]):
        taken = picked(x, sources[:, j : j + 1]).astype(wide)
        total = taken if j == 0 else total + taken
    return total.astype(x.dtype)


def picked(x: jax.Array, indices: jax.Array, *, fill: int = 0) -> jax.Array:
    """Returns the rows of `x` that indices (R, 1) pick; `fill` for an index that no row has."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, x.ndim)), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    return lax.gather(
        x, indices, numbers, (1, *x.shape[1:]), mode=lax.GatherScatterMode.FILL_OR_DROP,
        fill_value=fill,
    )  # fmt: skip


def _marking(function: Callable[..., jax.Array]) -> Lowering:
    """Returns a lowering that marks rows of a matrix where each is picked by one index."""
    lower = mlir.lower_fun(function, multiple_results=False)

    def for_cuda(ctx: mlir.LoweringRuleContext, *values: Any) -> list[Any]:
        (rows,) = lower(ctx, *values)
        array, indices, *_ = list[Any](ctx.avals_in)
        if array.ndim == 2 and indices.shape[1:] in ((), (1,)):
            mark_rows(rows)
        return [rows]

    return Lowering(for_cuda)


def _transpose(cotangent: Any, x: Any, sources: Any, users: Any) -> Any:
    return sum_rows_p.bind(cotangent, users, sources), None, None


def _batch(axis_data: Any, operands: Any, axes: Any) -> tuple[Any, int]:
    """Maps by flattening: rows of one index after those of the one before it.

    An `x` that all share is not repeated: it is then part of so many more results.
    """
    size = axis_data.size
    x = operands[0]
    sources, users = map(partial(mapped_first, size), operands[1:], axes[1:])
    (_, length, most), (_, results, terms) = users.shape, sources.shape
    users = _shifted(users, results)
    if axes[0] is None:
        users = jnp.moveaxis(users, 0, 1).reshape(length, size * most)
    else:
        x = jnp.moveaxis(x, axes[0], 0)
        x = x.reshape(size * length, *x.shape[2:])
        sources, users = _shifted(sources, length), users.reshape(size * length, most)
    flat = sum_rows_p.bind(x, sources.reshape(size * results, terms), users)
    return flat.reshape(size, results, *flat.shape[1:]), 0


def _shifted(rows: jax.Array, length: int) -> jax.Array:
    """Returns numbers (B, ...) of `length` rows, those of index b more by b * `length`; else -1."""
    offsets = length * jnp.arange(rows.shape[0], dtype=rows.dtype)
    offsets = lax.expand_dims(offsets, range(1, rows.ndim))
    return jnp.where((rows >= 0) & (rows < length), rows + offsets, -1)


sum_rows_p = define_primitive(
    "sum_rows",
    _gathered,
    abstract=_abstract_eval,
    rules=Rules(linear_in=(0,), transpose=_transpose, batch=_batch),
    lowering=_marking(_gathered),
)


def in_order(groups: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns int32 numbers from 0 to `count`, sorted stably, and for each its place before."""
    size = groups.shape[0]
    if isinstance(size, int) and (count + 1) * size < 2**32:
        # One key holds number and place: all differ, and XLA sorts single integers by radix.
        key = groups.astype(jnp.uint32) * size + jnp.arange(size, dtype=jnp.uint32)
        key = jnp.sort(key)
        return (key // max(size, 1)).astype(jnp.int32), (key % max(size, 1)).astype(jnp.int32)
    places = jnp.arange(size, dtype=jnp.int32)
    number, place = lax.sort((groups, places), num_keys=1, is_stable=True)
    return number, place


def pick_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns out[r] = x[rows[r]], zeros where `x` has no such row: below 0, or past the last.

    It is linear in `x`. Its transpose adds in float32, rounds once, and has the same bits on every
    run; derivatives of every order and mode, and `vmap`, are made of the two.

    Args:
      x: (S, K).
      rows: (R,) int32.
    """
    return pick_rows_p.bind(*varying_together(x, rows))


def _abstract_pick(x: Any, rows: Any) -> Any:
    assert x.ndim == 2 and rows.ndim == 1, (x, rows)
    return x.update(shape=(rows.shape[0], x.shape[1]), weak_type=False)


def _abstract_add(x: Any, rows: Any, *, length: int, **_: Any) -> Any:
    assert x.ndim == 2 and rows.shape == x.shape[:1], (x, rows)
    return x.update(shape=(length, x.shape[1]), weak_type=False)


def _picked(x: jax.Array, rows: jax.Array) -> jax.Array:
    if x.shape[0] == 0:
        return jnp.zeros((rows.shape[0], x.shape[1]), x.dtype)
    return picked(x, rows[:, None])


def _added(x: jax.Array, rows: jax.Array, *, length: int, scattered: bool) -> jax.Array:
    """Returns (length, K): out[s] is the sum of x[r] over all r with rows[r] == s.

    A scatter adds what is `scattered`; one GPU's would be atomic, so there none does.
    """
    count = x.shape[0]
    if 0 in (count, length):
        return jnp.zeros((length, x.shape[1]), x.dtype)
    if scattered:
        zeros, inside = jnp.zeros((length, x.shape[1]), x.dtype), (rows >= 0) & (rows < length)
        return zeros.at[jnp.where(inside, rows, length)].add(x, mode="drop")
    owners, order = in_order(jnp.where((rows >= 0) & (rows < length), rows, length), length)
    bounds = count_up_to(owners, jnp.arange(length + 1, dtype=owners.dtype) - 1)
    wide = accumulator_dtype(x.dtype)

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
    run = count_up_to(ends, part)

    def of_run(array: jax.Array) -> jax.Array:
        return picked(array, run[:, None])

    number = part - of_run(begins)
    done = AT_ONCE * (number + 1)
    sums = first(of_run(starts) + done, of_run(counts) - done)
    counts = jnp.where(number == 0, of_run(parts), 0)
    rest = _sums_of_runs(lambda at: picked(sums, at[:, None]), part, counts, part.shape[0])
    return total + picked(rest, jnp.where(parts > 0, begins, -1)[:, None])


# Derivatives.


def _transpose_pick(cotangent: Any, x: Any, rows: Any) -> Any:
    count, length = rows.shape[0], x.aval.shape[0]
    if not (isinstance(count, int) and isinstance(length, int)):
        raise NotImplementedError(
            f"{count} of {length} rows are picked by indices, symbolic numbers: export a gradient "
            "for known ones"
        )
    return add_rows_p.bind(cotangent, rows, length=length, scattered=False), None


# vmap: rows of one index after those of the one before it.


def _batch_pick(axis_data: Any, args: Any, axes: Any) -> tuple[Any, int]:
    x, rows = args[0], mapped_first(axis_data.size, args[1], axes[1])
    if axes[0] is None:
        flat = rows.reshape(-1)
    else:
        x = jnp.moveaxis(x, axes[0], 0)
        flat = _shifted(rows, x.shape[1]).reshape(-1)
        x = x.reshape(x.shape[0] * x.shape[1], x.shape[2])
    out = pick_rows_p.bind(x, flat)
    return out.reshape(*rows.shape, out.shape[1]), 0


def _batch_add(
    axis_data: Any, args: Any, axes: Any, *, length: int, scattered: bool
) -> tuple[Any, int]:
    size = axis_data.size
    x, rows = (mapped_first(size, array, axis) for array, axis in zip(args, axes, strict=True))
    out = add_rows_p.bind(
        x.reshape(size * x.shape[1], x.shape[2]), _shifted(rows, length).reshape(-1),
        length=size * length, scattered=scattered,
    )  # fmt: skip
    return out.reshape(size, length, out.shape[1]), 0


pick_rows_p = define_primitive(
    "pick_rows",
    _picked,
    abstract=_abstract_pick,
    rules=Rules(linear_in=(0,), transpose=_transpose_pick, batch=_batch_pick),
    lowering=_marking(_picked),
)
_lower_sorted = lower_fun_once(partial(_added, scattered=False))


def _lower_added(ctx: mlir.LoweringRuleContext, *values: Any, length: int, scattered: bool) -> Any:
    """Adds rows that a scatter would add in their order instead, where one device does."""
    if scattered and devices_of(ctx) == 1:
        return _lower_sorted(ctx, *values, length=length)
    return None


add_rows_p = define_primitive(
    "add_rows",
    _added,
    abstract=_abstract_add,
    rules=Rules(
        linear_in=(0,),
        transpose=lambda cotangent, x, rows, **_: (pick_rows_p.bind(cotangent, rows), None),
        batch=_batch_add,
    ),
    lowering=Lowering(_lower_added),
)
