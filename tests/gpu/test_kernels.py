"""Every dense kernel that dispatch can choose, and pair of policies, on memory with guards."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from support import bounds, cases, outcome, reference, trial
from support.policies import covering_specs, nested_specs, short_box_specs, stacked_specs

from jax_hopper_gemm.dispatch import H200, problem_violations, table_specs
from jax_hopper_gemm.gemm.spec import RasterOrder

ALONE = [s for s in dict.fromkeys((*covering_specs(), *table_specs(H200))) if not s.grouped]
ON_SEVERAL = table_specs(replace(H200, comm_overlap=True))
SPECS = list(dict.fromkeys((*ALONE, *(s for s in ON_SEVERAL if not s.grouped))))
FEW_SMS = 16  # so that a persistent grid wraps around on problems that are quickly checked
RANDOM_PROBLEMS = 320


def assert_exact(gpu, spec, problem, raster_order, num_sms, seed=0):
    """Runs the kernel on integers, whose product has one right answer, bit for bit."""
    assert problem_violations(problem) == []
    a, b = cases.integers(problem, seed)
    result = trial.run(gpu, problem, spec, raster_order, a, b, num_sms=num_sms)
    expected = reference.integer_product(a, b, result.dtype)
    wrong = np.argwhere(~(result == expected))  # a NaN is wrong, too
    assert wrong.size == 0, (
        f"{len(wrong)} of {result.size} elements differ, the first at {wrong[0]}: "
        f"{result[tuple(wrong[0])]} for {expected[tuple(wrong[0])]}; {problem}"
    )


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_kernel_is_exact_on_integers_and_writes_only_d(spec, gpu, checked):
    for seed, (problem, raster_order) in enumerate(cases.edge_problems(spec, FEW_SMS)):
        assert_exact(gpu, spec, problem, raster_order, FEW_SMS, seed)
    checked(spec)


@pytest.mark.parametrize("spec", stacked_specs(), ids=lambda spec: spec.name)
def test_kernel_reads_the_matrix_of_a_stack_that_the_gpu_names(spec, gpu, checked):
    for problem, raster_order in cases.stacked_problems(spec, FEW_SMS):
        assert problem_violations(problem) == []
        inputs = cases.integer_inputs(problem, 0)
        for index in (-5, 0, 1, problem.stack - 1, problem.stack + 7):
            given = replace(inputs, index=np.array([index], np.int32))
            (result,) = trial.run_all(gpu, problem, spec, raster_order, given, num_sms=FEW_SMS)
            nearest = np.clip([index], 0, problem.stack - 1)
            a = inputs.a[nearest] if spec.indexed == "a" else inputs.a
            b = inputs.b[0][nearest] if spec.indexed == "b" else inputs.b[0]
            expected = reference.integer_product(a, b, result.dtype)
            np.testing.assert_array_equal(result, expected, f"matrix {index} of {problem}")
    checked(spec)


def fill_shared_memory_with_nans(gpu, spec):
    """Runs the kernel on whole tiles of NaNs, so that no row of a stage holds numbers."""
    n = spec.d_tile_n * (1 if spec.graph.needs_whole_rows else 3)
    problem = cases.padded(spec, spec.tile_m * gpu.device.num_sms, n, spec.tile_k * spec.num_stages)
    inputs = cases.normal_inputs(problem, 0)
    nans = replace(
        inputs, a=np.full_like(inputs.a, np.nan), b=tuple(np.full_like(b, np.nan) for b in inputs.b)
    )
    trial.run_all(gpu, problem, spec, RasterOrder(), nans)


@pytest.mark.parametrize("spec", short_box_specs(), ids=lambda spec: spec.name)
def test_kernel_with_short_boxes_uses_no_row_that_it_does_not_load(spec, gpu, checked):
    fill_shared_memory_with_nans(gpu, spec)
    for seed, (problem, raster_order) in enumerate(
        (*cases.short_problems(spec), *cases.edge_problems(spec, FEW_SMS))
    ):
        outcome.check(gpu, spec, problem, raster_order, seed, FEW_SMS, repeats=3)
    checked(spec)


@pytest.mark.parametrize("spec", nested_specs(), ids=lambda spec: spec.name)
def test_kernel_finds_the_matrices_of_a_nested_batch(spec, gpu, checked):
    for seed, (problem, raster_order) in enumerate(cases.nested_problems(spec)):
        outcome.check(gpu, spec, problem, raster_order, seed, FEW_SMS, repeats=3)
    checked(spec)


@pytest.mark.parametrize("spec", covering_specs(), ids=lambda spec: spec.name)
def test_kernel_is_exact_on_a_full_gpu(spec, gpu):
    num_sms = gpu.device.num_sms
    for problem, raster_order in cases.edge_problems(spec, num_sms)[2:]:
        assert_exact(gpu, spec, problem, raster_order, num_sms)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_kernel_gives_the_same_bits_in_20_repeats(spec, gpu):
    problem, raster_order = cases.edge_problems(spec, FEW_SMS)[1]
    a, b = cases.normals(problem, 0)
    result = trial.run(gpu, problem, spec, raster_order, a, b, repeats=20)
    exact, magnitude = reference.product(a, b), reference.magnitude(a, b)
    bounds.assert_within_bound(
        result, exact, magnitude, problem.k, spec.name, operands=spec.a_dtype
    )


@pytest.mark.parametrize("seed", range(RANDOM_PROBLEMS))
def test_random_problem_is_within_the_derived_bound(seed, gpu):
    rng = random.Random(seed)
    spec = rng.choice(ALONE)
    problem, raster_order = cases.random_problem(rng, spec)
    assert problem_violations(problem) == []
    a, b = cases.normals(problem, seed)
    result = trial.run(gpu, problem, spec, raster_order, a, b)
    assert np.isfinite(result.astype(np.float32)).all(), "not every element was written"
    rows = cases.rows_to_check(problem)
    exact, magnitude = (f(a[:, rows], b) for f in (reference.product, reference.magnitude))
    what = f"{spec.name} on {problem} along {raster_order}"
    bounds.assert_within_bound(
        result[:, rows], exact, magnitude, problem.k, what, operands=spec.a_dtype
    )
