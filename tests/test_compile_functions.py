"""Every operation of an epilogue becomes lean code, and that code is as exact as it claims.

The code of functions that are not libdevice's runs here on NumPy's float32 too, each approximate
instruction off by as much as the PTX ISA allows.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special
from support import bounds, epilogue
from support.activation_graphs import ACTIVATIONS, GRADIENTS, activation_graph, gradient_graph
from support.compiling import skip_without_compiler
from support.epilogue_errors import EXPONENT_LIMIT, ULP, error_of
from support.operations import OPERATIONS, Builder, operation_graph, parameters_of

from jax_hopper_gemm.gemm.epilogue_arithmetic import arithmetic_of
from jax_hopper_gemm.gemm.epilogue_graph import ARITY, Node

skip_without_compiler()

from support.elementwise_kernel import code_of  # noqa: E402

from jax_hopper_gemm.kernels.epilogue import op_codegen  # noqa: E402

pytestmark = pytest.mark.compile

# Approximate instructions of each operation where results are float32, 16-bit, bfloat16 factors;
# one number where the form is always the same.
MUFU = {
    "exp": (1, 1, 1), "exp2": (1, 1, 1), "expm1": (0, 1, 1), "log1p": (0, 1, 1),
    "tanh": (2, 2, 1), "logistic": (2, 2, 2), "erfc": (3, 2, 2), "erf": 1, "div": 1, "sqrt": 1,
    "rsqrt": 1, "pow": 1, "integer_pow": 1,
}  # fmt: skip
DTYPES = ("float32", "float16", "bfloat16")


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (op, dtype)
        for op in OPERATIONS
        for dtype in (DTYPES if op in op_codegen.FAST else DTYPES[:1])
    ],
)
def test_an_operation_compiles_to_lean_code(op, dtype):
    operands = min(2, max(0, ARITY[op] - 1))
    code = code_of(operation_graph(op, dtype, parameters_of(op), operands))
    wanted = MUFU.get(op, 0)
    assert code.mufu == (wanted if isinstance(wanted, int) else wanted[DTYPES.index(dtype)])
    assert code.local_accesses == code.calls == 0
    assert code.arithmetic <= (80 if op == "pow" else 46)


# (approximate instructions, other arithmetic) for one element, no more; with bfloat16 results.
COST = {
    "gelu_tanh": (2, 8), "gelu": (2, 16), "silu": (2, 3), "softplus": (2, 14), "mish": (3, 15),
    "elu": (1, 11), "hard_swish": (0, 5), "relu": (0, 1), "tanh": (1, 0), "exp": (1, 1),
}  # fmt: skip
GRADIENT_COST = {"gelu_tanh": (2, 21), "gelu": (2, 22), "silu": (2, 8)}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_costs_no_more_than(name):
    code = code_of(activation_graph(name, "bfloat16"))
    assert (code.mufu, code.local_accesses, code.calls) == (COST[name][0], 0, 0)
    assert code.arithmetic <= COST[name][1]


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_costs_no_more_than(name):
    code = code_of(gradient_graph(name, "bfloat16"))
    assert (code.mufu, code.local_accesses, code.calls) == (GRADIENT_COST[name][0], 0, 0)
    assert code.arithmetic <= GRADIENT_COST[name][1]


def test_equal_nodes_are_computed_once():
    b = Builder()
    found = 0
    for _ in range(3):
        found = b.add(found, b.exp(0))
    assert code_of(b.graph(found)).mufu == 1


class Emulated:
    """NumPy's float32 in place of the GPU; approximate instructions err by what they may."""

    def __init__(self, seed: int, exact: bool = False):
        self.exact = exact
        self.rng = np.random.default_rng(seed)
        library = {
            "exp": (np.exp, 2), "expm1": (np.expm1, 1), "log1p": (np.log1p, 1),
            "tanh": (np.tanh, 2), "erfc": (special.erfc, 4),
        }  # fmt: skip
        for name, (function, ulps) in library.items():
            setattr(self, name, self._library(function, ulps))

    def _off(self, exact: np.ndarray, relative: float, absolute: float = 0.0) -> np.ndarray:
        share = self.rng.choice((-1.0, 1.0, 0.3), exact.shape)
        with np.errstate(over="ignore", invalid="ignore"):
            if self.exact:  # infinities times 0 would be NaNs
                return exact.astype(np.float32)
            return (exact + share * (relative * np.abs(exact) + absolute)).astype(np.float32)

    def _library(self, function, ulps):
        return lambda x: self._off(function(x.astype(np.float64)), ulps * ULP)

    def constant(self, x):
        return np.float32(x)

    def fma(self, x, y, z):
        if x.dtype == np.float64:
            x, y, z = (np.asarray(part, np.longdouble) for part in (x, y, z))
            return (x * y + z).astype(np.float64)
        wide = np.asarray(x, np.float64) * np.asarray(y, np.float64) + np.asarray(z, np.float64)
        return wide.astype(np.float32)

    def exp2_approx(self, x):
        found = self._off(np.exp2(x.astype(np.float64)), 2.0**-22)
        return np.where(np.abs(found) < 2.0**-126, np.float32(0), found)

    def log2_approx(self, x):
        exact = np.log2(x.astype(np.float64))
        near = (x > 0.5) & (x < 2)
        return np.where(near, self._off(exact, 0, 2.0**-22), self._off(exact, 2.0**-22))

    def reciprocal_approx(self, x):
        return self._off(1 / x.astype(np.float64), ULP)

    def tanh_approx(self, x):
        return self._off(np.tanh(x.astype(np.float64)), 2.0**-11)

    def maximum(self, x, y):
        return np.maximum(x, y)

    def minimum(self, x, y):
        return np.minimum(x, y)

    def divide(self, x, y):
        return self._off(np.asarray(x, np.float64) / y, 2 * ULP)

    def absolute(self, x):
        return np.abs(x)

    def where(self, predicate, x, y):
        return np.where(predicate, x, y)

    def with_sign_of(self, magnitude, x):
        return np.copysign(magnitude, x)

    def to_even(self, x):
        return np.rint(x)

    def double(self, x):
        return np.float64(x)

    def single(self, x):
        return x.astype(np.float32)

    def last_two_bits(self, x):
        bits = x.astype(np.int64)
        return bits & 1 != 0, bits & 2 != 0


