"""What a problem says about its operands."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph, Node, Operand, Result
from jax_hopper_gemm.gemm.groups import GroupedAxis, Groups
from jax_hopper_gemm.gemm.problem import GemmProblem, MatrixLayout, Panel

pytestmark = pytest.mark.pure

GATED = EpilogueGraph(  # (gate * up + residual) * row, stored in two dtypes
    2,
    (Operand("matrix", "bfloat16"), Operand("row", "float32")),
    (Node("mul", (0, 1)), Node("add", (4, 2)), Node("mul", (5, 3))),
    (Result("matrix", 6, "float32"), Result("matrix", 6, "float32")),
)


def test_dense_strides_follow_the_majors():
    row = GemmProblem.dense(3, 5, 7, 2)
    assert row.a == MatrixLayout("k", leading_stride=7, batch_stride=21)
    assert row.b == MatrixLayout("n", leading_stride=5, batch_stride=35)
    column = GemmProblem.dense(3, 5, 7, 2, a_major="m", b_major="k")
    assert column.a == MatrixLayout("m", leading_stride=3, batch_stride=21)
    assert column.b == MatrixLayout("k", leading_stride=7, batch_stride=35)
    assert row.d == column.d == MatrixLayout("n", leading_stride=5, batch_stride=15)


def test_d_dtype_defaults_to_that_of_the_operands():
    assert GemmProblem.dense(8, 8, 8, dtype="float16").d_dtype == "float16"
    assert GemmProblem.dense(8, 8, 8, d_dtype="float32").d_dtype == "float32"


def test_flops_count_a_multiply_and_an_add_for_each_product():
    assert GemmProblem.dense(3, 5, 7, 2).flops == 2 * 2 * 3 * 5 * 7


@pytest.mark.parametrize(
    ("a_batch", "b_batch", "elements_in"),
    [(21, 35, 2 * 21 + 2 * 35), (0, 35, 21 + 2 * 35), (21, 0, 2 * 21 + 35), (0, 0, 21 + 35)],
)
def test_bytes_count_a_shared_operand_once(a_batch, b_batch, elements_in):
    problem = GemmProblem(
        3, 5, 7, 2, "bfloat16", "bfloat16", "float32",
        MatrixLayout("k", 7, a_batch), MatrixLayout("n", 5, b_batch), MatrixLayout("n", 5, 15),
    )  # fmt: skip
    assert problem.bytes == 2 * elements_in + 4 * (2 * 15)


def layout_of(fields: dict[str, Any]) -> MatrixLayout:
    given: Any = fields | {"outer_strides": tuple(fields["outer_strides"])}
    return MatrixLayout(**given)


@pytest.mark.parametrize("graph", [None, GATED])
@pytest.mark.parametrize("groups", [None, GroupedAxis("m", 5, Groups(6, 2, 1, 2), "a", 99)])
def test_the_fields_survive_json(graph, groups):
    problem = replace(
        GemmProblem.dense(3, 5, 7, 2, a_major="m", d_dtype="float32"), epilogue=graph,
        operands=() if graph is None else (MatrixLayout("n", 5, 15), MatrixLayout("n", 0, 5)),
        up_offset=None if graph is None else 70, groups=groups, outer=(1,),
    )  # fmt: skip
    problem = replace(problem, a=replace(problem.a, outer_strides=(5,)))
    problem = GemmProblem.side_by_side([problem, replace(problem, n=9)])
    fields = json.loads(json.dumps(asdict(problem)))
    fields |= {name: layout_of(fields[name]) for name in "abd"}
    fields["operands"] = tuple(map(layout_of, fields["operands"]))
    fields["outer"] = tuple(fields["outer"])
    panels = [x | {name: layout_of(x[name]) for name in "bd"} for x in fields["panels"]]
    panels = [x | {"operands": tuple(map(layout_of, x["operands"]))} for x in panels]
    fields["panels"] = tuple(Panel(**x) for x in panels)
    if groups is not None:
        fields["groups"]["rule"] = Groups(**fields["groups"]["rule"])
        fields["groups"] = GroupedAxis(**fields["groups"])
    fields["epilogue"] = fields["epilogue"] and EpilogueGraph.from_dict(fields["epilogue"])
    assert GemmProblem(**fields) == problem


def test_a_gated_product_reads_two_right_operands():
    plain = GemmProblem.dense(3, 5, 7, 2)
    gated = replace(plain, epilogue=GATED)
    assert gated.gated and not plain.gated
    assert gated.flops == 2 * plain.flops
    # The row of 5 elements is nothing beside the matrices.
    assert gated.bytes == 2 * (2 * 21 + 2 * 2 * 35) + 2 * 15 * (2 + 4 + 4)


def test_without_an_epilogue_the_accumulator_is_stored():
    graph = GemmProblem.dense(8, 8, 8, d_dtype="float32").graph
    assert graph == EpilogueGraph(results=(Result("matrix", 0, "float32"),))


def test_a_grouped_product_reads_and_writes_its_grouped_matrices_once():
    rows = GemmProblem.grouped("m", 100, 5, 7, 4, b_major="k", d_dtype="float32")
    assert (rows.a.major, rows.b.major) == ("k", "k")
    assert rows.flops == 2 * 100 * 5 * 7
    assert rows.bytes == 2 * (100 * 7 + 4 * 7 * 5) + 4 * 100 * 5
    contraction = GemmProblem.grouped("k", 3, 5, 100, 4)
    assert (contraction.a.major, contraction.b.major) == ("m", "n")
    assert contraction.flops == 2 * 3 * 5 * 100
    assert contraction.bytes == 2 * (3 * 100 + 100 * 5 + 4 * 3 * 5)
    gated = replace(rows, epilogue=GATED)
    assert gated.flops == 2 * rows.flops
    assert gated.bytes == 2 * (100 * 7 + 2 * 4 * 7 * 5) + 100 * 5 * (2 + 4 + 4)
