"""Group sizes as arrays of the program: what a product takes, and what follows from sizes.

An array of sizes cuts rows into runs, as `gemm.groups` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from ..fusion.jaxprs import varying_together
from ..gemm.groups import Groups
from ..gemm.spec import PROMOTION_K


def as_int32(values: jax.Array, least: int = 0) -> jax.Array:
    """Returns integers of any type as int32, those beyond int32 or under `least` at these limits.

    Those that are int32 already stay as they are.
    """
    if values.dtype == np.int32:
        return values
    limits, own = np.iinfo(np.int32), np.iinfo(values.dtype)
    if own.max > limits.max:
        values = jnp.minimum(values, np.array(limits.max, values.dtype))
    if own.min < 0:
        values = jnp.maximum(values, np.array(least, values.dtype))
    return values.astype(np.int32)


def sizes_in_rows(sizes: jax.Array, length: int, inner: int) -> jax.Array:
    """Returns int32 sizes in rows, `length` of them, where each counts `inner` rows at a time."""
    sizes = as_int32(sizes)
    if inner == 1:
        return sizes
    return jnp.minimum(jnp.maximum(sizes, 0), length // max(inner, 1)) * inner


def sizes_and_groups(
    sizes: jax.Array, offset: Any, count: int, length: int
) -> tuple[jax.Array, Groups]:
    """Returns the sizes that cut a product's rows, and which runs belong to its `count` groups.

    With an offset the rows of all groups before it are the first run.
    """
    if offset is None:
        return sizes, Groups.plain(count)
    # NOTE: converted before it is clipped: a narrow dtype may not hold the number of sizes.
    offset = jnp.clip(as_int32(jnp.reshape(offset, ())), 0, sizes.shape[0])
    number = jnp.arange(sizes.shape[0], dtype=np.int32)
    before = jnp.max(run_ends(jnp.where(number < offset, sizes, 0), length), initial=0)
    local = lax.dynamic_slice(jnp.pad(sizes, (0, count)), (offset,), (count,))
    sizes = jnp.concatenate([before[None], local])
    return sizes, Groups(period=count + 2, count=count, first=1)


def sizes_of_each(sizes: jax.Array, length: int, size: int) -> jax.Array:
    """Returns sizes for `size` times `length` rows, from (S,) or (size, S) sizes for each."""
    clipped = clipped_sizes(sizes, length)
    left_over = length - clipped.sum(-1, keepdims=True, dtype=np.int32)
    each = jnp.concatenate([clipped, left_over], axis=-1)
    return jnp.broadcast_to(each, (size, each.shape[-1])).reshape(-1)[:-1]


def run_ends(sizes: jax.Array, length: Any) -> jax.Array:
    """Returns where runs of any `sizes` (..., S) end on an axis of `length`, as kernels find it."""
    limit = jnp.asarray(length, np.int32)
    sizes = jnp.minimum(jnp.maximum(sizes, 0), limit)
    axis = sizes.ndim - 1
    count = sizes.shape[axis]
    if isinstance(count, int) and isinstance(length, int) and count * length < 2**31:
        return jnp.minimum(lax.cumsum(sizes, axis), limit)
    if isinstance(count, int):
        return lax.associative_scan(lambda x, y: jnp.minimum(x + y, limit), sizes, axis=axis)
    place = jnp.arange(count)

    def doubled(bit: Any, sums: jax.Array) -> jax.Array:  # JAX scans no symbolic number
        before = place - (1 << bit)
        more = jnp.minimum(sums + jnp.take(sums, jnp.maximum(before, 0), axis), limit)
        return jnp.where(before >= 0, more, sums)

    return lax.fori_loop(0, 31, doubled, sizes)


def count_up_to(ascending: jax.Array, values: jax.Array) -> jax.Array:
    """Returns how many numbers of a list are at most each value, int32, as it is halved."""
    # NOTE: JAX traces no `searchsorted` where `jax.shard_map` leaves a mesh axis to XLA.
    count = ascending.shape[0]
    ascending, values = varying_together(ascending, values)

    def halved(_: Any, ends: Any) -> Any:
        low, high = ends
        middle = low + (high - low) // 2
        more = (low < high) & (jnp.take(ascending, middle, mode="clip") <= values)
        return jnp.where(more, middle + 1, low), jnp.where(more, high, middle)

    low, known = jnp.zeros_like(values, np.int32), isinstance(count, int)
    steps = count.bit_length() if known else 32
    return lax.fori_loop(0, steps, halved, (low, jnp.full_like(low, count)), unroll=known)[0]


def clipped_sizes(sizes: jax.Array, length: Any) -> jax.Array:
    """Returns what the sizes amount to: none is negative, and their sum is `length` at most."""
    ends = run_ends(sizes, length)
    starts = jnp.concatenate([jnp.zeros_like(ends[..., :1]), ends[..., :-1]], axis=-1)
    return ends - starts


def group_of_rows(sizes: jax.Array, groups: Groups, length: int) -> jax.Array:
    """Returns the number of each row's matrix, (length,) int32; -1 for rows of no group."""
    rows = jnp.arange(length, dtype=np.int32)
    some = sizes.shape[0] != 0
    run = count_up_to(run_ends(sizes, length), rows) if some else jnp.zeros_like(rows)
    period = run // groups.period
    place = run - period * groups.period - groups.first
    return jnp.where((place >= 0) & (place < groups.count), period * groups.step + place, -1)


# Rows in groups as whole blocks: those of each group, and zeros up to a multiple of 128. So a
# product that contracts them reads transposes of 8 bits (`VARLEN_K_T` of `gemm.groups`), and no
# block of scales has rows of two groups.


@dataclass(frozen=True)
class RowBlocks:
    """Where the rows of groups lie in blocks; those of no group do not."""

    sizes: jax.Array  # of the runs there, (S,) int32
    rows: jax.Array  # of each row of a block the row it is, int32; of padding one not there

    def of(self, x: jax.Array) -> jax.Array:
        return x.at[self.rows].get(mode="fill", fill_value=0)


def row_blocks(sizes: jax.Array, groups: Groups, length: int) -> RowBlocks:
    """Returns the blocks of the rows that sizes cut into groups; `length` is that of the rows."""
    count, block = sizes.shape[0], PROMOTION_K
    number = np.arange(count, dtype=np.int32)
    place = number % groups.period - groups.first
    kept = (place >= 0) & (place < groups.count)
    clipped = clipped_sizes(sizes, length)
    own, starts = jnp.where(kept, clipped, 0), run_ends(sizes, length) - clipped
    padded = -(-own // block) * block
    ends = jnp.cumsum(padded, dtype=np.int32)
    most = (length + (block - 1) * int(kept.sum())) // block  # blocks
    first = jnp.arange(most, dtype=np.int32) * block
    # Behind all groups nothing is left of the last.
    run = jnp.minimum(count_up_to(ends, first), count - 1)
    within = first - (ends - padded)[run]
    each = jnp.arange(block, dtype=np.int32)[None]
    rows: Any = (starts[run] + within)[:, None] + each
    rows = jnp.where(each < (own[run] - within)[:, None], rows, length)
    return RowBlocks(padded, rows.reshape(-1))
