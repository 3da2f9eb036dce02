"""Graphs of epilogues: what is well formed, and what follows from one."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from support import epilogue_errors, graphs

from jax_hopper_gemm.gemm import epilogue_arithmetic
from jax_hopper_gemm.gemm.epilogue_checks import (
    IN_FLIGHT,
    epilogue_registers,
    graph_violations,
    variation,
)
from jax_hopper_gemm.gemm.epilogue_graph import (
    ARITY,
    MAX_TOP_K,
    EpilogueGraph,
    Node,
    Operand,
    Result,
)

D = Result("matrix", 0, "bfloat16")
PLAIN = EpilogueGraph(results=(D,))


def with_nodes(*nodes: Node, operands: tuple[Operand, ...] = ()) -> EpilogueGraph:
    return EpilogueGraph(operands=operands, nodes=nodes, results=(D,))


def with_results(*results: Result) -> EpilogueGraph:
    return EpilogueGraph(nodes=(Node("gt", (0, 0)),), results=results)


PLANE = Result("matrix", 0, "bfloat16", planes=2)


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (replace(PLAIN, accumulators=3), "3 accumulators"),
        (with_nodes(operands=(Operand("diagonal", "float32"),)), "operand 0 has kind 'diagonal'"),  # pyright: ignore[reportArgumentType]
        (with_nodes(operands=(Operand("row", "int8"),)), "operand 0 is int8"),
        (with_nodes(operands=(Operand("scalar", "bool"),)), "operand 0 is a bool scalar"),
        (with_nodes(Node("gamma", (0,))), "node 0 is 'gamma'"),
        (with_nodes(Node("add", (0,))), "node 0 gives add 1 arguments, not 2"),
        (with_nodes(Node("exp", (1,))), "node 0 (exp) reads a value that comes after it"),
        (with_nodes(Node("exp", (-1,))), "node 0 (exp) reads a value that comes after it"),
        (with_nodes(Node("select", (0, 0, 0))), "node 0 (select) takes numbers for truth values"),
        (with_nodes(Node("gt", (0, 0)), Node("exp", (1,))), "node 1 (exp) takes numbers"),
        (with_nodes(Node("and", (0, 0))), "node 0 (and) takes numbers"),
        (EpilogueGraph(), "no results"),
        (with_results(Result("max", 0), D), "the first result is not a matrix"),
        (with_results(replace(D, value=2)), "result 0 is value 2 of 2"),
        (with_results(replace(D, value=1)), "result 0 is a truth value"),
        (with_results(replace(D, dtype="bool")), "result 0 is bool"),
        (with_results(D, Result("top_k_values", 0, k=0)), "result 1 has k 0, not 1 to 32"),
        (with_results(D, Result("top_k_indices", 0, k=MAX_TOP_K + 1)), "result 1 has k 33"),
        (with_results(PLANE), "result 1 is not plane 1 of the array that result 0 begins"),
        (with_results(PLANE, D), "result 1 is not plane 1"),
        (with_results(D, replace(PLANE, plane=1)), "result 1 is plane 1 of an array that no"),
        (with_results(D, replace(PLANE, kind="max")), "result 1 is a max in 2 planes"),
        (with_results(replace(PLANE, planes=3)), "result 0 is a matrix in 3 planes"),
    ],
)  # fmt: skip
def test_each_violation_names_the_part(graph, reason):
    found = [*graph_violations(graph)]
    assert any(reason in violation for violation in found), found


@pytest.mark.parametrize("name", graphs.STANDARD)
def test_standard_graphs_are_well_formed_and_survive_json(name):
    graph = graphs.STANDARD[name]
    assert [*graph_violations(graph)] == []
    assert EpilogueGraph.from_dict(json.loads(json.dumps(asdict(graph)))) == graph


def test_standard_graphs_hold_every_kind_of_operand_and_result():
    found = list(graphs.STANDARD.values())
    assert {(o.kind, o.dtype) for g in found for o in g.operands} >= {
        ("scalar", "float32"), ("row", "bfloat16"), ("column", "float32"),
        ("matrix", "bfloat16"), ("matrix", "float32"), ("matrix", "bool"),
    }  # fmt: skip
    assert {r.kind for g in found for r in g.results} == {
        "matrix", "row_sum", "row_max", "row_sumexp", "column_sum", "max", "top_k_values",
        "top_k_indices",
    }  # fmt: skip
    assert any(r.planes == 2 for g in found for r in g.results)
    assert any(not g.matrices for g in found)
    assert {g.accumulators for g in found} == {1, 2}


def test_a_value_varies_as_what_it_is_computed_of():
    operands = tuple(Operand(kind, "float32") for kind in ("scalar", "row", "column"))
    nodes = (
        Node("add", (1, 2)), Node("add", (2, 3)), Node("mul", (0, 1)), Node("constant", (), (2.0,)),
        Node("row_max", (0,)), Node("sub", (8, 3)), Node("sub", (0, 9)),
    )  # fmt: skip
    graph = with_nodes(*nodes, operands=operands)
    neither, rows, columns, both = (False, False), (True, False), (False, True), (True, True)
    assert variation(graph) == [
        both, neither, columns, rows, columns, both, both, neither, rows, rows, both
    ]  # fmt: skip


def test_registers_count_what_is_alive_at_once():
    chain = with_nodes(*(Node("abs", (i,)) for i in range(9)))
    fan = with_nodes(
        *(Node("abs", (0,)) for _ in range(5)),
        *(Node("add", (1 if i == 0 else 5 + i, 2 + i)) for i in range(4)),
    )
    chain, fan = (replace(g, results=(replace(D, value=9),)) for g in (chain, fan))
    assert epilogue_registers(PLAIN, 32) == 0
    assert epilogue_registers(chain, 32) == 2 * IN_FLIGHT  # a value and the one it is computed of
    assert epilogue_registers(fan, 32) == 6 * IN_FLIGHT
    for name, graph in graphs.STANDARD.items():
        assert epilogue_registers(graph, 16) <= epilogue_registers(graph, 32), name


def test_every_operation_has_its_semantics_in_jax():
    from jax import lax

    ours = {"constant", "convert", "row_sum", "row_max", "log1p", "expm1"}
    for op in ARITY.keys() - ours - {"and", "or", "xor", "not"}:
        assert hasattr(lax, op), op
    for op in ("and", "or", "xor", "not"):
        assert hasattr(lax, f"bitwise_{op}")


def test_each_fast_form_has_an_error():
    assert epilogue_errors._FAST_ERRORS.keys() == epilogue_arithmetic.FAST
    assert epilogue_errors._APPROX_ERRORS.keys() == epilogue_arithmetic.APPROX
