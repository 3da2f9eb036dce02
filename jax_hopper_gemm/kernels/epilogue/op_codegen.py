"""Register code of an epilogue: a short function for each operation, and `Elements` of a graph.

Functions call a `machine`, the arithmetic units: `Gpu` here, NumPy's float32 in tests, which so
measure the error of this very code. Values are float32 or true-or-false; a Python float beside one
is a constant. `gemm/epilogue_arithmetic.py` chooses the form of each node's function and states its
error.

Semantics are those of `jax.lax`, NaN and infinities included. Subnormal arguments count; where a
form's error says so, a result under 2**-126 may come out as 0.
"""

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Float64

from ...gemm.dtypes import QUANTIZED
from ...gemm.epilogue_arithmetic import SIN_COS_LIMIT, arithmetic_of
from ...gemm.epilogue_graph import EpilogueGraph, Node
from . import quantize

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
HALF_PI = (1.5707963267948966, 6.123233995736766e-17)  # their sum has twice a float64's digits


class Gpu:
    """The GPU's instructions, by what they do. Approximate ones flush subnormal results to 0."""

    fma = staticmethod(cute.math.fma)
    absolute = staticmethod(cute.math.abs)
    floor = staticmethod(cute.math.floor)
    ceil = staticmethod(cute.math.ceil)
    to_even = staticmethod(cute.math.roundeven)
    where = staticmethod(cutlass.select_)
    with_sign_of = staticmethod(cute.math.copysign)
    constant = staticmethod(Float32)
    single = staticmethod(Float32)
    double = staticmethod(Float64)
    divide = staticmethod(partial(cute.math.div, full=True))
    maximum = staticmethod(partial(cute.arch.fmax, nan=True))
    minimum = staticmethod(partial(cute.arch.fmin, nan=True))
    exp2_approx = staticmethod(partial(cute.math.exp2, approx=True, ftz=True))
    log2_approx = staticmethod(partial(cute.math.log2, approx=True, ftz=True))
    reciprocal_approx = staticmethod(partial(cute.math.rcp, approx=True, ftz=True))
    tanh_approx = staticmethod(partial(cute.math.tanh, approx=True))
    sqrt_approx = staticmethod(partial(cute.math.sqrt, approx=True))
    rsqrt_approx = staticmethod(partial(cute.math.rsqrt, approx=True))

    def __getattr__(self, name):
        """Returns a function of libdevice: tanh, erf, ..."""
        return getattr(cute.math, name)

    def last_two_bits(self, x):
        """Returns two truth values of a float64 that holds an integer."""
        bits = cutlass.Int32(cutlass.Int64(x) & 3)
        return (bits & 1) != 0, (bits & 2) != 0

    def round_to(self, dtype, x):
        if dtype in QUANTIZED:
            return quantize.round_to(dtype, x)
        if dtype == "float16":
            # NOTE: in PTX of its own: else LLVM narrows the arithmetic beside it to float16, and
            # ptxas fuses that without the rounding.
            return cute.arch.inline_ptx(
                "{.reg .b16 half; cvt.rn.f16.f32 half, {$r0}; cvt.f32.f16 {$w0}, half;}",
                write_only_types=[Float32],
                read_only_args=[x],
            )
        # Converting a pair costs a fraction of converting a single number.
        return cute.arch.inline_ptx(
            "{.reg .b32 pair; cvt.rn.bf16x2.f32 pair, {$r0}, 0f00000000;"
            " and.b32 {$w0}, pair, 0xffff0000;}",
            write_only_types=[Float32],
            read_only_args=[x],
        )

    def negate(self, predicate):
        return predicate ^ Boolean(True)


def polynomial(m, x, *coefficients):
    """Returns coefficients[0] + coefficients[1] * x + ..."""
    *lower, value = map(m.constant, coefficients)
    for coefficient in reversed(lower):
        value = m.fma(value, x, coefficient)
    return value


def sign(m, x):
    return m.where((x == 0.0) | (x != x), x, m.with_sign_of(m.constant(1.0), x))


def fast_exp(m, x):
    return m.exp2_approx(x * LOG2_E)


