"""Which problems and kernels are legal, and which kernels are considered."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from jax_hopper_gemm.dispatch import problem_violations
from jax_hopper_gemm.dispatch.candidates import (
    MODEL_CONFIGS,
    OperandTypes,
    filled_spec,
    model_specs,
    tuner_specs,
)
from jax_hopper_gemm.dispatch.legality import pairing_violations
from jax_hopper_gemm.plan import TensorMap, make_plan
from jax_hopper_gemm.problem import GemmProblem, MatrixLayout
from jax_hopper_gemm.spec import SMEM_LIMIT, GemmSpec, Traversal, violations

TYPES = [
    OperandTypes(*fields)
    for fields in product(
        ("bfloat16", "float16"), ("bfloat16", "float16", "float32"), ("k", "m"), ("n", "k")
    )
]


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (GemmProblem.dense(64, 64, 4100), ["A", "8200 bytes", "pad K from 4100 to 4104"]),
        (GemmProblem.dense(64, 4100, 64), ["B", "8200 bytes", "pad N from 4100 to 4104"]),
        (GemmProblem.dense(9, 64, 64, a_major="m"), ["(K, M)", "18 bytes", "pad M from 9 to 16"]),
        (GemmProblem.dense(64, 64, 9, b_major="k"), ["(N, K)", "18 bytes", "pad K from 9 to 16"]),
        (GemmProblem.dense(64, 6, 64, b_major="k", d_dtype="float32"), ["D", "24 bytes", "to 8"]),
        (GemmProblem.dense(64, 64, 64, ab_dtype="float32"), ["A and B are float32: cast"]),
        (GemmProblem.dense(64, 64, 64, d_dtype="int32"), ["D is int32: ask for"]),
        (GemmProblem.dense(64, 0, 64), ["N is 0", "empty"]),
        (GemmProblem.dense(64, 64, 64, 0), ["L is 0", "empty"]),
        (GemmProblem.dense(2**31, 8, 8), ["M is 2147483648, over 2147483647"]),
        (GemmProblem.dense(64, 64, 64, a_major="n"), ["A has major 'n', not 'm' or 'k'"]),
    ],
)
def test_unaddressable_problems_say_what_came_and_the_way_out(problem, words):
    reasons = problem_violations(problem)
    assert reasons
    for word in words:
        assert any(word in reason for reason in reasons), reasons


def with_layout(
    operand: str, layout: MatrixLayout, *, m: int = 64, k: int = 64, batches: int = 2
) -> GemmProblem:
    problem = GemmProblem.dense(m, 64, k, batches)
    return replace(problem, **{operand: layout})


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (with_layout("a", MatrixLayout("k", 72, 0), k=65), "lines of K=65 are 130 bytes"),
        (with_layout("a", MatrixLayout("k", 68, 8192)), "136 bytes apart, not a multiple of 16"),
        (with_layout("b", MatrixLayout("n", 64, 4100)), "its matrices are 8200 bytes apart"),
        (with_layout("b", MatrixLayout("n", 2**39, 0)), "not under 2**40"),
        (with_layout("a", MatrixLayout("k", 0, 0)), "0 bytes apart: make a compact copy"),
        (with_layout("a", MatrixLayout("k", 64, -64)), "-128 bytes apart: make a compact copy"),
        (with_layout("d", MatrixLayout("n", 64, 0)), "overwrite each other"),
        (with_layout("d", MatrixLayout("n", 32, 4096)), "are 32 apart and overlap"),
    ],
)
def test_strides_that_tma_cannot_take_are_named(problem, words):
    (reason,) = problem_violations(problem)
    assert words in reason


@pytest.mark.parametrize(
    "problem",
    [
        GemmProblem.dense(64, 64, 64),
        with_layout("a", MatrixLayout("k", 3, 0), m=1, batches=1),  # its stride is never used
        with_layout("a", MatrixLayout("k", 72, 0)),
        with_layout("b", MatrixLayout("n", 64, 0)),
        with_layout("d", MatrixLayout("n", 72, 72 * 64)),
        with_layout("b", MatrixLayout("n", 64, 3), batches=1),
    ],
)
def test_strides_that_are_unused_or_padded_are_legal(problem):
    assert problem_violations(problem) == []


def test_pairing_names_each_field_that_differs():
    spec = GemmSpec("float16", "float16", "m", "n", 128, 128)
    reasons = pairing_violations(GemmProblem.dense(64, 64, 64), spec)
    assert [reason.split()[3] for reason in reasons] == ["ab_dtype", "d_dtype", "a_major"]


@pytest.mark.parametrize("types", TYPES, ids=str)
def test_every_model_configuration_becomes_a_legal_kernel(types):
    specs = [filled_spec(config, types) for config in MODEL_CONFIGS]
    assert None not in specs
    assert list(model_specs(types)) == specs, "none is dropped for its narrow rows"
    for spec in model_specs(types):
        assert violations(spec) == []


@pytest.mark.parametrize("types", TYPES[:4] + TYPES[-4:], ids=str)
def test_every_tuner_candidate_is_legal_and_fills_shared_memory(types):
    specs = tuner_specs(types)
    assert len(set(specs)) == len(specs)
    assert set(model_specs(types)) <= set(specs)
    for spec in specs:
        assert violations(spec) == []
        full = spec.smem_bytes + spec.stage_bytes > SMEM_LIMIT
        assert full or spec.num_stages == 12
        problem = GemmProblem.dense(
            512, 512, 512, a_major=types.a_major, b_major=types.b_major,
            ab_dtype=types.ab_dtype, d_dtype=types.d_dtype,
        )  # fmt: skip
        inputs = make_plan(problem, spec, Traversal(), 132).params[:2]
        narrow = [m.buffer for m in inputs if isinstance(m, TensorMap) and m.swizzle < 64]
        assert narrow == [] or (narrow == [1] and spec.tile_n == 16)
