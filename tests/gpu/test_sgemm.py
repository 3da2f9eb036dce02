"""Kernels for FMA units, on memory with guards and as users call them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from support import bounds, outcome, random_operands, reference, sgemm, tolerance, trial

from jax_hopper_gemm.dispatch import problem_violations
from jax_hopper_gemm.dispatch.legality import pairing_violations
from jax_hopper_gemm.gemm.raster import RasterOrder

KERNELS = sgemm.kernels()
LARGE = [spec for spec in KERNELS if (spec.tile_m, spec.tile_n, spec.tile_k) == (128, 128, 32)]
NARROW = RasterOrder("n", 2)


def run(gpu, spec, problem, inputs, repeats=1, order=NARROW):
    assert problem_violations(problem) + pairing_violations(problem, spec) == []
    (result,) = trial.run_all(gpu, problem, spec, order, inputs, repeats)
    return result


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_kernel_is_exact_on_integers_and_writes_only_its_results(spec, gpu, checked):
    for seed, problem in enumerate(sgemm.problems(spec)):
        inputs = random_operands.integer_inputs(problem, seed)
        got = [run(gpu, spec, problem, inputs)]
        outcome.assert_exact(got, outcome.exact(problem, spec, inputs), f"{spec.name} {problem}")
    checked(spec)


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_kernel_adds_products_in_the_order_of_k(spec, gpu, checked):
    """Bit for bit. So no tile and no layout changes any."""
    for problem in sgemm.problems(spec)[:2]:
        inputs = random_operands.normal_inputs(problem, 0, 1.0)
        result = run(gpu, spec, problem, inputs)
        expected = sgemm.chain(inputs.a, inputs.b[0])
        np.testing.assert_array_equal(result.view(np.int32), expected.view(np.int32))
    checked(spec)


@pytest.mark.parametrize("spec", LARGE, ids=lambda spec: spec.name)
def test_a_large_product_is_within_the_bound_and_repeats_its_bits(spec, gpu, checked):
    odd = 1 if spec.simt_width == 1 else 0
    problem = sgemm.problem_of(spec, 2048 + odd, 1792 + odd, 2000 + odd)
    inputs = random_operands.normal_inputs(problem, 1, 1.0)
    result = run(gpu, spec, problem, inputs, repeats=20, order=RasterOrder("m", 8))
    exact = reference.product(inputs.a, inputs.b[0])
    magnitude = reference.magnitude(inputs.a, inputs.b[0])
    bounds.assert_within_bound(result, exact, magnitude, problem.k, spec.name, "fma", "float32")
    checked(spec)


def test_special_values(gpu):
    spec = LARGE[0]
    problem = sgemm.problem_of(spec, 256, 128, 64)
    inputs = random_operands.normal_inputs(problem, 0, 1.0)
    inputs = replace(inputs, a=inputs.a.copy())
    inputs.a[0, 3, 5], inputs.a[0, 4, 6] = np.nan, np.inf
    inputs.a[0, 5] = np.float32(2.0**-140)  # a subnormal number
    result = run(gpu, spec, problem, inputs)[0]
    assert np.isnan(result[3]).all()
    np.testing.assert_array_equal(result[4], np.inf * np.sign(inputs.b[0][0, 6]))
    assert np.isfinite(np.delete(result, [3, 4], 0)).all()
    expected = sgemm.chain(inputs.a[:, 5:6], inputs.b[0])[0, 0]
    np.testing.assert_array_equal(result[5], expected)
    assert (expected != 0).any()


@pytest.mark.parametrize("extents", sgemm.PROGRAM_EXTENTS, ids=str)
@pytest.mark.parametrize("letters", sgemm.LETTERS, ids=",".join)
def test_all_orders_of_axes_have_the_same_bits(letters, extents, checked):
    a, b = sgemm.arrays(letters[:2], extents)
    function = partial(sgemm.einsum, letters)
    result = np.asarray(jax.jit(function)(a, b))
    a, b = a if letters[0] == "mk" else a.T, b if letters[1] == "kn" else b.T
    result = result if letters[2] == "mn" else result.T
    np.testing.assert_array_equal(result, sgemm.chain(a[None], b[None])[0])
    for spec in sgemm.specs_of(function, *sgemm.arrays(letters[:2], extents)):
        checked(spec)


@pytest.mark.parametrize("extents", sgemm.PROGRAM_EXTENTS, ids=str)
def test_gradients_are_within_the_bound(extents):
    a, b, c = sgemm.arrays(("mk", "kn", "mn"), extents)
    grads = jax.jit(sgemm.gradients)(a, b, c)
    for grad, (left, right) in zip(grads, ((c, b.T), (a.T, c)), strict=True):
        exact, magnitude = (f(left).astype(float) @ f(right).astype(float) for f in (_same, np.abs))
        relative = tolerance.accumulation_error(left.shape[1], "fma", "float32")
        bounds.assert_within(np.asarray(grad), exact, relative * magnitude)


def _same(x):
    return x


def test_a_batch(checked):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((3, 64, 64)).astype(np.float32) for _ in range(2))
    result = jax.jit(partial(sgemm.einsum, ("lmk", "lkn", "lmn")))(a, b)
    np.testing.assert_array_equal(np.asarray(result), sgemm.chain(a, b))
