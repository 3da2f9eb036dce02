"""What a problem says about its operands."""

from __future__ import annotations

import json

import pytest

from jax_hopper_gemm.problem import GemmProblem, MatrixLayout


def test_dense_strides_follow_the_majors():
    row = GemmProblem.dense(3, 5, 7, 2)
    assert row.a == MatrixLayout("k", leading_stride=7, batch_stride=21)
    assert row.b == MatrixLayout("n", leading_stride=5, batch_stride=35)
    column = GemmProblem.dense(3, 5, 7, 2, a_major="m", b_major="k")
    assert column.a == MatrixLayout("m", leading_stride=3, batch_stride=21)
    assert column.b == MatrixLayout("k", leading_stride=7, batch_stride=35)
    assert row.d == column.d == MatrixLayout("n", leading_stride=5, batch_stride=15)


def test_d_dtype_defaults_to_that_of_the_operands():
    assert GemmProblem.dense(8, 8, 8, ab_dtype="float16").d_dtype == "float16"
    assert GemmProblem.dense(8, 8, 8, d_dtype="float32").d_dtype == "float32"


def test_flops_count_a_multiply_and_an_add_for_each_product():
    assert GemmProblem.dense(3, 5, 7, 2).flops == 2 * 2 * 3 * 5 * 7


@pytest.mark.parametrize(
    ("a_batch", "b_batch", "elements_in"),
    [(21, 35, 2 * 21 + 2 * 35), (0, 35, 21 + 2 * 35), (21, 0, 2 * 21 + 35), (0, 0, 21 + 35)],
)
def test_bytes_count_a_shared_operand_once(a_batch, b_batch, elements_in):
    problem = GemmProblem(
        3, 5, 7, 2, "bfloat16", "float32",
        MatrixLayout("k", 7, a_batch), MatrixLayout("n", 5, b_batch), MatrixLayout("n", 5, 15),
    )  # fmt: skip
    assert problem.bytes == 2 * elements_in + 4 * (2 * 15)


def test_to_dict_survives_json():
    problem = GemmProblem.dense(3, 5, 7, 2, a_major="m")
    fields = json.loads(json.dumps(problem.to_dict()))
    fields |= {name: MatrixLayout(**fields[name]) for name in "abd"}
    assert GemmProblem(**fields) == problem
