"""What an epilogue's results must be, and how far from it a correct kernel may be: derived.

Each value of the graph is a range (`ranges`): they start from the accumulators, whose error
`tolerance.accumulation_error` bounds, and from operands, which are exact. The graph is the
rewritten one, `Arithmetic`, whose values are the same numbers; where the kernel contracts a
product and a sum into one instruction, it saves a rounding that is counted here.

A matrix is then rounded to its dtype: so are the ends, and since rounding keeps order, every
correct result lies between the rounded ends. The bound is the farther of them from the value.
Where a range holds a point at which the function is not defined, anything goes: the bound is
infinite.

Sums of n terms in float32, in any order, err by at most depth * 2**-24 / (1 - depth * 2**-24) of
the sum of their magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section
4.2), where depth is the longest chain of additions: within a tile, then over the tiles.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from support.epilogue_errors import EXPONENT_LIMIT, ROUNDING, SUBNORMAL, ULP, Error, error_of
from support.ranges import (
    Range,
    as_float32,
    broadcast,
    defined,
    function_range,
    point,
    rounded,
    widened,
)

from jax_hopper_gemm.gemm.epilogue_arithmetic import NORMAL, Arithmetic, arithmetic_of
from jax_hopper_gemm.gemm.epilogue_graph import PREDICATES, EpilogueGraph, Result

TILE = 256  # the largest extent of a tile
SMALLEST_TILE_M, SMALLEST_TILE_N = 64, 16
SUMEXP = Error(16 * ULP)  # of one term of row_sumexp: an exponential, then factors of them


def evaluate(
    graph: EpilogueGraph,
    accumulators: Sequence[np.ndarray],
    operands: Sequence[np.ndarray],
    acc_error: list[np.ndarray] | np.ndarray | float = 0.0,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns each result in float64, and how far a kernel's may be from it.

    Args:
      accumulators: one (L, M, N) array in float64 for each of the graph's, exact.
      operands: one array for each of the graph's, which broadcasts to (L, M, N).
      acc_error: the largest error of each element of the accumulators; a list has one for each.

    Returns:
      (value, bound) for each result in turn, of what the partial results of a kernel add up to:
      matrix (L, M, N); row_sum, row_max (L, M); column_sum (L, N); max (); top_k_values and
      top_k_indices (L, M, k), where an index has bound 0 if it is certain, else infinite; and
      for row_sumexp two pairs, the largest and the sum, (L, M) each. A NaN must be a NaN.
    """
    errors = acc_error if isinstance(acc_error, list) else [acc_error] * 2
    shape = np.shape(accumulators[0])
    arithmetic = arithmetic_of(graph)
    ranges: dict[int, Range] = {}
    with np.errstate(all="ignore"):
        for i, array in enumerate(accumulators):
            exact = np.asarray(array, np.float64)
            ranges[i] = as_float32(Range(exact, exact - errors[i], exact + errors[i]))
        for i, array in enumerate(operands, graph.accumulators):
            ranges[i] = point(array)
        results = [arithmetic.number(result.value) for result in graph.results]
        for value in arithmetic.order(results, through_rows=True):
            if value not in ranges:
                ranges[value] = _evaluated(arithmetic, value, ranges, shape)
        found = []
        for result, value in zip(graph.results, results, strict=True):
            found += _result(result, broadcast(ranges[value], shape))
    return found


def _evaluated(
    arithmetic: Arithmetic, value: int, ranges: dict[int, Range], shape: tuple[int, ...]
) -> Range:
    node = arithmetic.node(value)
    assert node is not None
    args = [ranges[argument] for argument in node.args]
    if node.op == "row_sum":
        return Range(*(x[..., None] for x in _sum(broadcast(args[0], shape), 2, SMALLEST_TILE_N)))
    if node.op == "row_max":
        return Range(*(x.max(axis=2, keepdims=True) for x in broadcast(args[0], shape)))
    found = function_range(node, args)
    if node.op in PREDICATES or node.op == "constant":
        return found
    if node.op != "select":  # which passes on what it is given, whatever became of the other
        found = defined(found)
    return widened(found, error_of(node, arithmetic.forms[value]), args)


