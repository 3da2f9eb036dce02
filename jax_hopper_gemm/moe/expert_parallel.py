"""Expert parallelism: the exchange of tokens and results along a mesh axis.

Every function here runs inside `jax.shard_map`. Each of n devices has T tokens. A token's k choices
differ, so at most c = min(k, E / n) of them fall on one device. So n * T * c rows always suffice;
the experts' GEMMs skip the absent rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from ..primitives.define import promoted
from ..primitives.rows import sum_rows
from .router import Routing, row_weights, sort_by_group

Exchange = Literal["gather", "all_to_all", "ragged_all_to_all"]
Experts = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # rows, group sizes, row weights


def gather(x: jax.Array, routing: Routing, experts: Experts, axis: Any, held: int) -> jax.Array:
    """Gathers all tokens on every device, which runs its own experts, and adds up the results.

    Args:
      x: (T, D), this device's tokens.
      routing: of these tokens, among all experts.
      experts: a function of rows sorted by this device's experts that returns their results.
      axis: the mesh axis, or a tuple of several.
      held: number of experts on each device.

    Returns:
      (T, D).
    """
    if x.shape[0] == 0:  # XLA gathers no empty arrays
        return experts(x, routing.group_sizes[:held], row_weights(routing))
    x, weights, chosen = (
        lax.all_gather(a, axis, tiled=True) for a in (x, routing.weights, routing.experts)
    )
    k = chosen.shape[1]
    local = chosen - held * lax.axis_index(axis)
    local = jnp.where((local >= 0) & (local < held), local, held)
    sizes, order, positions = sort_by_group(local, held)
    order = order[: x.shape[0] * min(k, held)]
    order = jnp.where(jnp.arange(order.size) < sizes.sum(), order, -1)
    positions = jnp.where(local < held, positions, -1)
    tokens = jnp.where(order < 0, -1, order // k)[:, None]
    own_weights = sum_rows(weights.reshape(-1), order[:, None], positions.reshape(-1, 1))
    y = experts(sum_rows(x, tokens, positions), sizes, own_weights)
    y = sum_rows(y, positions, tokens)
    wide = y.astype(promoted(y.dtype, jnp.float32))
    total = lax.psum_scatter(wide, axis, tiled=True)
    return total.astype(y.dtype)


def all_to_all(x: jax.Array, routing: Routing, experts: Experts, axis: Any, held: int) -> jax.Array:
    """Sends every choice to its expert's device and back, in blocks of T * c rows a device.

    Arguments and result are those of `gather`.
    """
    n, (tokens, k) = lax.axis_size(axis), routing.experts.shape
    capacity = tokens * min(k, held)
    by_device = routing.group_sizes.reshape(n, held)
    send = by_device.sum(1, dtype=jnp.int32)
    # Starts of each device's block: among the sorted rows, and among the rows to send.
    sorted_starts, block_starts = _starts(send), capacity * jnp.arange(n, dtype=jnp.int32)
    to_block = moved(send, sorted_starts, block_starts, n * capacity)
    to_sorted = moved(send, block_starts, sorted_starts, tokens * k)
    sent = jnp.where(to_block < 0, -1, routing.order[to_block])
    senders = jnp.where(sent < 0, -1, sent // k)[:, None]
    places = to_sorted[routing.positions]

    # Received blocks are ordered by device, then by expert; the GEMMs need them by expert.
    counts = lax.all_to_all(by_device, axis, 0, 0, tiled=True)  # (device, own expert)
    begins = block_starts[:, None] + _starts(counts)
    by_expert = counts.T.reshape(-1)
    to_received = moved(by_expert, begins.T.reshape(-1), _starts(by_expert), n * capacity)
    to_expert = moved(
        counts.reshape(-1), _starts(by_expert).reshape(held, n).T.reshape(-1),
        begins.reshape(-1), n * capacity,
    )  # fmt: skip
    received, expert = to_received[:, None], to_expert[:, None]

    def there(a: jax.Array, sources: jax.Array, users: jax.Array) -> jax.Array:
        blocks = lax.all_to_all(sum_rows(a, sources, users), axis, 0, 0, tiled=True)
        return sum_rows(blocks, received, expert)

    weights = there(routing.weights.reshape(-1), sent[:, None], places.reshape(-1, 1))
    y = experts(there(x, senders, places), counts.sum(0), weights)
    blocks = lax.all_to_all(sum_rows(y, expert, received), axis, 0, 0, tiled=True)
    return sum_rows(blocks, places, senders)


def ragged_all_to_all(
    x: jax.Array, routing: Routing, experts: Experts, axis: Any, held: int
) -> jax.Array:
    """Sends every choice to its place among its expert's rows and back, without padding.

    XLA supports this on GPUs and TPUs, not on CPUs. Arguments and result are those of `gather`.
    """
    n, (tokens, k) = lax.axis_size(axis), routing.experts.shape
    me = lax.axis_index(axis)
    counts = lax.all_gather(routing.group_sizes, axis)  # (device, expert)
    mine = lax.dynamic_slice_in_dim(counts, me * held, held, axis=1)
    # A device holds rows ordered by expert, then by the device that they come from.
    totals = counts.sum(0).reshape(n, held)
    expert_starts = _starts(totals).reshape(-1)
    destinations = expert_starts + _starts(counts.T)[:, me]  # of the rows that this device sends
    sources = _starts(routing.group_sizes)
    own_starts = _starts(mine.T.reshape(-1)).reshape(held, n).T.reshape(-1)
    origins = lax.dynamic_slice_in_dim(_starts(counts), me * held, held, axis=1).reshape(-1)
    sent, received = routing.group_sizes, mine.reshape(-1)
    tokens_of_rows = (routing.order // k)[:, None]

    def there(rows: jax.Array) -> jax.Array:
        space = _zeros_like(rows, n * tokens * min(k, held))
        return lax.ragged_all_to_all(
            rows, space, sources, sent, destinations, received, axis_name=axis
        )

    y = experts(
        there(sum_rows(x, tokens_of_rows, routing.positions)),
        mine.sum(0),
        there(row_weights(routing)[:, None])[:, 0],
    )
    back = lax.ragged_all_to_all(
        y, _zeros_like(y, tokens * k), own_starts, received, origins, sent, axis_name=axis
    )
    return sum_rows(back, routing.positions, tokens_of_rows)


EXCHANGES = {"gather": gather, "all_to_all": all_to_all, "ragged_all_to_all": ragged_all_to_all}


def moved(sizes: jax.Array, begins: jax.Array, places: jax.Array, length: int) -> jax.Array:
    """Returns for each of `length` places the row that moves there, or -1.

    Args:
      sizes, begins, places: (S,), runs of rows: sizes[i] rows from begins[i] on move to the places
        from places[i] on. Places ascend and the runs do not overlap.

    Returns:
      (length,) int32.
    """
    rows = jnp.arange(length, dtype=jnp.int32)
    # The last run that starts here or before; runs without rows share its start and do not count.
    started = places[None, :] <= rows[:, None]
    span = jnp.max(
        jnp.where(started & (sizes > 0)[None, :], jnp.arange(sizes.size)[None, :], 0), axis=1
    )
    offset = rows - places[span]
    inside = (offset >= 0) & (offset < sizes[span])
    return jnp.where(inside, begins[span] + offset, -1).astype(jnp.int32)


def _starts(sizes: jax.Array) -> jax.Array:
    """Returns the starts of adjacent runs along the last axis."""
    return (jnp.cumsum(sizes, axis=-1) - sizes).astype(jnp.int32)


def _zeros_like(rows: jax.Array, length: int) -> jax.Array:
    """Returns zeros (length, ...), varying over the mesh axes that `rows` varies over."""
    zeros = jnp.zeros((length, *rows.shape[1:]), rows.dtype)
    varying = tuple(jax.typeof(rows).manual_axis_type.varying)
    return lax.pcast(zeros, varying, to="varying") if varying else zeros
