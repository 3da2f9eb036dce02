"""Kernels that convert weights of 8 and 4 bits, on memory with guards, and what users call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import (
    bounds,
    cases,
    graphs,
    grouped,
    grouped_results,
    outcome,
    random_operands,
    reference,
    tolerance,
    trial,
)
from support.casts import cast, same
from support.policies import converted_specs, converted_variants
from support.weights import CASES, PROGRAMS, number_specs

from jax_hopper_gemm.dispatch import problem_violations
from jax_hopper_gemm.dispatch.legality import pairing_violations
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.primitives.widen import hopper_widen

SPECS = [spec for spec in converted_specs() if not spec.grouped]
GROUPED = [spec for spec in converted_specs() if spec.grouped]
FEW_SMS = 16  # so that a persistent grid wraps around on problems that are quickly checked


def check(gpu, spec, problem, raster_order, seed, num_sms: int | None = FEW_SMS):
    """Runs a kernel on integers and on other numbers; checks all that it wrote, and nothing else.

    Of integers with scales that are powers of two there is one right answer.
    """
    assert problem_violations(problem) + pairing_violations(problem, spec) == []
    what = f"{spec.name} on {problem} along {raster_order}"
    for make in (random_operands.integer_inputs, random_operands.normal_inputs):
        inputs = make(problem, seed)
        if spec.k_group:
            inputs = random_operands.scale_inputs(problem, inputs, seed)
        results = trial.run_all(gpu, problem, spec, raster_order, inputs, 2, num_sms)
        exact = make is random_operands.integer_inputs and graphs.is_exact(spec.graph)
        if spec.k_group:
            check_scaled(problem, spec, inputs, results[0], exact, what)
        elif exact:
            outcome.assert_exact(results, outcome.exact(problem, spec, inputs), what)
        else:
            outcome.assert_within_bound(problem, spec, inputs, results, what)


def check_scaled(problem, spec, inputs, result, exact, what):
    a, b = reference.scaled(problem, inputs)
    expected, magnitude = reference.product(a, b), reference.magnitude(a, b)
    if exact:
        wrong = np.argwhere(~same(result, cast(expected.astype(np.float32), spec.d_dtype)))
        assert wrong.size == 0, f"{len(wrong)} of {result.size} elements, {wrong[0]}: {what}"
        return
    # Groups are added up by fused multiply-adds: a rounding of the sum so far for each.
    added = 2.0**-23 * -(-problem.k // spec.k_group) * magnitude
    bound = tolerance.error_bound(expected, magnitude, problem.k, spec.d_dtype) + 2 * added
    bounds.assert_within(result, expected, bound, what)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_kernel_is_right_at_its_edges(spec, gpu, checked):
    for seed, (problem, raster_order) in enumerate(cases.edge_problems(spec, FEW_SMS)):
        check(gpu, spec, problem, raster_order, seed)
    checked(spec)


@pytest.mark.parametrize("spec", converted_variants(), ids=lambda spec: spec.name)
def test_kernel_splits_k_nests_batches_and_ends_boxes(spec, gpu, checked):
    problems, num_sms = cases.variant_problems(spec)
    for seed, (problem, raster_order) in enumerate(problems):
        check(gpu, spec, problem, raster_order, seed, num_sms)
    checked(spec)


@pytest.mark.parametrize("spec", GROUPED, ids=lambda spec: spec.name)
def test_grouped_kernel_is_right_at_its_edges(spec, gpu, checked):
    for case in grouped.edge_cases(spec, FEW_SMS, exact=True):
        problem, inputs = case.problem, case.inputs()
        assert problem_violations(problem) + pairing_violations(problem, spec) == []
        if spec.k_group:
            inputs = random_operands.scale_inputs(problem, inputs, 0)
        results = trial.run_all(gpu, problem, spec, case.raster_order, inputs, 2, num_sms=FEW_SMS)
        if not spec.k_group:
            case.check(inputs, results)
            continue
        _, b = reference.scaled(problem, inputs)
        expected = grouped_results.products(problem, inputs, b)
        wrong = np.argwhere(~same(results[0], cast(expected.astype(np.float32), spec.d_dtype)))
        assert wrong.size == 0, f"{len(wrong)} elements, {wrong[0]}: {case}"
    checked(spec)


@pytest.mark.parametrize("spec", number_specs(), ids=lambda spec: spec.name)
def test_every_number_is_converted_exactly(spec, gpu, checked):
    """NaN and infinities, too: each number times one in a column of its own, that is else zeros."""
    major, dtype, half = spec.b_major, spec.b_dtype, spec.a_dtype
    k = n = 256
    bits = 4 if dtype == "int4" else 8
    codes = np.arange(1 << bits)
    if dtype == "int4":
        values = (codes - 8).astype(jnp.dtype(dtype))
    else:
        values = codes.astype(np.uint8).view(jnp.dtype(dtype))
    diagonal = np.zeros((k, n), values.dtype)
    diagonal[np.arange(k), np.arange(n)] = np.resize(values, k)
    problem = cases.replace(
        GemmProblem.dense(k, n, k, b_major=major, dtype=half, d_dtype="float32"), b_dtype=dtype
    )
    ones = np.eye(k).astype(jnp.dtype(half))
    (result,) = trial.run_all(
        gpu, problem, spec, RasterOrder(), trial.Inputs(ones[None], (diagonal[None],))
    )
    found = result[0][np.arange(k), np.arange(n)]
    np.testing.assert_array_equal(found, np.resize(values, k).astype(np.float32))
    checked(spec)


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["int4", "packed", "int8", "float8_e4m3fn", "float8_e5m2"])
def test_what_xla_writes_has_the_bits_of_the_cpu(dtype, half):
    """Lines of even and odd length; no scales, those of groups along lines and across them."""
    packed, rng = dtype == "packed", np.random.default_rng(3)
    stored = "uint8" if packed else dtype
    for shape, axis in [((96, 254), -2), ((96, 250), -1), ((3, 70, 66), -2), ((40, 33), -1)]:
        line = shape[-1] // 2 if packed else shape[-1]
        bits = rng.integers(0, 256, (*shape[:-1], line)).astype(np.uint8)
        values = (bits.astype(np.int8) >> 4 if dtype == "int4" else bits.view(stored)).astype(
            stored
        )
        numbers = (*shape[:-1], line * (1 + packed))
        extents = [-(-n // 32) if i == len(shape) + axis else n for i, n in enumerate(numbers)]
        scale = rng.uniform(0.5, 2, extents).astype(np.float32)
        for scales in ((), (scale,)):
            group = 32 if scales else 0
            written = jax.jit(
                lambda x, *s, axis=axis, group=group: hopper_widen(
                    x, jnp.dtype(half), *s, axis=axis, group=group, packed=packed
                )
            )
            found, expected = (
                np.asarray(written(*jax.device_put((values, *scales), jax.devices(x)[0])))
                for x in ("gpu", "cpu")
            )
            nan = np.isnan(expected)
            np.testing.assert_array_equal(np.isnan(found), nan)
            found, expected = (np.where(nan, 0, x.view(np.uint16)) for x in (found, expected))
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("name", "dtype", "block", "half"), CASES)
def test_what_users_call_is_within_the_bound(name, dtype, block, half, checked):
    program = PROGRAMS[name]
    x, weights = program.arguments(dtype, block, jnp.dtype(half))
    result = np.asarray(jax.jit(program.function)(x, weights))
    w = np.asarray(weights.dequantize(jnp.float32), np.float64)  # of few digits: exact
    expected, magnitude = program.exact(np.asarray(x).astype(np.float64), w)
    terms = x.shape[-1]
    bound = tolerance.error_bound(expected, magnitude, terms, result.dtype)
    # Scales: dequantized values are rounded, sums are added up by group, products scaled.
    bound += (terms // 32 + 4) * 2.0**-23 * magnitude
    unit = float(jnp.finfo(half).eps) / 2
    if name == "gradient":  # cotangents, and what is not read in place, are rounded to 16 bits
        bound += 2 * unit * magnitude
    bounds.assert_within(result, expected, bound, f"{name} {dtype} {block} {half}")
    for spec in program.specs(dtype, block, jnp.dtype(half)):
        checked(spec)
