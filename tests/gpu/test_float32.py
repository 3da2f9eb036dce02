"""Kernels of float32 operands: split K, groups, long sums, and what users call, against float64.

`test_kernels.py` has their plain products.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from support import (
    bounds,
    cases,
    cutting,
    float32,
    graphs,
    grouped,
    outcome,
    random_operands,
    reference,
    tolerance,
    trial,
)
from support.float32 import NORMS, PROGRAMS
from support.policies import parts_specs, tf32_specs

from jax_hopper_gemm.gemm.raster import RasterOrder

ALL = (*parts_specs(), *tf32_specs())
GROUPED = [spec for spec in ALL if spec.grouped]
SPLIT = [spec for spec in ALL if spec.split_k]
FEW_SMS = 16  # so that a persistent grid wraps around on problems that are quickly checked


@pytest.mark.parametrize("spec", SPLIT, ids=lambda spec: spec.name)
def test_kernel_splits_k(spec, gpu, checked):
    for seed, (problem, raster_order) in enumerate(cases.split_problems(spec, 36)):
        if graphs.is_exact(spec.graph):
            outcome.check(gpu, spec, problem, raster_order, seed, exactly=True, num_sms=36)
        outcome.check(gpu, spec, problem, raster_order, seed, exactly=False, num_sms=36, repeats=3)
    checked(spec)


@pytest.mark.parametrize("spec", GROUPED, ids=lambda spec: spec.name)
def test_grouped_kernel_is_right_at_its_edges(spec, gpu, checked):
    for case in grouped.edge_cases(spec, FEW_SMS, exact=True):
        problem = replace(case.problem, bf16_terms=spec.bf16_terms)
        replace(case, problem=problem).run(gpu, FEW_SMS)
    checked(spec)


@pytest.mark.parametrize(
    ("spec", "problem"), float32.long_cases(), ids=lambda x: getattr(x, "name", "")
)
def test_a_long_sum_has_the_digits_of_its_terms(spec, problem, gpu, checked):
    problem = replace(problem, bf16_terms=spec.bf16_terms)
    inputs = random_operands.normal_inputs(problem, 0, 1.0)
    (result,) = trial.run_all(gpu, problem, spec, RasterOrder(), inputs, repeats=3)
    exact = reference.product(inputs.a, inputs.b[0])
    magnitude = reference.magnitude(inputs.a, inputs.b[0])
    bounds.assert_within_bound(
        result, exact, magnitude, problem.k, spec.name, bounds.summation_of(problem), "float32"
    )
    error = np.linalg.norm(result - exact) / np.linalg.norm(exact)
    print(f"{spec.name}: relative error in norm {error:.3e}")
    assert error <= NORMS[spec.bf16_terms]
    checked(spec)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_users_call_is_within_the_bound(name, checked):
    program = PROGRAMS[name]
    arguments = program.arguments()
    results = jax.tree.leaves(jax.jit(program.function)(*arguments))
    wide = [x.astype(np.float64) for x in arguments]
    summation = bounds.SUMMATIONS[program.terms]
    relative = tolerance.accumulation_error(program.depth, summation, "float32")
    exact = jax.tree.leaves(program.exact(*wide))
    magnitudes = jax.tree.leaves(program.exact(*map(np.abs, wide)))
    for result, right, magnitude in zip(results, exact, magnitudes, strict=True):
        bound = relative * magnitude + 2.0**-23 * np.abs(right)
        bounds.assert_within(np.asarray(result), right, bound, name)
        error = np.linalg.norm(result - right) / np.linalg.norm(right)
        assert error <= NORMS[program.terms], name
    for spec in program.specs():
        checked(spec)


@pytest.mark.parametrize("case", [*cutting.CASES, cutting.LARGE], ids=str)
def test_kernels_cut_float32_as_numpy_does(case, gpu, checked):
    case.check(gpu)
    checked(case.spec)


def test_special_values(gpu):
    spec, problem = next(case for case in float32.long_cases() if case[0].bf16_terms == 6)
    problem = replace(problem, bf16_terms=6)
    inputs = random_operands.normal_inputs(problem, 0, 1.0)
    inputs = replace(inputs, a=inputs.a.copy())
    inputs.a[0, 3, 5], inputs.a[0, 4, 6] = np.nan, np.inf
    inputs.a[0, 5] = np.float32(2.0**-100)
    (result,) = trial.run_all(gpu, problem, spec, RasterOrder(), inputs)
    assert np.isnan(result[0, 3:5]).all() and np.isfinite(np.delete(result[0], [3, 4], 0)).all()
    exact = reference.product(inputs.a, inputs.b[0])[0, 5]
    assert np.abs(result[0, 5] - exact).max() <= 1e-4 * np.abs(exact).max()
