"""Interval arithmetic of an epilogue's operations, as tests derive bounds from it.

A value is three arrays: what float64 gives, and the lowest and highest number that a correct
kernel may hold there. An operation widens them in two steps.

The arguments' ranges. Where a function rises or falls all the way, the range of its values is
that between the ends. Of products and quotients it is the least and greatest over the four
pairs of ends; squares and the like turn at 0; sine and cosine change by no more than their
argument. A comparison of ranges that overlap may come out either way, and a `select` by it takes
the hull of both its values. This holds for any error of the arguments, large or small, and
treats arguments as if they erred independently, which only widens a range.

The operation's own error: `arithmetic.error_of` of the form in which the kernel computes it. What
exceeds float32 is infinite, in the value as in the ends.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import special
from support.casts import cast
from support.epilogue_errors import EXPONENT_LIMIT, Error, error_of

from jax_hopper_gemm.gemm.epilogue_arithmetic import SIN_COS_LIMIT
from jax_hopper_gemm.gemm.epilogue_graph import Node

LARGEST = float(np.finfo(np.float32).max)
OVERFLOW = LARGEST * (1 + 2.0**-25)  # what float32 rounds to infinity
FLOAT64 = 2.0**-48  # relative error of this reference itself


class Range(NamedTuple):
    """A value's numbers: exact, lowest, highest, in float64.

    Of a truth value: whether it is true, may be false, may be true; as 0.0 and 1.0 it is a range
    like the others, `low` being 1 only where it cannot be false.
    """

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray


def function_range(node: Node, args: list[Range]) -> Range:
    """Returns the range of a node's values over its arguments' ranges, exactly computed."""
    op = node.op
    if op == "constant":
        return point(np.float32(node.params[0]))
    if op == "convert":
        return Range(*(rounded(x, node.params[0]) for x in args[0]))
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
            point(1.0), widened(_integer_pow(x, -exponent), error_of(power, "accurate"), [x])
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
    "abs": _absolute, "square": lambda x: _integer_pow(x, 2), "sin": _wave(np.sin),
    "cos": _wave(np.cos), "add": _sums,
    "sub": lambda x, y: Range(x.value - y.value, x.low - y.high, x.high - y.low), "mul": _products,
    "div": _quotients, "max": lambda x, y: Range(*map(np.maximum, x, y)),
    "min": lambda x, y: Range(*map(np.minimum, x, y)), "pow": _pow, "eq": _equal,
    "ne": lambda x, y: _not(_equal(x, y)), "lt": _less, "le": _less_equal,
    "gt": lambda x, y: _less(y, x), "ge": lambda x, y: _less_equal(y, x), "is_finite": _is_finite,
    "and": _and, "or": _or, "xor": lambda x, y: _or(_and(x, _not(y)), _and(_not(x), y)),
    "not": _not, "select": _select,
}  # fmt: skip


def point(x: np.ndarray | np.floating | float) -> Range:
    """Returns the range of numbers that are known exactly."""
    return Range(*[np.asarray(x, np.float64)] * 3)


def _anything(x: Range, where: np.ndarray) -> Range:
    return Range(x.value, np.where(where, -np.inf, x.low), np.where(where, np.inf, x.high))


def defined(x: Range) -> Range:
    """Returns the range with ends that hold nothing back where they are not numbers."""
    unknown = (np.isnan(x.low) | np.isnan(x.high)) & ~np.isnan(x.value)
    return _anything(x, unknown)


def widened(x: Range, error: Error, args: list[Range]) -> Range:
    """Returns the range of what is computed with an error, in float32."""
    relative = error.relative
    if error.per_argument:
        reach = np.maximum(np.abs(args[0].low), np.abs(args[0].high))
        relative = relative + error.per_argument * np.minimum(reach, EXPONENT_LIMIT)
    if error.relative == 0 and error.absolute == 0:
        return as_float32(x)

    def away(end: np.ndarray) -> np.ndarray:
        return np.where(np.isinf(end), 0.0, np.abs(end) * (relative + FLOAT64) + error.absolute)

    return as_float32(Range(x.value, x.low - away(x.low), x.high + away(x.high)))


def as_float32(x: Range) -> Range:
    """Returns the range with infinities for what float32 cannot hold."""
    return Range(*(np.where(np.abs(e) >= OVERFLOW, np.copysign(np.inf, e), e) for e in x))


def broadcast(x: Range, shape: tuple[int, ...]) -> Range:
    """Returns the range with all of its arrays of a shape."""
    return Range(*(np.broadcast_to(end, shape) for end in x))


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Returns numbers rounded to float32, then to `dtype`."""
    single = np.asarray(x, np.float64).astype(np.float32)
    return cast(single, dtype).astype(np.float64)