def _pair(x: Range) -> tuple[np.ndarray, np.ndarray]:
    """Returns value and bound of a range."""
    value, low, high = x
    bound = np.maximum(high - value, value - low)
    bound = np.where(
        np.isinf(value), np.where((low == value) & (high == value), 0.0, np.inf), bound
    )
    return value, np.where(np.isnan(value), np.nan, np.where(np.isnan(bound), np.inf, bound))


def _result(result: Result, x: Range) -> list[tuple[np.ndarray, np.ndarray]]:
    if result.kind == "matrix":
        low, high = (rounded(end, result.dtype) for end in x[1:])
        floating = jnp.issubdtype(result.dtype, jnp.floating)
        largest = float(jnp.finfo(result.dtype).max) if floating else np.inf
        value = np.where(np.isinf(low) & (low == high), low, x.value)
        value = np.where(np.abs(value) > largest, rounded(value, result.dtype), value)
        return [_pair(defined(Range(value, low, high)))]
    if result.kind == "row_sum":
        return [_pair(_sum(x, 2, SMALLEST_TILE_N))]
    if result.kind == "column_sum":
        return [_pair(_sum(x, 1, SMALLEST_TILE_M))]
    if result.kind == "row_max":
        return [_pair(Range(*(end.max(axis=2) for end in x)))]
    if result.kind == "max":
        return [_pair(Range(*(end.max() for end in x)))]
    if result.kind == "row_sumexp":
        return _row_sumexp(x)
    values, indices = _top_k(x, result.k)
    return [_pair(values) if result.kind == "top_k_values" else indices]


def _sum(x: Range, axis: int, smallest_tile: int) -> Range:
    n = x.value.shape[axis]
    depth = min(n, TILE + -(-n // smallest_tile))
    share = depth * ROUNDING / (1 - depth * ROUNDING)
    error = share * np.maximum(np.abs(x.low), np.abs(x.high)).sum(axis) + n * SUBNORMAL
    value, low, high = (end.sum(axis) for end in x)
    return as_float32(defined(Range(value, low - error, high + error)))


def _row_sumexp(x: Range) -> list[tuple[np.ndarray, np.ndarray]]:
    top = Range(*(end.max(axis=2) for end in x))
    value, low, high = (end[..., None] for end in top)
    # The largest itself adds 1, whatever it is.
    ends = Range(
        np.exp(x.value - value), np.exp(x.low - high), np.minimum(np.exp(x.high - low), 1.0)
    )
    per_unit = 1.5 * ROUNDING * np.minimum(np.abs(x.low - high), EXPONENT_LIMIT)
    away = (SUMEXP.relative + per_unit) * ends.high + NORMAL
    terms = defined(Range(ends.value, ends.low - away, ends.high + away))
    return [_pair(top), _pair(_sum(terms, 2, SMALLEST_TILE_N))]


def _top_k(x: Range, k: int) -> tuple[Range, tuple[np.ndarray, np.ndarray]]:
    values = Range(*(-np.sort(-end, axis=2)[..., :k] for end in x))
    order = np.argsort(-x.value, axis=2, kind="stable")
    low, high = (np.take_along_axis(end, order, 2) for end in x[1:])
    # Certain where all before are surely larger and all behind surely smaller.
    least_before = np.minimum.accumulate(low, axis=2)
    largest_behind = np.maximum.accumulate(high[..., ::-1], axis=2)[..., ::-1]
    certain = np.ones(order.shape, bool)
    certain[..., 1:] &= least_before[..., :-1] > high[..., 1:]
    certain[..., :-1] &= low[..., :-1] > largest_behind[..., 1:]
    bound = np.where(certain, 0.0, np.inf)[..., :k]
    return values, (order[..., :k].astype(np.float64), bound)