def fast_expm1(m, x):
    near = x * polynomial(m, x, 0.99999976, 0.50000024, 0.16679688, 0.041666664)
    return m.where(m.absolute(x) < 0.125, near, fast_exp(m, x) - 1.0)


def fast_log1p(m, x):
    near = x * polynomial(m, x, 0.99999964, -0.49999928, 0.33411661, -0.25078362)
    return m.where(m.absolute(x) < 0.0625, near, m.log2_approx(x + 1.0) * LN_2)


def logistic(m, x, *shared, exp=None):
    exp = exp or m.exp
    if not shared:
        return m.reciprocal_approx(exp_of_negative(m, x, exp) + 1.0)
    # As logistic(-x) does, from exp(-|x|): the compiler computes their common parts once.
    small = exp_of_negative(m, m.absolute(x), exp)
    large = m.reciprocal_approx(small + 1.0)
    return m.where(x < 0.0, small * large, large)


def exp_of_negative(m, x, exp):
    return m.exp2_approx(x * -LOG2_E) if exp is fast_exp else exp(-x)


def fast_logistic(m, x, *shared):
    return logistic(m, x, *shared, exp=fast_exp)


def fast_tanh(m, x):
    square = x * x
    near = x * polynomial(m, square, 0.99999958, -0.33321911, 0.12841646)
    small = exp_of_negative(m, m.absolute(x * 2.0), fast_exp)
    far = (1.0 - small) * m.reciprocal_approx(small + 1.0)
    return m.where(m.absolute(x) < 0.25, near, m.with_sign_of(far, x))


def fast_erfc(m, x):
    """A polynomial of 1 / (1 + p |x|) times exp(-x * x): Hastings's form, fitted anew."""
    t = m.reciprocal_approx(m.fma(m.absolute(x), m.constant(0.44), m.constant(1.0)))
    scaled = t * polynomial(
        m, t, 0.24856095, 0.24257013, 0.26358446, 0.040733859, 0.35065061, -0.1461052
    )
    tail = scaled * m.exp2_approx(x * x * -LOG2_E)
    return m.where(x < 0.0, 2.0 - tail, tail)


def pow_integer(m, x, exponent):
    if exponent < 0:
        return m.divide(m.constant(1.0), pow_integer(m, x, -exponent))
    power = None
    while exponent:
        if exponent & 1:
            power = x if power is None else power * x
        exponent >>= 1
        if exponent:
            x = x * x
    return m.constant(1.0) if power is None else power


def divide(m, x, y, *reciprocal):
    return x * reciprocal[0] if reciprocal else m.divide(x, y)


def sin_or_cos(m, x, quarter_turns):
    """Returns sin(x + quarter_turns * pi / 2), reduced in float64 to an eighth of a turn."""
    wide = m.double(x)
    turns = m.to_even(wide * m.double(1 / HALF_PI[0]))
    angle = m.fma(turns, m.double(-HALF_PI[0]), wide)
    angle = m.fma(turns, m.double(-HALF_PI[1]), angle)
    # Beyond the limit no digit of the angle is left; 0 puts the sine in [-1, 1] at least.
    reduced = m.where(m.absolute(x) < SIN_COS_LIMIT, m.single(angle), x * 0.0)
    square = reduced * reduced
    cube = square * reduced
    sine = m.fma(cube, polynomial(m, square, -0.16666655, 8.3321561e-3, -1.9514632e-4), reduced)
    cosine = m.fma(
        square * square,
        polynomial(m, square, 0.041666646, -1.388731e-3, 2.4432413e-5),
        m.fma(square, m.constant(-0.5), m.constant(1.0)),
    )
    odd, half = m.last_two_bits(turns + m.double(float(quarter_turns)))
    value = m.where(odd, cosine, sine)
    return m.where(half, -value, value)


def _of_machine(name):
    return lambda m, *arguments: getattr(m, name)(*arguments)


def _of_python(function):
    return lambda m, *arguments: function(*arguments)


