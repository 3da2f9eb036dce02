"""Every standard epilogue in every pair of policies, on memory with guards."""

from __future__ import annotations

import random

import pytest
from support import cases, graphs, outcome, trial
from support.policies import chosen_epilogue_specs, epilogue_covering_specs

from jax_hopper_gemm.dispatch import problem_violations
from jax_hopper_gemm.dispatch.legality import pairing_violations

SPECS = list(dict.fromkeys((*epilogue_covering_specs(), *chosen_epilogue_specs())))
EXACT = [spec for spec in SPECS if graphs.is_exact(spec.graph)]
FEW_SMS = 16  # so that a persistent grid wraps around on problems that are quickly checked
RANDOM_PROBLEMS = 200


def check(gpu, spec, problem, raster_order, seed, num_sms=None, exact=False, repeats=1):
    """Runs the kernel and checks all that it wrote, and that it wrote nothing else."""
    assert problem_violations(problem) + pairing_violations(problem, spec) == []
    make = cases.integer_inputs if exact else cases.normal_inputs
    inputs = make(problem, seed)
    results = trial.run_all(gpu, problem, spec, raster_order, inputs, repeats, num_sms)
    what = f"{spec.name} on {problem} along {raster_order}"
    if exact:
        outcome.assert_exact(results, outcome.exact(problem, spec, inputs), what)
    else:
        outcome.assert_within_bound(problem, spec, inputs, results, what)


@pytest.mark.parametrize("spec", EXACT, ids=lambda spec: spec.name)
def test_exact_epilogue_has_the_right_bits_and_writes_only_its_results(spec, gpu):
    for seed, (problem, raster_order) in enumerate(cases.edge_problems(spec, FEW_SMS)):
        check(gpu, spec, problem, raster_order, seed, FEW_SMS, exact=True)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_epilogue_is_within_the_bound_of_its_operations(spec, gpu, checked):
    for seed, (problem, raster_order) in enumerate(cases.edge_problems(spec, FEW_SMS)):
        check(gpu, spec, problem, raster_order, seed, FEW_SMS)
    checked(spec)


@pytest.mark.parametrize("spec", SPECS[::2], ids=lambda spec: spec.name)
def test_epilogue_is_right_on_a_full_gpu(spec, gpu):
    problem, raster_order = cases.edge_problems(spec, gpu.device.num_sms)[2]
    check(gpu, spec, problem, raster_order, 0, exact=graphs.is_exact(spec.graph))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_epilogue_gives_the_same_bits_in_20_repeats(spec, gpu):
    problem, raster_order = cases.edge_problems(spec, FEW_SMS)[1]
    check(gpu, spec, problem, raster_order, 0, repeats=20)


@pytest.mark.parametrize("seed", range(RANDOM_PROBLEMS))
def test_random_problem_with_an_epilogue_is_right(seed, gpu):
    rng = random.Random(seed)
    spec = rng.choice(SPECS)
    problem, raster_order = cases.random_problem(rng, spec, max_extent=1500)
    check(gpu, spec, problem, raster_order, seed)
