"""What XLA does with the partial results of a kernel's reductions: it adds them up."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..gemm.epilogue_graph import Result


def finish_partials(result: Result, partials: jax.Array) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Returns the finished reduction.

    No atomics here either: the same program gives the same bits on every run.

    Args:
      result: a reduction or top-k of the graph.
      partials: what the kernel wrote for it, shaped as `plan.result_shapes` says.

    Returns:
      column_sum       (L, N)
      row_sum, row_max (L, M)
      row_sumexp       two arrays (L, M): the largest value v of the row, the sum of
                       exp(v - largest); of exp(v) where the largest is infinite, so that a row of
                       -inf has 0 and one with +inf has inf. NaN if the row has one.
      max              ()
      top_k_*          (L, M, k), as it is

    Raises:
      ValueError: `result` is a matrix, or `partials` has another rank than such results have.
    """
    rank = {"row_sumexp": 4}.get(result.kind, 3)
    if result.kind == "matrix" or partials.ndim != rank:
        raise ValueError(
            f"finish_partials: {result.kind} of shape {partials.shape}; expected a reduction with "
            f"the {rank} axes that plan.result_shapes gives it. Matrices come finished."
        )
    if result.kind in ("column_sum", "row_sum"):
        return jnp.sum(partials, axis=1)
    if result.kind == "row_max":
        return _largest(partials, 1)
    if result.kind == "max":
        return _largest(partials)
    if result.kind == "row_sumexp":
        return _finish_sumexp(partials[:, :, 0], partials[:, :, 1])
    return partials


def _finish_sumexp(tops: jax.Array, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns largest value and sum (L, M) of a row from those of its tiles (L, tiles, M)."""
    top = _largest(tops, 1)
    base = jnp.where(jnp.isinf(top), 0.0, top)  # inf - inf would be NaN
    return top, jnp.sum(sums * jnp.exp(tops - base[:, None]), axis=1)


def _largest(x: jax.Array, axis: int | None = None) -> jax.Array:
    """Returns the largest, NaN if one is: XLA's reductions for CPUs may drop it."""
    return jnp.where(jnp.any(jnp.isnan(x), axis=axis), jnp.nan, jnp.max(x, axis=axis))