# The accurate form of each operation: function(machine, *arguments, *parameters of the node).
FUNCTIONS: dict[str, Callable] = {
    **{
        op: _of_machine(op)
        for op in ("constant", "floor", "ceil", "exp", "exp2", "expm1", "log", "log1p", "tanh",
                   "erf", "erfc", "pow")
    },
    "abs": _of_machine("absolute"), "round": _of_machine("to_even"), "not": _of_machine("negate"),
    "sqrt": _of_machine("sqrt_approx"), "rsqrt": _of_machine("rsqrt_approx"),
    "max": _of_machine("maximum"), "min": _of_machine("minimum"), "select": _of_machine("where"),
    **{op: _of_python(getattr(operator, op)) for op in ("neg", "add", "sub", "mul", "xor")},
    **{op: _of_python(getattr(operator, op)) for op in ("eq", "ne", "lt", "le", "gt", "ge")},
    "and": _of_python(operator.and_), "or": _of_python(operator.or_),
    "sign": sign, "logistic": logistic, "integer_pow": pow_integer, "div": divide,
    "square": lambda m, x: x * x,
    "sin": lambda m, x: sin_or_cos(m, x, 0),
    "cos": lambda m, x: sin_or_cos(m, x, 1),
    "convert": lambda m, x, dtype: m.round_to(dtype, x),
    "is_finite": lambda m, x: m.absolute(x) < math.inf,
}  # fmt: skip
# The fast forms, where only results in 16 bits depend on the operation.
FAST: dict[str, Callable] = {
    "exp": fast_exp,
    "exp2": lambda m, x: m.exp2_approx(x),
    "expm1": fast_expm1,
    "log1p": fast_log1p,
    "tanh": fast_tanh,
    "logistic": fast_logistic,
    "erfc": fast_erfc,
}
# The approximate forms, where bfloat16 results depend on the operation by factors alone.
APPROX: dict[str, Callable] = {"tanh": lambda m, x: m.tanh_approx(x)}

GPU = Gpu()


def evaluate(node: Node, form: str, arguments: Sequence[Any], machine: Any = GPU) -> Any:
    """Returns a node's value from its arguments', in a form of `epilogue_arithmetic.Form`."""
    table = {"accurate": FUNCTIONS, "fast": FAST, "approx": APPROX}[form]
    return table[node.op](machine, *arguments, *node.params)


class Elements:
    """The values of a graph at some elements of D that one thread holds.

    Everything is unrolled: a value that is computed twice here is computed twice on the GPU. So
    each is computed once for each element, row or column, or once in all, by the axes that it
    varies along.

    NOTE: an object serves code that runs under one condition: it keeps values, and one that was
    computed inside an `if` or a loop of the GPU's does not exist outside.

    Args:
      read: read(leaf, v): Float32 or Boolean value of an accumulator, an operand or a row's
        statistic (the number of its `row_sum` or `row_max` node) at the thread's v-th element.
      row_of, column_of: the row and the column of the v-th element: any keys that are equal
        where the row, or the column, is the same.
    """

    def __init__(self, graph: EpilogueGraph, read: Callable, row_of: Callable, column_of: Callable):
        self._arithmetic = arithmetic_of(graph)
        self._read = read
        whole, each = lambda v: None, lambda v: v
        self._keys = {"scalar": whole, "row": column_of, "column": row_of, "matrix": each}
        self._values: dict[tuple[int, Any], Any] = {}

    def value(self, number: int, v: Any) -> Any:
        """Returns the value that has `number` in the graph at the v-th element."""
        number = self._arithmetic.number(number)
        if self._key(number, v) not in self._values:
            for needed in self._arithmetic.order([number]):
                if self._key(needed, v) not in self._values:
                    self._values[self._key(needed, v)] = self._computed(needed, v)
        return self._values[self._key(number, v)]

    def _computed(self, number: int, v: Any) -> Any:
        node = self._arithmetic.node(number)
        if node is None or self._arithmetic.is_leaf(number):
            return self._read(number, v)
        arguments = [self._values[self._key(argument, v)] for argument in node.args]
        return evaluate(node, self._arithmetic.forms[number], arguments)

    def _key(self, number: int, v: Any) -> tuple[int, Any]:
        return number, self._keys[self._arithmetic.varies(number)](v)
