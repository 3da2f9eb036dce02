"""The problems that kernels are tried on can run, and vary."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from support import cases, policies, random_operands, reference
from support.host_kernels import BY_NAME, EPILOGUE_SPECS

from jax_hopper_gemm.dispatch import problem_violations
from jax_hopper_gemm.dispatch.legality import pairing_violations
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.launch.plan import make_plan

pytestmark = pytest.mark.pure


def test_gate_and_up_are_found_in_one_array_and_in_two():
    spec = BY_NAME["planes"]
    offsets = {cases.padded(spec, m, 64, 64, 2).up_offset for m in range(16)}
    assert None in offsets and len(offsets) > 1
    for m in range(16):
        problem = cases.padded(spec, m + 1, 64, 64, 2)
        inputs = random_operands.integer_inputs(problem, 0)
        gate, up = inputs.b
        assert not np.array_equal(gate, up)
        for places in reference.input_places(problem)[1:]:
            first, *others = (set(place.view(np.arange(10**6)).ravel()) for place in places)
            assert not any(first & other for other in others)


def test_random_problems_can_run_and_vary():
    specs = policies.covering_specs()
    problems = []
    for seed in range(400):
        rng = random.Random(seed)
        problem, raster_order = cases.random_problem(rng, rng.choice(specs))
        assert problem_violations(problem) == [], problem
        assert max(problem.m, problem.n, problem.k) <= cases.MAX_EXTENT
        problems.append((problem, raster_order))
    assert sum(p.l > 1 for p, _ in problems) > 80
    assert sum(p.l > 1 and p.a.batch_stride == 0 for p, _ in problems) > 20
    assert sum(p.a.leading_stride > p.a.batch_stride > 0 for p, _ in problems) > 20
    assert sum(max(p.m, p.n, p.k) > 4000 for p, _ in problems) > 40
    assert {t.swizzle for _, t in problems} == set(range(1, 17))


def test_edge_problems_of_epilogues_can_run():
    for spec in EPILOGUE_SPECS[::3]:
        for problem, raster_order in [
            *cases.edge_problems(spec, 132),
            *(cases.random_problem(random.Random(seed), spec) for seed in range(8)),
        ]:
            assert problem_violations(problem) == [], spec.name
            assert pairing_violations(problem, spec) == [], spec.name
            assert make_plan(problem, spec, raster_order, 132).grid[0] > 0, spec.name


def test_edge_problems_can_run_and_cover_waves():
    for spec in policies.covering_specs()[::7]:
        for p, raster_order in cases.edge_problems(spec, 132):
            assert problem_violations(p) == [], spec.name
            assert max(p.m * p.n, p.m * p.k, p.n * p.k) < 1 << 25, spec.name
            assert make_plan(p, spec, raster_order, 132).grid[0] > 0, spec.name
        waves = [
            math.ceil(p.m / (spec.tile_m * spec.cluster_m))
            * math.ceil(p.n / (spec.tile_n * spec.cluster_n))
            / (132 // spec.cluster_size)
            for p, _ in cases.edge_problems(spec, 132)[2:]
        ]
        assert all(2 < wave < 4 for wave in waves), spec.name


def test_rows_to_check_hold_both_ends_within_the_budget():
    problem = GemmProblem.dense(9000, 9000, 9000)
    rows = cases.rows_to_check(problem)
    assert (rows[0], rows[-1]) == (0, 8999)
    assert len(rows) * 9000 * 9000 <= 1_000_000_000
    assert cases.rows_to_check(GemmProblem.dense(50, 50, 50)).tolist() == list(range(50))
