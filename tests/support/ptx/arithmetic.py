"""Arithmetic of PTX on arrays: one function for each instruction, of its operands' values.

Approximate instructions (`ex2.approx`) are computed exactly and rounded once.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from support.ptx.lanes import DTYPE
from support.ptx.parse import PtxError

Function = Callable[..., Any]

# NumPy's shifts by as many bits as there are, or more, are anyone's guess; PTX's push all bits out.
_TINY = np.float32(2.0**-126)


def _bits(a: Any) -> int:
    return 8 * a.dtype.itemsize


def _shl(a: Any, by: Any) -> Any:
    return np.where(by < _bits(a), a << np.minimum(by, _bits(a) - 1).astype(a.dtype), a & 0)


def _shr(a: Any, by: Any) -> Any:
    most = np.minimum(by, _bits(a) - 1).astype(a.dtype)
    return a >> most if a.dtype.kind == "i" else np.where(by < _bits(a), a >> most, a & 0)


def _wide(function: Function, high: bool, *args: Any) -> Any:
    """Returns `function` of numbers of twice the bits, or the upper half of that."""
    kind, size = args[0].dtype.kind, args[0].dtype.itemsize
    if size == 8:
        raise PtxError("products of 128 bits are not known")
    whole = function(*(a.astype(f"{kind}{2 * size}") for a in args))
    return (whole >> (8 * size)).astype(args[0].dtype) if high else whole


def fma(a: Any, b: Any, c: Any, down: bool = False) -> Any:
    """Returns a * b + c, rounded once to float32: to the nearest, or down.

    The product is exact in float64. A sum that is not is made odd, so that rounding it again is
    rounding once (Boldo and Melquiond).
    """
    p, c = np.multiply(a, b, dtype=np.float64), np.float64(c)
    s = np.atleast_1d(p + c)
    part = s - p
    error = (p - (s - part)) + (c - part)
    bits = s.view(np.int64)
    inexact = np.isfinite(s) & (error != 0) & (bits & 1 == 0)
    odd = (bits + np.where(inexact, np.where((error > 0) == (s > 0), 1, -1), 0)).view(np.float64)
    rounded = odd.astype(np.float32)
    if down:
        rounded = np.where(rounded > odd, np.nextafter(rounded, np.float32(-np.inf)), rounded)
    return rounded


def _flushed(function: Function, *args: Any) -> Any:
    """Returns `function` of float32 numbers, tiny arguments and results as zeros of their sign."""
    flush = lambda x: np.where(np.abs(x) < _TINY, np.copysign(np.float32(0), x), x)  # noqa: E731
    return flush(function(*(flush(x) for x in args))).astype(np.float32)


def _lop3(a: Any, b: Any, c: Any, table: Any) -> Any:
    picks = (
        (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        for i in range(8)
        if int(table) >> i & 1
    )
    return np.bitwise_or.reduce(np.broadcast_arrays(*picks, a & 0))


def _prmt(a: Any, b: Any, selector: Any) -> Any:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = a & np.uint32(0)
    for i in range(4):
        pick = (selector >> np.uint32(4 * i)) & np.uint32(15)
        byte = (both >> (np.uint64(8) * (pick & np.uint32(7)).astype(np.uint64))) & np.uint64(255)
        sign = np.where(byte >= 128, np.uint64(255), np.uint64(0))
        byte = np.where(pick >= 8, sign, byte)
        result = result | byte.astype(np.uint32) << np.uint32(8 * i)
    return result


def _popc(a: Any) -> Any:
    return np.bitwise_count(a).astype(np.uint32)


def _divide(a: Any, b: Any) -> Any:
    """Returns the quotient of integers, rounded towards zero."""
    safe = np.where(b == 0, 1, b)
    return (np.sign(a) * np.sign(safe) * (np.abs(a) // np.abs(safe))).astype(a.dtype)


def _pairs(function: Function, dtype: Any, *args: Any) -> Any:
    """Returns `function` of pairs of 16-bit floats, each result rounded."""
    halves = [np.stack([a & np.uint32(0xFFFF), a >> np.uint32(16)]) for a in args]
    wide = (h.astype(np.uint16).view(dtype).astype(np.float32) for h in halves)
    low, high = function(*wide).astype(dtype).view(np.uint16).astype(np.uint32)
    return low | high << np.uint32(16)


def _exp2(a: Any) -> Any:
    return np.exp2(np.float64(a)).astype(np.float32)


def _unary64(function: Function) -> Function:
    return lambda a: function(np.float64(a)).astype(np.float32)


# By opcode without its type. `mul.wide` and others of several sizes are below.
_PLAIN: dict[str, Function] = {
    "add": np.add, "add.rn": np.add, "sub": np.subtract, "sub.rn": np.subtract,
    "mul": np.multiply, "mul.rn": np.multiply, "mul.lo": np.multiply,
    "mad.lo": lambda a, b, c: a * b + c, "div": _divide, "div.full": np.divide,
    "div.rn": np.divide, "rem": lambda a, b: (a - _divide(a, b) * b).astype(a.dtype),
    "mul.wide": partial(_wide, np.multiply, False), "mul.hi": partial(_wide, np.multiply, True),
    "fma.rn": fma, "fma.rm": partial(fma, down=True),
    "min": np.minimum, "max": np.maximum, "max.NaN": np.maximum, "min.NaN": np.minimum,
    "min.relu": lambda a, b: np.maximum(np.minimum(a, b), np.int32(0)),
    "abs": np.abs, "neg": np.negative, "not": np.invert, "and": operator.and_,
    "or": operator.or_, "xor": operator.xor, "shl": _shl, "shr": _shr, "lop3": _lop3,
    "prmt": _prmt, "popc": _popc, "ex2.approx.ftz": partial(_flushed, _exp2),
    "rcp.approx.ftz": partial(_flushed, lambda a: np.float32(1) / a), "ex2.approx": _exp2,
    "rcp.rn": lambda a: np.float32(1) / a, "sqrt.rn": np.sqrt,
    "lg2.approx.ftz": partial(_flushed, _unary64(np.log2)), "lg2.approx": _unary64(np.log2),
    "rsqrt.approx.ftz": partial(_flushed, lambda a: _unary64(lambda x: 1 / np.sqrt(x))(a)),
    "sqrt.approx.ftz": partial(_flushed, _unary64(np.sqrt)), "tanh.approx": _unary64(np.tanh),
    "sin.approx.ftz": _unary64(np.sin), "cos.approx.ftz": _unary64(np.cos),
    "sin.approx": _unary64(np.sin), "cos.approx": _unary64(np.cos),
}  # fmt: skip
_PAIRS = {"bf16x2": ml_dtypes.bfloat16, "f16x2": np.float16}
_COMPARISONS: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_ROUND: dict[str, Function] = {
    "rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil,
}  # fmt: skip
_SHIFTS = ("shl", "shr")


def function_of(op: str) -> tuple[Function, list[str]] | None:
    """Returns an instruction's function and the types of its operands; None of others.

    The types repeat the last one as often as there are operands.
    """
    stem, _, dtype = op.rpartition(".")
    if stem.startswith("setp."):
        return comparison(stem.removeprefix("setp."), DTYPE[dtype]), [dtype]
    if stem.startswith("cvt."):
        return _conversion(stem.split(".")[1:], dtype), [dtype]
    if dtype in _PAIRS and stem in _PLAIN:
        return partial(_pairs, _PLAIN[stem], _PAIRS[dtype]), [dtype]
    if stem not in _PLAIN or dtype not in DTYPE:
        return None
    if stem in ("min", "max") and dtype.startswith("f"):
        return {"min": np.fmin, "max": np.fmax}[stem], [dtype]
    if stem == "mad.lo":
        return _PLAIN[stem], [dtype]
    return _PLAIN[stem], [dtype, "u32"] if stem in _SHIFTS else [dtype]


def comparison(name: str, dtype: np.dtype) -> Function:
    """Returns a comparison by PTX's name, as `setp` makes it."""
    if name in ("nan", "num"):
        wanted = name == "nan"
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == wanted
    if name == "ne" and dtype.kind == "f":  # false of what is no number
        return lambda a, b: (a < b) | (a > b)
    if name in _COMPARISONS:
        return _COMPARISONS[name]
    if name == "equ":
        return lambda a, b: ~((a < b) | (a > b))
    if name == "neu":
        return np.not_equal
    opposite = {"ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}
    if name in opposite:  # true of what is no number
        ordered = _COMPARISONS[opposite[name]]
        return lambda a, b: ~ordered(a, b)
    raise PtxError(f"unknown comparison {name}")


def _conversion(modifiers: list[str], source: str) -> Function:
    *rounding, to = modifiers
    known = {"rn", "rna", "satfinite", "sat", "ftz", *_ROUND}
    if unknown := set(rounding) - known:
        raise PtxError(f"unknown conversion {'.'.join((*modifiers, source))}: {sorted(unknown)}")
    if re.fullmatch(r"(e4m3|e5m2|bf16|f16)x2", to) and source == "f32":
        return partial(_to_pair, to[:-2], "satfinite" in rounding)
    if to in ("bf16", "f16") and source == "f32":
        return lambda a: a.astype(_HALF[to]).view(np.uint16)
    if to == "f16x2" and source in ("e4m3x2", "e5m2x2"):
        return lambda a: _widen(a, _EIGHT[source[:-2]])
    if to == "f32" and source == "bf16":
        return lambda a: (a.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if to not in DTYPE or source not in DTYPE or "x2" in to + source or "bf16" in to + source:
        raise PtxError(f"unknown conversion from {source} to {to}")
    wanted, given = DTYPE[to], DTYPE[source]
    if given.kind == "f" and wanted.kind in "ui":
        (mode,) = (_ROUND[r] for r in rounding if r in _ROUND)
        limits = np.iinfo(wanted)
        return lambda a: np.clip(
            np.nan_to_num(mode(np.float64(a)), nan=0.0), limits.min, limits.max
        ).astype(wanted)
    if given.kind == wanted.kind == "f":
        modes = [_ROUND[r] for r in rounding if r in _ROUND]
        round_to = modes[0] if modes else lambda a: a
        if "sat" in rounding:
            return lambda a: np.clip(np.nan_to_num(round_to(a), nan=0.0), 0, 1).astype(wanted)
        return lambda a: round_to(a).astype(wanted)
    return lambda a: a.astype(wanted)


_HALF = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
_EIGHT = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def _to_pair(to: str, finite: bool, high: Any, low: Any) -> Any:
    dtype: Any = (_HALF | _EIGHT)[to]
    size, largest = np.dtype(dtype).itemsize, float(ml_dtypes.finfo(dtype).max)
    if (to in _EIGHT) != finite:
        raise PtxError(f"conversions to {to} are {'' if finite else 'not '}saturated")
    both = np.stack(np.broadcast_arrays(low, high))
    if finite:
        both = np.clip(both, -largest, largest)  # keeps NaNs
    narrow = both.astype(dtype).view(f"u{size}").astype(f"u{2 * size}")
    return narrow[0] | narrow[1] << narrow.dtype.type(8 * size)


def _widen(pair: Any, dtype: Any) -> Any:
    low, high = (x.astype(np.uint8).view(dtype).astype(np.float16) for x in (pair, pair >> 8))
    return _pack(low) | _pack(high) << np.uint32(16)


def _pack(half: Any) -> Any:
    return half.view(np.uint16).astype(np.uint32)
