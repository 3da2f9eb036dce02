"""What XLA does with the results of a launch, until they are the outputs of an epilogue."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from ..gemm.epilogue_graph import Result
from .request import Request
from .route import Route


def finished_results(request: Request, route: Route, *arrays: jax.Array) -> list[jax.Array]:
    """Returns the function's outputs from what the kernel wrote and the function's operands."""
    assert route.fusion
    whole = [result for result in route.fusion.graph.results if result.plane == 0]
    finished: list[jax.Array] = []
    for result, array in zip(whole, arrays[: len(whole)], strict=True):
        if result.kind == "matrix":
            finished.append(array)
            continue
        found = finish_partials(result, array, in_order=request.options.batch_invariant)
        parts = found if isinstance(found, tuple) else (found,)
        finished += [_shaped(request, route, result, part) for part in parts]
    return route.fusion.finish(*finished, *arrays[len(whole) :])


def _shaped(request: Request, route: Route, result: Result, array: Any) -> jax.Array:
    """Returns a finished reduction, (L, M, ...) or (L, N), with the axes of the result."""
    assert route.roles
    if result.kind == "max":
        return jnp.max(array)
    axes, extents = route.roles, request.extents
    letters = axes.batch + (axes.n if result.kind == "column_sum" else axes.m)
    trailing = array.shape[2:]
    array = array.reshape([extents[letter] for letter in letters] + list(trailing))
    order = [letters.index(x) for x in request.subscripts.out if x in letters]
    return lax.transpose(array, (*order, *range(len(letters), array.ndim)))


def finish_partials(
    result: Result, partials: jax.Array, *, in_order: bool = False
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Returns the finished reduction.

    No atomics here either: the same program gives the same bits on every run. The steps are
    `lax`'s: `jnp.where` and the like are functions of their own, which JAX traces and lowers.

    Args:
      result: a reduction or top-k of the graph.
      partials: what the kernel wrote for it, shaped as `plan.result_shapes` says.
      in_order: whether sums are added pair by pair, not in the order that XLA takes for the shape.

    Returns:
      column_sum       (L, N)
      row_sum, row_max (L, M)
      row_sumexp       two arrays (L, M): the largest value v of the row, the sum of
                       exp(v - largest); of exp(v) where the largest is infinite, so that a row of
                       -inf has 0 and one with +inf has inf. NaN if the row has one.
      max              ()
      top_k_*          (L, M, k), as it is
    """
    if result.kind in ("column_sum", "row_sum"):
        return _sum(partials, in_order)
    if result.kind == "row_max":
        return _largest(partials, (1,))
    if result.kind == "max":
        return _largest(partials, (0, 1, 2))
    if result.kind == "row_sumexp":
        tops, sums = partials[:, :, 0], partials[:, :, 1]  # of each tile, (L, tiles, M)
        top = _largest(tops, (1,))
        infinite = lax.eq(lax.abs(top), np.float32(np.inf))
        base = lax.select(infinite, lax.full_like(top, 0.0), top)  # inf - inf would be NaN
        shifted = lax.sub(tops, lax.broadcast_in_dim(base, tops.shape, (0, 2)))
        return top, _sum(lax.mul(sums, lax.exp(shifted)), in_order)
    return partials


def _sum(x: jax.Array, in_order: bool) -> jax.Array:
    """Returns the sum along axis 1; `in_order` of halves, element by element."""
    if not in_order:
        return lax.reduce_sum(x, (1,))
    while (count := x.shape[1]) > 1:
        half = count // 2
        pairs = x[:, :half] + x[:, half : 2 * half]
        x = jnp.concatenate([pairs, x[:, 2 * half :]], axis=1)
    return x[:, 0]


def _largest(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Returns the largest, NaN if one is: XLA's reductions for CPUs may drop it."""
    largest = lax.reduce_max(x, axes)
    return lax.select(lax.reduce_or(lax.ne(x, x), axes), lax.full_like(largest, np.nan), largest)
