"""Every standard epilogue in every pair of policies, on memory with guards."""

from __future__ import annotations

import random

import pytest
from support import cases, graphs, outcome
from support.policies import chosen_epilogue_specs, epilogue_covering_specs

SPECS = list(dict.fromkeys((*epilogue_covering_specs(), *chosen_epilogue_specs())))
EXACT = [spec for spec in SPECS if graphs.is_exact(spec.graph)]
FEW_SMS = 16  # so that a persistent grid wraps around on problems that are quickly checked
RANDOM_PROBLEMS = 200


@pytest.mark.parametrize("spec", EXACT, ids=lambda spec: spec.name)
def test_exact_epilogue_has_the_right_bits_and_writes_only_its_results(spec, gpu):
    for seed, (problem, raster_order) in enumerate(cases.edge_problems(spec, FEW_SMS)):
        outcome.check(gpu, spec, problem, raster_order, seed, FEW_SMS, exactly=True)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_epilogue_is_within_the_bound_of_its_operations(spec, gpu, checked):
    for seed, (problem, raster_order) in enumerate(cases.edge_problems(spec, FEW_SMS)):
        outcome.check(gpu, spec, problem, raster_order, seed, FEW_SMS, exactly=False)
    checked(spec)


@pytest.mark.parametrize("spec", SPECS[::2], ids=lambda spec: spec.name)
def test_epilogue_is_right_on_a_full_gpu(spec, gpu):
    problem, raster_order = cases.edge_problems(spec, gpu.device.num_sms)[2]
    outcome.check(gpu, spec, problem, raster_order, 0)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_epilogue_gives_the_same_bits_in_20_repeats(spec, gpu):
    problem, raster_order = cases.edge_problems(spec, FEW_SMS)[1]
    outcome.check(gpu, spec, problem, raster_order, 0, repeats=20, exactly=False)


@pytest.mark.parametrize("seed", range(RANDOM_PROBLEMS))
def test_random_problem_with_an_epilogue_is_right(seed, gpu):
    rng = random.Random(seed)
    spec = rng.choice(SPECS)
    problem, raster_order = cases.random_problem(rng, spec, max_extent=1500)
    outcome.check(gpu, spec, problem, raster_order, seed, exactly=False)
