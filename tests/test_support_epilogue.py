"""The reference of epilogues is right, and its bounds are tight."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.activation_graphs import ACTIVATIONS, activation_graph
from support.bounds import assert_within
from support.epilogue import evaluate
from support.operations import OPERATIONS, Builder, operation_graph, parameters_of
from support.tolerance import farthest

from jax_hopper_gemm.gemm.dtypes import HALVES
from jax_hopper_gemm.gemm.epilogue_checks import graph_violations
from jax_hopper_gemm.gemm.epilogue_graph import ARITY, EpilogueGraph, Node, Operand, Result

pytestmark = pytest.mark.pure

SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, 1e-45, -1e-45, 1.2e-38, 3.4e38, -3.4e38,
     np.inf, -np.inf, np.nan, 88.0, 89.0, -87.0, -110.0, 6.5e4, 7e4],
    np.float32,
)  # fmt: skip


def numbers(count: int = 3000, seed: int = 0) -> np.ndarray:
    """Returns float32 numbers of all magnitudes, most of them moderate, and the special ones."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, count // 4, np.uint32).view(np.float32)
    bits = bits[np.isfinite(bits)]
    normal = rng.standard_normal(count // 2, np.float32)
    uniform = rng.uniform(-100, 100, count // 4).astype(np.float32)
    return np.concatenate((SPECIAL, bits, normal, uniform))


def as_product(x: np.ndarray) -> np.ndarray:
    return x.reshape(1, 1, -1).astype(np.float64)


def lax_of(op: str, params: tuple):
    """Returns the function of jax that an operation follows."""
    truth = {
        "and": jnp.logical_and, "or": jnp.logical_or, "xor": jnp.logical_xor,
        "not": jnp.logical_not,
    }  # fmt: skip
    if op in truth:
        return lambda *xs: jnp.where(truth[op](*(x > 0 for x in xs)), 1.0, 0.0)
    special = {
        "constant": lambda: jnp.float64(params[0]),
        "select": lambda x, y, z: jnp.where(x > 0, y, z),
        "integer_pow": lambda x: jax.lax.integer_pow(x, params[0]),
        "convert": lambda x: x.astype(jnp.float32).astype(params[0]).astype(x.dtype),
        "round": lambda x: jax.lax.round(x, jax.lax.RoundingMethod.TO_NEAREST_EVEN),
        "square": lambda x: x * x,
    }
    function = special.get(op) or getattr(jax.lax, op)
    if op in ("eq", "ne", "lt", "le", "gt", "ge", "is_finite"):
        return lambda *xs: jnp.where(function(*xs), 1.0, 0.0)
    return function


@pytest.mark.slow
def test_values_are_those_of_jax_in_float64():
    for op in OPERATIONS:
        assert_values_are_those_of_jax(op)


def assert_values_are_those_of_jax(op: str) -> None:
    params, count = parameters_of(op), ARITY[op]
    graph = operation_graph(op, "float32", params, operands=min(2, max(0, count - 1)))
    assert [*graph_violations(graph)] == [], op
    x = numbers()
    others = [np.resize(numbers(seed=seed), x.size) for seed in (1, 2)][: len(graph.operands)]
    if op == "pow":  # whole exponents, of negative bases too
        others = [np.where(np.arange(x.size) % 2, np.rint(others[0] / 10), others[0])]
    operands = [x, *others]
    arguments = [operands[i] if i < len(operands) else x for i in range(count)]
    if op == "select":
        arguments = [x, *others]
    ((value, bound),) = evaluate(graph, [as_product(x)], [as_product(y) for y in others])
    with jax.enable_x64(True), np.errstate(all="ignore"):
        wide = [jnp.asarray(a, jnp.float64) for a in arguments]
        expected = np.broadcast_to(np.asarray(lax_of(op, params)(*wide)), x.shape)
        expected = np.where(np.abs(expected) > 3.4028236e38, np.sign(expected) * np.inf, expected)
    if op in ("sin", "cos"):
        keep = np.abs(x) < 2.0**30  # where jax's own float64 is right
    else:
        keep = np.ones(x.shape, bool)
    np.testing.assert_allclose(value[0, 0][keep], expected[keep], 1e-12, 2.0**-126, err_msg=op)
    assert not np.isnan(bound[0, 0][~np.isnan(expected)]).any(), op


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_exact_value_rounded_is_within_its_bound(dtype):
    x = numbers()
    for op in OPERATIONS:
        graph = operation_graph(op, dtype, parameters_of(op))
        ((value, bound),) = evaluate(graph, [as_product(x)], [])
        with np.errstate(over="ignore", invalid="ignore"):
            assert_within(value.astype(np.float32).astype(jnp.dtype(dtype)), value, bound, op)


def test_rewriting_keeps_an_activation_what_it_is():
    x = np.random.default_rng(0).uniform(-30, 30, 20_000).astype(np.float32).astype(np.float64)
    for name, (_, exact) in ACTIVATIONS.items():
        ((value, _),) = evaluate(activation_graph(name, "float32"), [as_product(x)], [])
        # 1 + tanh(u), as written, cancels: half a unit of float64 at 1, times x.
        np.testing.assert_allclose(value[0, 0], exact(x), rtol=1e-13, atol=1e-14, err_msg=name)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_result_two_ulp_off_is_out_of_bounds(dtype):
    """All but where a bound must be wide: near an overflow, or next to the smallest numbers."""
    x = np.random.default_rng(1).uniform(-6, 6, 20_000)
    x = x.astype(jnp.dtype(dtype)).astype(np.float64)
    for name in ("gelu", "gelu_tanh", "silu", "tanh", "exp"):
        ((value, bound),) = evaluate(activation_graph(name, dtype), [as_product(x)], [])
        right = value.astype(np.float32).astype(jnp.dtype(dtype))
        usual = np.abs(value) > 100 * float(jnp.finfo(dtype).smallest_normal)
        assert usual.mean() > 0.7, name
        assert_within(right, value, bound, name)
        for away in (-2, 2):
            wrong = (right.view(np.int16) + np.int16(away)).view(jnp.dtype(dtype))
            error = np.abs(wrong.astype(np.float64) - value)
            caught = (error > bound)[usual]
            assert caught.all(), f"{name}: {(~caught).sum()} of {caught.size} pass"


def test_an_accumulator_error_reaches_the_bound():
    b = Builder()
    graph = b.graph(b.exp(b.mul(3.0, 0)), dtype="float32")
    x = as_product(np.linspace(-1, 1, 50, dtype=np.float32))
    ((value, bound),) = evaluate(graph, [x], [], 1e-3)
    assert np.all(bound > value * 2.9e-3)
    assert np.all(bound < value * 3.2e-3)


def test_a_comparison_that_could_go_either_way_allows_both_branches():
    b = Builder()
    graph = b.graph(b.select(b.gt(0, 1.0), 5.0, -5.0), dtype="float32")
    x = as_product(np.array([0.5, 0.9999, 1.0001, 1.5]))
    ((value, bound),) = evaluate(graph, [x], [], 1e-3)
    np.testing.assert_array_equal(value[0, 0], [-5, -5, 5, 5])
    np.testing.assert_array_equal(bound[0, 0], [0, 10, 10, 0])


def test_nan_must_be_nan_and_nothing_else_may():
    graph = operation_graph("log", "float32")
    ((value, bound),) = evaluate(graph, [as_product(np.array([-1.0, 2.0]))], [])
    right = value.astype(np.float32)
    assert farthest(right, value, bound).ratio <= 1
    for i, other in ((0, 0.0), (1, np.nan)):
        wrong = right.copy()
        wrong[0, 0, i] = other
        assert farthest(wrong, value, bound).ratio == np.inf


def test_an_infinity_must_be_met():
    graph = operation_graph("exp", "bfloat16")
    ((value, bound),) = evaluate(graph, [as_product(np.array([200.0, -200.0]))], [])
    assert farthest(np.array([[[np.inf, 0.0]]]), value, bound).ratio <= 1
    assert farthest(np.array([[[3e38, 0.0]]]), value, bound).ratio == np.inf


def test_reductions_follow_numpy_and_bound_their_sums():
    kinds = ("row_sum", "row_max", "column_sum", "max", "row_sumexp")
    results = [Result(kind, 1) for kind in kinds]
    graph = EpilogueGraph(1, (), (Node("neg", (0,)),), tuple(results))
    x = np.random.default_rng(2).standard_normal((2, 70, 50)).astype(np.float32)
    y = -x.astype(np.float64)
    row_sum, row_max, column_sum, largest, top, sumexp = evaluate(graph, [x.astype("f8")], [])
    np.testing.assert_allclose(row_sum[0], y.sum(2), rtol=1e-13)
    np.testing.assert_allclose(column_sum[0], y.sum(1), rtol=1e-13)
    np.testing.assert_array_equal(row_max[0], y.max(2))
    np.testing.assert_array_equal(top[0], y.max(2))
    assert largest[0] == y.max()
    np.testing.assert_allclose(sumexp[0], np.exp(y - y.max(2, keepdims=True)).sum(2), rtol=1e-13)
    # What NumPy adds up in float32 is within the bounds; half a percent more is not.
    assert_within((-x).sum(2), *row_sum)
    assert_within((-x).sum(1), *column_sum)
    ours = np.exp(-x - (-x).max(2, keepdims=True)).sum(2)
    assert_within(ours, *sumexp)
    assert farthest(ours * np.float32(1.005), *sumexp).ratio > 1
    assert np.all(row_max[1] == 0)


def test_a_softmax_over_rows_adds_up_to_one():
    b = Builder()
    exps = b.exp(b.sub(0, b.row_max(0)))
    graph = b.graph(b.div(exps, b.row_sum(exps)), dtype="float32")
    x = np.random.default_rng(3).standard_normal((1, 5, 64)) * 4
    ((value, bound),) = evaluate(graph, [x], [])
    np.testing.assert_allclose(value.sum(2), 1, rtol=1e-12)
    assert np.all(bound < 1e-4 * value)
    assert_within(np.asarray(jax.nn.softmax(x.astype("f4"), axis=-1)), value, bound + 1e-7)


def test_top_k_leaves_open_which_of_two_near_equals_comes_first():
    graph = EpilogueGraph(
        1, (), (), (Result("top_k_values", 0, k=3), Result("top_k_indices", 0, "int32", k=3))
    )
    x = np.array([[[1.0, 4.0, 3.0, 3.0000001, -2.0]]])
    (values, values_bound), (indices, indices_bound) = evaluate(graph, [x], [], 1e-6)
    np.testing.assert_array_equal(values[0, 0], [4.0, 3.0000001, 3.0])
    assert np.all((values_bound > 0) & (values_bound < 1.3e-6))
    np.testing.assert_array_equal(indices[0, 0], [1, 3, 2])
    np.testing.assert_array_equal(indices_bound[0, 0], [0, np.inf, np.inf])


def test_operands_broadcast_by_their_shapes():
    operands = tuple(Operand(kind, "float32") for kind in ("scalar", "row", "column"))
    nodes = (Node("mul", (0, 1)), Node("add", (4, 2)), Node("add", (5, 3)))
    graph = EpilogueGraph(1, operands, nodes, (Result("matrix", 6),))
    x = np.arange(24.0).reshape(2, 3, 4)
    row, column = np.arange(4.0).reshape(1, 1, 4), np.arange(6.0).reshape(2, 3, 1)
    ((value, _),) = evaluate(graph, [x], [np.full((1, 1, 1), 2.0), row, column])
    np.testing.assert_array_equal(value, 2 * x + row + column)
