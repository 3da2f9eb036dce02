"""What an epilogue's results must be, and how far from it a correct kernel may be: derived.

Each value of the graph is three arrays: what float64 gives, and the lowest and highest number
that a correct kernel may hold there. They start from the accumulators, whose error
`tolerance.accumulation_error` bounds, and from operands, which are exact. A node widens them in
two steps.

The arguments' ranges. Where a function rises or falls all the way, the range of its values is
that between the ends. Of products and quotients it is the least and greatest over the four
pairs of ends; squares and the like turn at 0; sine and cosine change by no more than their
argument. A comparison of ranges that overlap may come out either way, and a `select` by it takes
the hull of both its values. This holds for any error of the arguments, large or small, and
treats arguments as if they erred independently, which only widens a range.

The operation's own error: `arithmetic.error_of` of the form in which the kernel computes it. The
graph is the rewritten one, `Arithmetic`, whose values are the same numbers; where the kernel
contracts a product and a sum into one instruction, it saves a rounding that is counted here.
What exceeds float32 is infinite, in the value as in the ends.

A matrix is then rounded to its dtype: so are the ends, and since rounding keeps order, every
correct result lies between the rounded ends. The bound is the farther of them from the value.
Where a range holds a point at which the function is not defined, anything goes: the bound is
infinite.

Sums of n terms in float32, in any order, err by at most depth * 2**-24 / (1 - depth * 2**-24) of
the sum of their magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section
4.2), where depth is the longest chain of additions: within a tile, then over the tiles.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from scipy import special

from ..arithmetic import (
    EXPONENT_LIMIT,
    NORMAL,
    ROUNDING,
    SIN_COS_LIMIT,
    SUBNORMAL,
    ULP,
    Arithmetic,
    Error,
    arithmetic_of,
    error_of,
)
from ..epilogue import PREDICATES, EpilogueGraph, Node, Result

LARGEST = float(np.finfo(np.float32).max)
OVERFLOW = LARGEST * (1 + 2.0**-25)  # what float32 rounds to infinity
FLOAT64 = 2.0**-48  # relative error of this reference itself
TILE = 256  # the largest extent of a tile
SMALLEST_TILE_M, SMALLEST_TILE_N = 64, 16
SUMEXP = Error(16 * ULP)  # of one term of row_sumexp: an exponential, then factors of them


class Range(NamedTuple):
    """A value's numbers: exact, lowest, highest, in float64.

    Of a truth value: whether it is true, may be false, may be true; as 0.0 and 1.0 it is a range
    like the others, `low` being 1 only where it cannot be false.
    """

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray


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
            ranges[i] = _float32(Range(exact, exact - errors[i], exact + errors[i]))
        for i, array in enumerate(operands, graph.accumulators):
            ranges[i] = _point(array)
        results = [arithmetic.number(result.value) for result in graph.results]
        for value in arithmetic.order(results, through_rows=True):
            if value not in ranges:
                ranges[value] = _evaluated(arithmetic, value, ranges, shape)
        found = []
        for result, value in zip(graph.results, results, strict=True):
            found += _result(result, _broadcast(ranges[value], shape))
    return found


def _evaluated(
    arithmetic: Arithmetic, value: int, ranges: dict[int, Range], shape: tuple[int, ...]
) -> Range:
    node = arithmetic.node(value)
    assert node is not None
    args = [ranges[argument] for argument in node.args]
    if node.op == "row_sum":
        return Range(*(x[..., None] for x in _sum(_broadcast(args[0], shape), 2, SMALLEST_TILE_N)))
    if node.op == "row_max":
        return Range(*(x.max(axis=2, keepdims=True) for x in _broadcast(args[0], shape)))
    found = _function(node, args)
    if node.op in PREDICATES or node.op == "constant":
        return found
    if node.op != "select":  # which passes on what it is given, whatever became of the other
        found = _defined(found)
    return _widened(found, error_of(node, arithmetic.forms[value]), args)


def _function(node: Node, args: list[Range]) -> Range:
    """Returns the range of a node's values over its arguments' ranges, exactly computed."""
    op = node.op
    if op == "constant":
        return _point(np.float32(node.params[0]))
    if op == "convert":
        return Range(*(_rounded(x, node.params[0]) for x in args[0]))
    if op == "integer_pow":
        return _integer_pow(args[0], node.params[0])
    if op in RISING:
        return Range(*map(RISING[op], args[0]))
    if op in FALLING:
        value, low, high = map(FALLING[op], args[0])
        return Range(value, high, low)
    return GENERAL[op](*args)


# Functions that rise, or fall, over all numbers for which they are defined.
RISING: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "sign": np.sign, "floor": np.floor, "ceil": np.ceil, "round": np.rint, "exp": np.exp,
    "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log1p": np.log1p, "sqrt": np.sqrt,
    "tanh": np.tanh, "logistic": special.expit, "erf": special.erf,
}  # fmt: skip
FALLING: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "neg": np.negative,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "erfc": special.erfc,
}


def _sums(x: Range, y: Range) -> Range:
    return Range(*map(operator.add, x, y))


def _products(x: Range, y: Range) -> Range:
    return _over_ends(np.multiply, x, y)


def _over_ends(function: Callable, x: Range, y: Range) -> Range:
    ends = [function(a, b) for a in x[1:] for b in y[1:]]
    return Range(
        function(x.value, y.value),
        functools.reduce(np.minimum, ends),
        functools.reduce(np.maximum, ends),
    )


def _quotients(x: Range, y: Range) -> Range:
    found = _over_ends(np.divide, x, y)
    pole = (y.low <= 0) & (y.high >= 0) & (y.low != y.high)
    return _anything(found, pole)


def _absolute(x: Range) -> Range:
    low, high = np.abs(x.low), np.abs(x.high)
    turns = (x.low < 0) & (x.high > 0)
    return Range(
        np.abs(x.value), np.where(turns, 0.0, np.minimum(low, high)), np.maximum(low, high)
    )


def _integer_pow(x: Range, exponent: int) -> Range:
    if exponent < 0:
        # The power comes first, in float32; then it divides 1.
        power = Node("integer_pow", (0,), (-exponent,))
        return _quotients(
            _point(1.0),
            _widened(_integer_pow(x, -exponent), error_of(power, "accurate"), [x]),
        )
    base = _absolute(x) if exponent % 2 == 0 else x
    return Range(*(end**exponent for end in base))


def _pow(x: Range, y: Range) -> Range:
    found = _over_ends(np.power, x, y)
    # Between the ends a power of positive numbers rises or falls; of others it may jump.
    known = (x.low > 0) | ((x.low == x.high) & (y.low == y.high))
    return _anything(found, ~known)


def _wave(function: Callable) -> Callable[[Range], Range]:
    def over(x: Range) -> Range:
        value = function(x.value)
        away = np.maximum(x.high - x.value, x.value - x.low)
        away = np.where(np.abs(x.value) < SIN_COS_LIMIT, away, np.inf)
        return Range(value, np.maximum(value - away, -1), np.minimum(value + away, 1))

    return over


def _compare(below: bool, equal: bool) -> Callable[[Range, Range], Range]:
    """Returns the comparison x < y, x <= y or x == y of ranges."""

    def over(x: Range, y: Range) -> Range:
        if below and equal:
            value, surely, perhaps = x.value <= y.value, x.high <= y.low, x.low <= y.high
        elif below:
            value, surely, perhaps = x.value < y.value, x.high < y.low, x.low < y.high
        else:
            value = x.value == y.value
            surely = (x.low == y.high) & (x.high == y.low)
            perhaps = (x.low <= y.high) & (y.low <= x.high)
        unknown = ~np.isnan(x.value + y.value) & np.isnan(x.low + x.high + y.low + y.high)
        return _truth(value, surely & ~unknown, perhaps | unknown)

    return over


def _truth(value: np.ndarray, low: np.ndarray, high: np.ndarray) -> Range:
    return Range(*(np.asarray(x, np.float64) for x in (value, low, high)))


def _not(x: Range) -> Range:
    return Range(1 - x.value, 1 - x.high, 1 - x.low)


def _is_finite(x: Range) -> Range:
    finite = [np.isfinite(end) for end in x]
    return _truth(finite[0], finite[1] & finite[2], finite[0] | finite[1] | finite[2])


def _and(x: Range, y: Range) -> Range:
    return Range(*map(np.minimum, x, y))


def _or(x: Range, y: Range) -> Range:
    return Range(*map(np.maximum, x, y))


def _select(predicate: Range, x: Range, y: Range) -> Range:
    low = np.where(predicate.high == 0, y.low, np.where(predicate.low == 1, x.low, np.nan))
    high = np.where(predicate.high == 0, y.high, np.where(predicate.low == 1, x.high, np.nan))
    either = (predicate.low == 0) & (predicate.high == 1)
    return Range(
        np.where(predicate.value == 1, x.value, y.value),
        np.where(either, np.minimum(x.low, y.low), low),
        np.where(either, np.maximum(x.high, y.high), high),
    )


_less, _less_equal, _equal = _compare(True, False), _compare(True, True), _compare(False, True)

GENERAL: dict[str, Callable[..., Range]] = {
    "abs": _absolute,
    "square": lambda x: _integer_pow(x, 2),
    "sin": _wave(np.sin),
    "cos": _wave(np.cos),
    "add": _sums,
    "sub": lambda x, y: Range(x.value - y.value, x.low - y.high, x.high - y.low),
    "mul": _products,
    "div": _quotients,
    "max": lambda x, y: Range(*map(np.maximum, x, y)),
    "min": lambda x, y: Range(*map(np.minimum, x, y)),
    "pow": _pow,
    "eq": _equal,
    "ne": lambda x, y: _not(_equal(x, y)),
    "lt": _less,
    "le": _less_equal,
    "gt": lambda x, y: _less(y, x),
    "ge": lambda x, y: _less_equal(y, x),
    "is_finite": _is_finite,
    "and": _and,
    "or": _or,
    "xor": lambda x, y: _or(_and(x, _not(y)), _and(_not(x), y)),
    "not": _not,
    "select": _select,
}


def _point(x: np.ndarray | np.floating | float) -> Range:
    return Range(*[np.asarray(x, np.float64)] * 3)


def _anything(x: Range, where: np.ndarray) -> Range:
    return Range(x.value, np.where(where, -np.inf, x.low), np.where(where, np.inf, x.high))


def _defined(x: Range) -> Range:
    """Returns the range with ends that hold nothing back where they are not numbers."""
    unknown = (np.isnan(x.low) | np.isnan(x.high)) & ~np.isnan(x.value)
    return _anything(x, unknown)


def _widened(x: Range, error: Error, args: list[Range]) -> Range:
    """Returns the range of what is computed with an error, in float32."""
    relative = error.relative
    if error.per_argument:
        reach = np.maximum(np.abs(args[0].low), np.abs(args[0].high))
        relative = relative + error.per_argument * np.minimum(reach, EXPONENT_LIMIT)
    if error.relative == 0 and error.absolute == 0:
        return _float32(x)

    def away(end: np.ndarray) -> np.ndarray:
        return np.where(np.isinf(end), 0.0, np.abs(end) * (relative + FLOAT64) + error.absolute)

    return _float32(Range(x.value, x.low - away(x.low), x.high + away(x.high)))


def _float32(x: Range) -> Range:
    """Returns the range with infinities for what float32 cannot hold."""
    return Range(*(np.where(np.abs(e) >= OVERFLOW, np.copysign(np.inf, e), e) for e in x))


def _broadcast(x: Range, shape: tuple[int, ...]) -> Range:
    return Range(*(np.broadcast_to(end, shape) for end in x))


def _rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return np.asarray(x, np.float64).astype(np.float32).astype(jnp.dtype(dtype)).astype(np.float64)


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
        low, high = (_rounded(end, result.dtype) for end in x[1:])
        largest = float(jnp.finfo(result.dtype).max)
        value = np.where(np.isinf(low) & (low == high), low, x.value)
        value = np.where(np.abs(value) > largest, _rounded(value, result.dtype), value)
        return [_pair(_defined(Range(value, low, high)))]
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
    return _float32(_defined(Range(value, low - error, high + error)))


def _row_sumexp(x: Range) -> list[tuple[np.ndarray, np.ndarray]]:
    top = Range(*(end.max(axis=2) for end in x))
    value, low, high = (end[..., None] for end in top)
    # The largest itself adds 1, whatever it is.
    ends = Range(
        np.exp(x.value - value), np.exp(x.low - high), np.minimum(np.exp(x.high - low), 1.0)
    )
    per_unit = 1.5 * ROUNDING * np.minimum(np.abs(x.low - high), EXPONENT_LIMIT)
    away = (SUMEXP.relative + per_unit) * ends.high + NORMAL
    terms = _defined(Range(ends.value, ends.low - away, ends.high + away))
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
