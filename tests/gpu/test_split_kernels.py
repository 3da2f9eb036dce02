"""Kernels whose clusters share the k-tiles of a tile, on memory with guards.

Workspaces are poisoned like results: a partial sum that is read but was not written is a NaN.
"""

from __future__ import annotations

import random

import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, outcome, random_operands, trial
from support.direct import WORKSPACE_GUARD, prepare
from support.places import result_places
from support.policies import chosen_specs, split_specs
from support.reference import input_places

CHOSEN = [spec for spec in chosen_specs() if spec.split_k]
SPECS = list(dict.fromkeys((*split_specs(), *CHOSEN)))
FEW_SMS = 36  # so that a persistent grid wraps around on problems that are quickly checked
RANDOM_PROBLEMS = 400


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_parts_of_tiles_add_up_and_only_results_are_written(spec, gpu, checked):
    problems = cases.split_problems(spec, FEW_SMS) + cases.edge_problems(spec, FEW_SMS)
    for seed, (problem, raster_order) in enumerate(problems):
        outcome.check(gpu, spec, problem, raster_order, seed, FEW_SMS)
    checked(spec)


@pytest.mark.parametrize("spec", SPECS[::2], ids=lambda spec: spec.name)
def test_parts_of_tiles_add_up_on_a_full_gpu(spec, gpu):
    for problem, raster_order in cases.split_problems(spec, gpu.device.num_sms)[:2]:
        outcome.check(gpu, spec, problem, raster_order, 0)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_split_kernel_gives_the_same_bits_in_20_repeats(spec, gpu):
    for problem, raster_order in cases.split_problems(spec, FEW_SMS)[1:]:
        inputs = random_operands.normal_inputs(problem, 0)
        results = trial.run_all(gpu, problem, spec, raster_order, inputs, 20, FEW_SMS)
        outcome.assert_within_bound(problem, spec, inputs, results, spec.name)


@pytest.mark.parametrize("spec", [s for s in SPECS if not s.epilogue][::4], ids=lambda s: s.name)
def test_a_launch_frees_its_flags_and_so_the_next_one_waits_for_its_own_sums(spec, gpu):
    """A replay of a CUDA graph may find the workspaces as the one before it has left them."""
    problem, raster_order = cases.split_problems(spec, FEW_SMS)[1]
    (place,) = result_places(problem, spec)
    sizes = [max(p.end for p in places) for places in input_places(problem)]
    zeros = [gpu.upload(np.zeros(size, jnp.dtype(spec.a_dtype))) for size in sizes]
    d = gpu.allocate(place.end * jnp.dtype(place.dtype).itemsize)
    launch = prepare(gpu, problem, spec, raster_order, [*zeros, d], FEW_SMS)
    partials, flags = launch.workspaces
    flags.fill(trial.POISON)
    for _ in range(3):
        partials.fill(trial.POISON)
        d.fill(trial.POISON)
        launch()
        gpu.synchronize()
        assert (place.view(d.download(place.dtype)) == 0).all(), "a poisoned sum was added"
        left = set(flags.download("int32").view("int64")[: -WORKSPACE_GUARD // 8].tolist())
        assert left <= {0, -1} and 0 in left, left


@pytest.mark.parametrize("seed", range(RANDOM_PROBLEMS))
def test_random_problem_with_shared_tiles_is_right(seed, gpu):
    rng = random.Random(seed)
    spec = rng.choice(SPECS)
    problem, raster_order = cases.random_problem(rng, spec, max_extent=3000)
    outcome.check(gpu, spec, problem, raster_order, seed, rng.choice((FEW_SMS, gpu.device.num_sms)))