def probes(low: float, high: float) -> np.ndarray:
    """Returns float32 numbers of both signs: even over the range, and by magnitude near 0."""
    rng = np.random.default_rng(0)
    small = 10.0 ** rng.uniform(-30, 0, 100_000) * rng.choice((-1, 1), 100_000)
    found = np.concatenate([rng.uniform(low, high, 400_000), small]).astype(np.float32)
    return found[(found > low) & (found < high)]


# operation, form, parameters, exact function, range of arguments
CLAIMS = [
    ("exp", "fast", (), np.exp, (-103, 88)),
    ("exp2", "fast", (), np.exp2, (-148, 127.9)),
    ("expm1", "fast", (), np.expm1, (-103, 88)),
    ("log1p", "fast", (), np.log1p, (-0.99999, 1e4)),
    ("log1p", "fast", (), np.log1p, (-0.2, 0.2)),
    ("tanh", "fast", (), np.tanh, (-12, 12)),
    ("logistic", "fast", (), special.expit, (-100, 100)),
    ("logistic", "fast", ("shared",), special.expit, (-100, 100)),
    ("logistic", "accurate", (), special.expit, (-100, 100)),
    ("logistic", "accurate", ("shared",), special.expit, (-100, 100)),
    ("erfc", "fast", (), special.erfc, (-4, 9.5)),
    ("sin", "accurate", (), np.sin, (-3000, 3000)),
    ("cos", "accurate", (), np.cos, (-3000, 3000)),
    ("integer_pow", "accurate", (7,), lambda x: x**7, (-1e5, 1e5)),
    ("div", "accurate", (float(np.float32(1 / 6)),), lambda x: x / 6, (-1e5, 1e5)),
]


