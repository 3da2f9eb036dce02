"""Kernels of 8-bit operands: block scales, variants, groups, casts, and what users call.

`test_kernels.py` has their plain products.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import (
    bounds,
    cases,
    eight_bit,
    grouped,
    grouped_results,
    operations,
    outcome,
    random_operands,
    reference,
    tolerance,
    trial,
)
from support.casts import cast, same
from support.eight_bit import LONG_K, PROGRAMS
from support.policies import block_specs, eight_bit_specs, eight_bit_variants

from jax_hopper_gemm.dispatch import problem_violations
from jax_hopper_gemm.dispatch.legality import pairing_violations
from jax_hopper_gemm.gemm.dtypes import QUANTIZED
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.raster import RasterOrder

SPECS = list(dict.fromkeys((*eight_bit_specs(), *block_specs(), *eight_bit.chosen_specs())))
GROUPED = [spec for spec in SPECS if spec.grouped and not spec.a_block]
BLOCKS = [spec for spec in SPECS if spec.a_block and not spec.grouped]
GROUPED_BLOCKS = [spec for spec in SPECS if spec.a_block and spec.grouped]
BARE = (*block_specs(), *eight_bit.chosen_specs())
PROMOTED = [spec for spec in dict.fromkeys(BARE) if not (spec.a_block or spec.grouped)]
VARIANTS = eight_bit_variants()
FEW_SMS = 16  # so that a persistent grid wraps around on problems that are quickly checked


@pytest.mark.parametrize("spec", GROUPED, ids=lambda spec: spec.name)
def test_grouped_kernel_is_right_at_its_edges(spec, gpu, checked):
    for case in grouped.edge_cases(spec, FEW_SMS, exact=True):
        case.run(gpu, FEW_SMS)
    checked(spec)


@pytest.mark.parametrize("spec", PROMOTED, ids=lambda spec: spec.name)
def test_promoted_sums_are_right_at_the_edges(spec, gpu, checked):
    for seed, (problem, raster_order) in enumerate(cases.edge_problems(spec, FEW_SMS)):
        outcome.check(gpu, spec, problem, raster_order, seed, FEW_SMS, repeats=3)
    checked(spec)


@pytest.mark.parametrize("spec", BLOCKS, ids=lambda spec: spec.name)
def test_block_scales_are_multiplied_in(spec, gpu, checked):
    for seed, (problem, raster_order) in enumerate(cases.edge_problems(spec, FEW_SMS)):
        outcome.check_scaled(gpu, spec, problem, raster_order, seed, FEW_SMS, repeats=3)
    checked(spec)


@pytest.mark.parametrize("spec", VARIANTS, ids=lambda spec: spec.name)
def test_kernel_splits_k_nests_batches_and_ends_boxes(spec, gpu, checked):
    problems, num_sms = cases.variant_problems(spec)
    for seed, (problem, raster_order) in enumerate(problems):
        if spec.a_block:
            outcome.check_scaled(gpu, spec, problem, raster_order, seed, num_sms, repeats=3)
        else:
            outcome.check(gpu, spec, problem, raster_order, seed, num_sms, repeats=3)
    checked(spec)


@pytest.mark.parametrize("spec", GROUPED_BLOCKS, ids=lambda spec: spec.name)
def test_block_scales_of_groups_are_multiplied_in(spec, gpu, checked):
    for case in grouped.edge_cases(spec, FEW_SMS, exact=True):
        problem = case.problem
        assert problem_violations(problem) + pairing_violations(problem, spec) == []
        inputs = random_operands.scale_inputs(problem, case.inputs(), 0)
        (result,) = trial.run_all(gpu, problem, spec, case.raster_order, inputs, 2, num_sms=FEW_SMS)
        a, b = reference.scaled(problem, inputs)
        expected = grouped_results.products(problem, replace(inputs, a=a), b)
        wrong = np.argwhere(~same(result, cast(expected.astype(np.float32), spec.d_dtype)))
        assert wrong.size == 0, f"{len(wrong)} elements, {wrong[0]}: {spec.name} on {problem}"
    checked(spec)


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_cast_to_8_bits_is_that_of_jax(dtype, gpu, checked):
    spec = eight_bit.cast_spec(dtype)
    rng = np.random.default_rng(0)
    edges = np.array(
        [0.0, 1.0, 447.0, 448.0, 463.9, 464.0, 464.1, 465.0, 480.0, 57344.0, 61439.0, 61440.0,
         65536.0, 126.4, 127.0, 127.9, 128.0, 128.9, 129.0, 1e9, 2.0**-6, 2.0**-9, 2.0**-10,
         1.5 * 2.0**-10, 2.0**-14, 2.0**-16, 2.0**-17, 1.5 * 2.0**-17, 2.0**-20, 1e-30, np.inf,
         np.nan, 0.5, 1.5, 2.5, 17.0, 18.0, 19.0, 1.0625, 1.1875, 1.125, 1.375],
        np.float32,
    )  # fmt: skip
    x = np.concatenate([edges, -edges, 3 * rng.standard_normal(2000).astype(np.float32)])
    x = np.concatenate([x, np.exp2(rng.uniform(-20, 17, 3000)).astype(np.float32)])
    problem = operations.problem_of(spec, x.size, 64)
    a, b = operations.factors_of(x, np.zeros(64, int))
    inputs = trial.Inputs(a[None], (b[None],))
    (result,) = trial.run_all(gpu, problem, spec, RasterOrder(), inputs)
    expected = cast(x, dtype)[:, None]
    theirs = np.asarray(jax.jit(lambda y: y.astype(dtype))(x))
    assert same(theirs, expected[:, 0]).all()
    wrong = np.argwhere(~same(result[0], expected))
    assert wrong.size == 0, [(x[i], result[0, i, j], expected[i, 0]) for i, j in wrong[:8]]
    checked(spec)


def test_promoted_sums_keep_the_digits_of_float32(gpu, checked):
    fast, promoted = eight_bit.long_specs()
    errors = {}
    for spec in (fast, promoted):
        problem = GemmProblem.dense(
            256, 256, LONG_K, b_major="k", dtype=spec.a_dtype, d_dtype="float32"
        )
        problem = cases.replace(problem, promoted=spec.promoted)
        inputs = random_operands.normal_inputs(problem, 0, 1.0)
        (result,) = trial.run_all(gpu, problem, spec, RasterOrder(), inputs)
        exact = reference.product(inputs.a, inputs.b[0])
        magnitude = reference.magnitude(inputs.a, inputs.b[0])
        bounds.assert_within_bound(
            result, exact, magnitude, LONG_K, spec.name, bounds.summation_of(problem), spec.a_dtype
        )
        errors[spec.promoted] = np.linalg.norm(result - exact) / np.linalg.norm(exact)
        checked(spec)
    print(f"relative error in norm: fast {errors[False]:.3e}, promoted {errors[True]:.3e}")
    assert errors[True] <= 2.0**-10


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_users_call_is_within_the_bound(name, checked):
    program = PROGRAMS[name]
    lhs, rhs, x, y = program.arguments()
    result = np.asarray(jax.jit(program.function)(lhs, rhs, x, y))
    right = (rhs if rhs.shape[0] == eight_bit.K else rhs.T)[None]
    factor = float(x) * float(y) if program.scaled else 1.0
    exact = reference.product(lhs[None], right) * factor
    magnitude = reference.magnitude(lhs[None], right) * factor
    summation = "promoted" if program.promoted else "wgmma"
    operand = jnp.dtype(program.dtypes[0]).name
    bound = tolerance.error_bound(exact, magnitude, eight_bit.K, result.dtype, summation, operand)
    bound += 2.0**-22 * np.abs(exact)  # of the multiplications by scales
    bounds.assert_within(result[None], exact, bound, name)
    for spec in program.specs():
        checked(spec)
