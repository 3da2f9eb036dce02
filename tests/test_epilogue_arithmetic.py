"""The form that each operation of an epilogue takes, and the errors that it claims."""

from __future__ import annotations

import numpy as np
import pytest
from support.activation_graphs import activation_graph
from support.epilogue import evaluate
from support.epilogue_errors import error_of
from support.operations import Builder, parameters_of

from jax_hopper_gemm.gemm.epilogue_arithmetic import arithmetic_of
from jax_hopper_gemm.gemm.epilogue_graph import ARITY, ROW_REDUCTIONS, EpilogueGraph, Node, Result

pytestmark = pytest.mark.pure


def as_product(x: np.ndarray) -> np.ndarray:
    return x.reshape(1, 1, -1)


def forms_of(graph: EpilogueGraph) -> dict[str, str]:
    """Returns the form of each operation that is evaluated."""
    arithmetic = arithmetic_of(graph)
    found = {value: arithmetic.node(value) for value in arithmetic.forms}
    return {node.op: arithmetic.forms[value] for value, node in found.items() if node}


def test_a_factor_takes_the_form_that_its_result_bears():
    for dtype, form in (("bfloat16", "approx"), ("float16", "fast"), ("float32", "accurate")):
        b = Builder(operands=1)
        assert forms_of(b.graph(b.mul(1, b.neg(b.tanh(0))), dtype=dtype))["tanh"] == form


def test_a_term_of_a_sum_takes_no_approximate_form():
    b = Builder(operands=1)
    assert forms_of(b.graph(b.add(1, b.tanh(0))))["tanh"] == "fast"


def test_the_widest_of_several_results_decides():
    b = Builder()
    e = b.exp(0)
    graph = EpilogueGraph(1, (), tuple(b.nodes), (Result("matrix", e, "bfloat16"),))
    assert forms_of(graph)["exp"] == "fast"
    also = Result("matrix", e, "float32")
    assert forms_of(EpilogueGraph(1, (), graph.nodes, (*graph.results, also)))["exp"] == "accurate"
    # A sum of what is stored need not know it better than the store does.
    summed = Result("column_sum", e)
    assert forms_of(EpilogueGraph(1, (), graph.nodes, (*graph.results, summed)))["exp"] == "fast"
    assert forms_of(EpilogueGraph(1, (), graph.nodes, (summed,)))["exp"] == "accurate"


def test_one_plus_tanh_does_not_cancel():
    graph = activation_graph("gelu_tanh", "bfloat16")
    assert set(forms_of(graph)) == {"constant", "mul", "add", "logistic", "integer_pow"}
    ((value, bound),) = evaluate(graph, [as_product(np.array([-4.0, -6.0, -8.0]))], [])
    assert np.all(bound < 2.0**-7 * np.abs(value))


def test_gradients_share_one_exponential_between_both_logistics():
    b = Builder()
    t = b.tanh(0)
    arithmetic = arithmetic_of(b.graph(b.mul(b.sub(1.0, t), b.add(1.0, t))))
    found = [arithmetic.node(value) for value in arithmetic.forms]
    logistics = [node for node in found if node and node.op == "logistic"]
    assert [node.params for node in logistics] == [("shared",)] * 2
    ((value, _),) = evaluate(arithmetic.graph, [as_product(np.array([0.3, -2.0]))], [])
    np.testing.assert_allclose(value[0, 0], 1 - np.tanh([0.3, -2.0]) ** 2, rtol=1e-13)


def test_the_derivative_of_tanh_keeps_its_digits_in_the_tail():
    for written in (
        lambda b, t: b.sub(1.0, b.square(t)),
        lambda b, t: b.sub(1.0, b.mul(t, t)),
        lambda b, t: b.sub(1.0, b.integer_pow(t, params=(2,))),
        lambda b, t: b.mul(b.add(1.0, t), b.sub(1.0, t)),
    ):
        b = Builder()
        graph = b.graph(written(b, b.tanh(0)), dtype="float32")
        ((value, bound),) = evaluate(graph, [as_product(np.array([12.0]))], [])
        np.testing.assert_allclose(value, 1 / np.cosh(12.0) ** 2, rtol=1e-12, err_msg=str(graph))
        assert bound < 1e-4 * value, graph


def test_equal_constants_are_one_but_for_the_sign_of_zero():
    b = Builder()
    graph = b.graph(b.add(b.div(1.0, 0.0), b.div(1.0, -0.0)), dtype="float32")
    ((value, _),) = evaluate(graph, [np.zeros((1, 1, 1))], [])
    assert np.isnan(value).all()


def test_every_operation_has_an_error_or_is_exact():
    exact = {"constant", "neg", "abs", "sign", "floor", "ceil", "round", "convert", "max", "min",
             "eq", "ne", "lt", "le", "gt", "ge", "is_finite", "and", "or", "xor", "not",
             "select"} | ROW_REDUCTIONS  # fmt: skip
    for op in ARITY:
        error = error_of(Node(op, (), parameters_of(op)), "accurate")
        assert (error.relative == 0) == (op in exact), op
