"""Kernels that store D along M, on memory with guards.

Each runs a problem that has D along M, and such a one's transpose: the same product as lowering
describes it, with A and B in the other order.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from support import cases, graphs, outcome, random_operands, trial
from support.policies import along_n, chosen_specs, transposed_specs

from jax_hopper_gemm.dispatch import problem_violations
from jax_hopper_gemm.dispatch.legality import pairing_violations

CHOSEN = [spec for spec in chosen_specs() if spec.d_major == "m"]
SPECS = list(dict.fromkeys((*transposed_specs(), *CHOSEN)))
FEW_SMS = 16  # so that a persistent grid wraps around on problems that are quickly checked
RANDOM_PROBLEMS = 200


def check(gpu, spec, problem, raster_order, seed, num_sms=FEW_SMS, repeats=1):
    """Runs the kernel and checks all that it wrote, and that it wrote nothing else."""
    assert problem_violations(problem) + pairing_violations(problem, spec) == []
    exact = graphs.is_exact(spec.graph)
    inputs = (random_operands.integer_inputs if exact else random_operands.normal_inputs)(
        problem, seed
    )
    if problem.indexed:
        inputs = replace(inputs, index=np.array([1], np.int32))
    results = trial.run_all(gpu, problem, spec, raster_order, inputs, repeats, num_sms)
    if problem.indexed:
        one = [inputs.a, inputs.b[0]]
        of = "ab".index(problem.indexed)
        one[of] = one[of][1:2]
        inputs = replace(inputs, a=one[0], b=(one[1],), index=None)
        problem = replace(problem, indexed=None, stack=1)
    what = f"{spec.name} on {problem} along {raster_order}"
    if exact:
        outcome.assert_exact(results, outcome.exact(problem, spec, inputs), what)
    else:
        outcome.assert_within_bound(problem, spec, inputs, results, what)


def problems_of(spec):
    if spec.nested:
        return cases.nested_problems(spec)
    if spec.indexed:
        return cases.stacked_problems(spec, FEW_SMS)
    short = cases.short_problems(spec) if spec.short_boxes else []
    split = cases.split_problems(spec, FEW_SMS)[1:3] if spec.split_k else []
    return [*cases.edge_problems(spec, FEW_SMS), *short, *split]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_kernel_that_stores_d_along_m_is_right_and_writes_only_results(spec, gpu, checked):
    for seed, (problem, raster_order) in enumerate(problems_of(spec)):
        sides = [problem, problem.transposed]
        asked = sides[seed % 2]
        check(gpu, spec, problem if problem_violations(asked) else asked, raster_order, seed)
    checked(spec)


@pytest.mark.parametrize("spec", SPECS[::4], ids=lambda spec: spec.name)
def test_kernel_that_stores_d_along_m_gives_the_same_bits_in_20_repeats(spec, gpu):
    problem, raster_order = problems_of(spec)[1]
    check(gpu, spec, problem, raster_order, 0, repeats=20)


TWINS = [(s, twin) for s in transposed_specs() if (twin := along_n(s))]


@pytest.mark.parametrize(("spec", "twin"), TWINS[::4], ids=lambda spec: spec.name)
def test_elements_have_the_bits_that_kernels_give_them_which_store_d_along_n(spec, twin, gpu):
    """A row's bits must not depend on which of them a number of rows makes the faster."""
    problem, raster_order = cases.edge_problems(spec, FEW_SMS)[1]
    other = problem.transposed
    inputs = random_operands.normal_inputs(problem, 0)
    kinds = (operand.kind for operand in problem.graph.operands)
    turned = replace(
        inputs,
        a=inputs.b[0].swapaxes(1, 2),
        b=(inputs.a.swapaxes(1, 2),),
        operands=tuple(
            x.swapaxes(1, 2) if kind == "matrix" else x
            for kind, x in zip(kinds, inputs.operands, strict=True)
        ),
    )
    here = trial.run_all(gpu, problem, spec, raster_order, inputs)
    there = trial.run_all(gpu, other, twin, raster_order, turned)
    for mine, theirs in zip(here, there, strict=True):
        bits = f"u{mine.itemsize}"
        np.testing.assert_array_equal(mine.swapaxes(1, 2).view(bits), theirs.view(bits))


@pytest.mark.parametrize("seed", range(RANDOM_PROBLEMS))
def test_random_problem_with_d_along_m_is_right(seed, gpu):
    rng = random.Random(seed)
    spec = rng.choice([s for s in SPECS if not (s.nested or s.indexed)])
    problem, raster_order = cases.random_problem(rng, spec, max_extent=3000)
    check(gpu, spec, problem, raster_order, seed, rng.choice((FEW_SMS, gpu.device.num_sms)))
