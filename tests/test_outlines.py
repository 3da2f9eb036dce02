"""The choice among outlines, in arrays, beside that among kernels, one by one."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from support import cases, policies
from support.covering import ALL
from support.dense_problems import random_problem
from support.grouped_problems import random_problem as random_grouped_problem

from jax_hopper_gemm.dispatch import H200, problem_violations
from jax_hopper_gemm.dispatch.candidates import considered_specs, filled_spec
from jax_hopper_gemm.dispatch.cost import expected_times, rough_estimate
from jax_hopper_gemm.dispatch.model import ROUNDING, best_kernel
from jax_hopper_gemm.dispatch.outlines import outlined
from jax_hopper_gemm.dispatch.several import (
    Several,
    divisor,
    each,
    each_where,
    least,
    most,
    where,
)
from jax_hopper_gemm.gemm.problem import GemmProblem, MatrixLayout

pytestmark = [pytest.mark.pure, pytest.mark.slow]
SETS = {
    "covering": policies.covering_specs, "epilogues": policies.epilogue_covering_specs,
    "loose": policies.loose_specs, "TF32": policies.tf32_specs,
    "weights": policies.converted_specs, "parts": policies.parts_specs,
    "8 bits": policies.eight_bit_specs, "blocks": policies.block_specs,
}  # fmt: skip
DEVICES = (H200, H200.limited_to(60))


def problems(kind: str) -> list[GemmProblem]:
    random = Random(kind)
    if kind == "dense":
        return [random_problem(random) for _ in range(160 if ALL else 40)]
    if kind == "grouped":
        return [random_grouped_problem(random) for _ in range(120 if ALL else 30)]
    specs = SETS[kind]()
    chosen = random.sample(specs, min(len(specs), 100 if ALL else 30))
    drawn = (cases.random_problem(random, spec)[0] for spec in chosen)
    return [problem for problem in drawn if not problem_violations(problem)]


@pytest.mark.parametrize("kind", ["dense", "grouped", *SETS])
def test_a_choice_is_that_among_all_kernels_and_no_outline_costs_more_than_its_kernel(kind: str):
    found = problems(kind)
    assert len(found) > 20
    for problem in found:
        for device in DEVICES:
            best, reasons = best_kernel(problem, device)
            expected, against = best_kernel(problem, device, considered_specs(problem))
            assert best == expected, problem
            assert best or reasons == against
        for problem_type, configs, kernels in outlined(problem):
            costs = np.broadcast_to(expected_times(problem, kernels, H200).ns, len(configs))
            for config, ns in zip(configs, costs, strict=True):
                if spec := filled_spec(config, problem_type):
                    cost = rough_estimate(problem, spec, H200).ns
                    assert ns * (1 - ROUNDING) <= cost, (problem, config)


def test_kernels_cost_the_same_one_by_one_and_at_once():
    for problem in problems("dense") + problems("grouped"):
        specs = [x for x in considered_specs(problem) if x.d_major == problem.d.major]
        if not specs:  # the lengths of its lines are for its transpose alone
            continue
        costs = np.broadcast_to(expected_times(problem, Several(specs), H200).ns, len(specs))
        alone = [rough_estimate(problem, spec, H200).ns for spec in specs]
        np.testing.assert_allclose(costs, alone, rtol=1e-12)


def test_products_of_which_arrays_cannot_count_the_tiles_are_chosen_for():
    extent, shared = 2**31 - 64, MatrixLayout("k", 2**31 - 64)
    problem = GemmProblem.dense(extent, extent, extent, extent)
    problem = replace(problem, a=shared, b=shared, d=MatrixLayout("n", extent, 8))
    best, reasons = best_kernel(problem, H200)
    assert (best, reasons) == best_kernel(problem, H200, considered_specs(problem))


def test_several_objects_have_arrays_of_what_differs():
    one, other = (GemmProblem.dense(m, 8, 8, a_major="m") for m in (16, 24))
    pair = Several([one, other, replace(one, k=32)])
    assert pair.n == 8 and pair.a.major == "m"
    assert pair.m.tolist() == [16, 24, 16] and pair.a.leading_stride.tolist() == [16, 24, 16]
    varied = pair.varied(m=5)
    assert varied.m == 5 and varied.k is pair.k and varied.b.leading_stride is pair.b.leading_stride
    assert pair.m.tolist() == [16, 24, 16]


def test_choices_are_made_for_numbers_and_for_arrays():
    a, b = np.array([1, 5]), np.array([4, 2])
    assert least(1, 4) == 1 and most(1, 4) == 4 and where(False, 1, 4) == 4
    assert least(a, b).tolist() == [1, 2] and most(a, 3).tolist() == [3, 5]
    assert where(a < b, a, 0).tolist() == [1, 0]
    assert each(divmod, 7, 2) == (3, 1)
    assert [x.tolist() for x in each(divmod, a, 2)] == [[0, 2], [1, 1]]
    assert divisor(12, 8) == 4 and divisor(np.array([12, 9]), 6).tolist() == [6, 3]


@pytest.mark.parametrize(
    "condition, expected",
    [
        ([True, False], [[0, 7], [1, 8]]),
        ([False, True], [[7, 2], [8, 1]]),
        ([False] * 2, [[7, 7], [8, 8]]),
    ],
)
def test_a_function_is_of_those_numbers_of_which_a_condition_holds(condition, expected):
    found = each_where(np.array(condition), divmod, np.array([1, 5]), 2, other=(7, 8))
    assert [x.tolist() for x in found] == expected
    alone = [
        each_where(x, divmod, y, 2, other=(7, 8)) for x, y in zip(condition, (1, 5), strict=True)
    ]
    assert [list(x) for x in zip(*alone, strict=True)] == expected