@pytest.mark.parametrize(
    ("op", "form", "params", "exact", "between"),
    CLAIMS,
    ids=[f"{c[0]}-{c[1]}{'-' + str(c[2][0]) if c[2] else ''}-{c[4][1]}" for c in CLAIMS],
)
def test_code_is_as_exact_as_it_claims(op, form, params, exact, between):
    x = probes(*between)
    node = Node(op, (0,), params)
    arguments = (x, np.float32(6)) if op == "div" else (x,)
    with np.errstate(all="ignore"):
        got = op_codegen.evaluate(node, form, arguments, Emulated(1)).astype(np.float64)
        expected = exact(x.astype(np.float64))
    error = error_of(node, form)
    relative = error.relative + error.per_argument * np.minimum(np.abs(x), EXPONENT_LIMIT)
    away = np.abs(got - expected)
    allowed = relative * np.abs(expected) + error.absolute
    at = int(np.argmax(away / allowed))
    assert away[at] <= allowed[at], (x[at], got[at], expected[at])
    assert got.dtype == np.float64
    assert away.max() > 0


@pytest.mark.parametrize(
    ("op", "given", "expected"),
    [
        ("exp", (-math.inf, math.inf, 200.0, -200.0), (0, math.inf, math.inf, 0)),
        ("expm1", (-math.inf, math.inf, 200.0, -200.0), (-1, math.inf, math.inf, -1)),
        ("log1p", (math.inf, -1.0), (math.inf, -math.inf)),
        ("tanh", (-math.inf, math.inf, 100.0, -100.0), (-1, 1, 1, -1)),
        ("logistic", (-math.inf, math.inf, 200.0, -200.0), (0, 1, 1, 0)),
        ("erfc", (-math.inf, math.inf, 30.0, -30.0), (2, 0, 0, 2)),
    ],
)
def test_fast_forms_know_their_limits(op, given, expected):
    machine = Emulated(0, exact=True)
    node = Node(op, (0,))
    with np.errstate(all="ignore"):
        got = op_codegen.evaluate(node, "fast", (np.array(given, np.float32),), machine)
        nan = op_codegen.evaluate(node, "fast", (np.array([math.nan], np.float32),), machine)
    np.testing.assert_array_equal(got, np.array(expected, np.float32))
    assert np.isnan(nan).all()


def test_sign_follows_lax():
    got = op_codegen.evaluate(
        Node("sign", (0,)),
        "accurate",
        (np.array([3, -0.5, 0, -0.0, math.nan], np.float32),),
        Emulated(0),
    )
    np.testing.assert_array_equal(got, np.array([1, -1, 0, -0.0, math.nan], np.float32))
    assert np.signbit(got[3])


GRAPHS = {
    f"{name}{suffix}-{dtype}": graph(name, dtype)
    for names, suffix, graph in (
        (ACTIVATIONS, "", activation_graph),
        (GRADIENTS, "_gradient", gradient_graph),
    )
    for name in names
    for dtype in DTYPES
}


@pytest.mark.parametrize("name", GRAPHS)
def test_an_epilogue_is_within_the_bounds_of_the_reference(name):
    graph, machine = GRAPHS[name], Emulated(3)
    arithmetic = arithmetic_of(graph)
    x = probes(-20, 20)[::5]
    values = {0: x, 1: np.roll(x, 1)} if graph.operands else {0: x}
    value = arithmetic.number(graph.results[0].value)
    ((expected, bound),) = epilogue.evaluate(
        graph, [x.reshape(1, 1, -1)], [values[i].reshape(1, 1, -1) for i in range(1, len(values))]
    )
    with np.errstate(all="ignore"):
        for number in arithmetic.order([value]):
            node = arithmetic.node(number)
            if node is not None:
                arguments = [values[argument] for argument in node.args]
                form = arithmetic.forms[number]
                values[number] = op_codegen.evaluate(node, form, arguments, machine)
        got = values[value].astype(jnp.dtype(graph.results[0].dtype)).reshape(1, 1, -1)
    bounds.assert_within(got, expected, bound, name)
