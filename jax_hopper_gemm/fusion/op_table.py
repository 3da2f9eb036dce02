"""The table of elementwise operations that kernels compute, and the graph nodes of each.

An operation on bfloat16 or float16 is computed in float32 and rounded, as its jaxpr says. XLA may
keep more digits between two such operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..gemm.dtypes import DTYPES, EPILOGUE, QUANTIZED, RESULTS, names
from .flatten import Equation
from .graph_builder import Builder

NUMBERS, HELD = RESULTS, EPILOGUE  # dtypes of values that graphs hold
SUMS = names("sum")  # of accumulators that graphs hold as float32
STORED = NUMBERS + QUANTIZED  # of values that kernels store
NARROW = tuple(name for name in NUMBERS if DTYPES[name].digits < DTYPES["float32"].digits)

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")  # of two numbers; the result is a bool
_FLOAT16_SMALLEST = 2.0**-14  # normal number; reduce_precision makes zeros of what is smaller

Rule = Callable[..., int]


class Uncovered(Exception):
    """No kernel computes an operation; the message is its name."""


def covered(name: str) -> bool:
    """Whether kernels compute the operation of this name, at least on float32."""
    return name in _RULES


def apply(builder: Builder, equation: Equation, arguments: Sequence[int]) -> int:
    """Returns the value of an equation; raises Uncovered where no kernel computes it."""
    name, (out, *_) = equation.name, equation.outputs
    dtypes, dtype = [x.dtype.name for x in equation.inputs], out.dtype.name
    # Those that are stored alone, and accumulators that are integers, are only converted.
    held = {*HELD, *STORED, *SUMS} if name in _CONVERSIONS else set(HELD)
    if name not in _RULES or not {*dtypes, dtype} <= held:
        raise Uncovered(name)
    value = _RULES[name](builder, arguments, dtypes, dtype, equation.params)
    if dtype in NARROW and name not in _EXACT:
        return builder.node("convert", value, params=(dtype,))
    return value


def as_number(builder: Builder, predicate: int) -> int:
    """Returns 1 where a predicate is true, else 0."""
    return builder.node("select", predicate, builder.constant(1.0), builder.constant(0.0))


def _plain(
    op: str, b: Builder, args: Sequence[int], dtypes: Sequence[str], *_: Any, of_bools: bool = False
) -> int:
    if "bool" in dtypes and not of_bools:
        raise Uncovered(op)
    return b.node(op, *args)


def _equality(op: str, b: Builder, args: Sequence[int], dtypes: Sequence[str], *_: Any) -> int:
    if "bool" not in dtypes:
        return b.node(op, *args)
    differ = b.node("xor", *args)
    return b.node("not", differ) if op == "eq" else differ


def _convert(b: Builder, args: Sequence[int], dtypes: Sequence[str], dtype: str, *_: Any) -> int:
    (x,), (source,) = args, dtypes
    if source == dtype:
        return x
    if source == "bool":
        return as_number(b, x)
    if dtype == "bool":
        return b.node("ne", x, b.constant(0.0))
    if dtype in SUMS or (source in SUMS and dtype in QUANTIZED):  # integers wrap in JAX
        raise Uncovered("convert_element_type")
    return x if dtype == "float32" else b.node("convert", x, params=(dtype,))


def _reduce_precision(b: Builder, args: Sequence[int], _: Any, __: Any, params: Any) -> int:
    (x,) = args
    match params["exponent_bits"], params["mantissa_bits"]:
        case 8, 23:
            return x
        case 8, 7:
            return b.node("convert", x, params=("bfloat16",))
        case 5, 10:
            rounded = b.node("convert", x, params=("float16",))
            size = b.node("abs", rounded)
            small = b.node("lt", size, b.constant(_FLOAT16_SMALLEST))
            return b.node("select", small, b.node("mul", x, b.constant(0.0)), rounded)
    raise Uncovered("reduce_precision")


def _select(b: Builder, args: Sequence[int], dtypes: Sequence[str], dtype: str, *_: Any) -> int:
    if len(args) != 3 or dtypes[0] != "bool":
        raise Uncovered("select_n")
    predicate, on_false, on_true = args
    if dtype != "bool":
        return b.node("select", predicate, on_true, on_false)
    other = b.node("and", b.node("not", predicate), on_false)
    return b.node("or", b.node("and", predicate, on_true), other)


def _integer_pow(b: Builder, args: Sequence[int], _: Any, __: Any, params: Any) -> int:
    return b.node("integer_pow", *args, params=(int(params["y"]),))


def _round(b: Builder, args: Sequence[int], _: Any, __: Any, params: Any) -> int:
    (x,) = args
    if int(params["rounding_method"]) == 1:  # to even
        return b.node("round", x)
    size = b.node("abs", x)
    whole = b.node("floor", size)
    up = b.node("ge", b.node("sub", size, whole), b.constant(0.5))
    away = b.node("add", whole, as_number(b, up))
    return b.node("select", b.node("lt", x, b.constant(0.0)), b.node("neg", away), away)


def _one_minus_square(b: Builder, args: Sequence[int], *_: Any) -> int:
    (x,), one = args, b.constant(1.0)
    return b.node("mul", b.node("add", one, x), b.node("sub", one, x))


def _polynomial(b: Builder, args: Sequence[int], dtypes: Sequence[str], *_: Any) -> int:
    x, *coefficients = args  # of x**0 first
    value = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        value = b.node("add", coefficient, b.node("mul", x, value))
    return value


# Operations that are nodes of the same name.
_PLAIN = (
    "neg", "abs", "sign", "square", "floor", "ceil", "exp", "exp2", "expm1", "log", "log1p",
    "sqrt", "rsqrt", "tanh", "logistic", "erf", "erfc", "sin", "cos", "add", "sub", "mul", "div",
    "max", "min", "pow", "lt", "le", "gt", "ge", "is_finite",
)  # fmt: skip
SAME = ("copy", "stop_gradient", "pvary", "reshard")  # operations that change no number
_CONVERSIONS = ("convert_element_type", *SAME)
_RULES: dict[str, Rule] = {
    **{op: partial(_plain, op) for op in _PLAIN},
    **{op: partial(_plain, op, of_bools=True) for op in ("and", "or", "xor", "not")},
    **{op: partial(_equality, op) for op in ("eq", "ne")},
    **dict.fromkeys(SAME, lambda b, args, *_: args[0]),
    "add_any": partial(_plain, "add"),
    "convert_element_type": _convert,
    "as_float16": lambda b, args, *_: b.node("convert", *args, params=("float16",)),
    "reduce_precision": _reduce_precision,
    "select_n": _select,
    "clamp": lambda b, args, *_: b.node("min", b.node("max", args[1], args[0]), args[2]),
    "integer_pow": _integer_pow,
    "round": _round,
    "one_minus_square": _one_minus_square,
    "polynomial": _polynomial,
}
# Operations whose result on 16-bit floats is one, and a conversion, which rounds by itself.
_EXACT = {
    "neg", "abs", "sign", "floor", "ceil", "round", "max", "min", "clamp", "select_n",
    "convert_element_type", *SAME,
}  # fmt: skip
