"""Products by recipes on kernels, against the same numbers of 8 bits multiplied by XLA."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import train_recipes
from support import bounds, recipe_programs, tolerance
from support.recipe_programs import CASES, PROGRAMS, STEPS

from jax_hopper_gemm.testing.lowered import all_specs_of

SMALLEST_SUBNORMAL = 2.0**-149  # of float32


def error(got, exact):
    got, exact = (np.asarray(x, np.float64) for x in (got, exact))
    return np.linalg.norm(got - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_a_product_and_its_gradients_are_xlas(name, recipe, checked):
    program = PROGRAMS[name]
    ours = program.leaves(recipe, "hopper")
    # Of a scan of `BlockScaling` XLA leaves out conversions to 8 bits and back, on a GPU alone.
    with jax.default_device(jax.devices("cpu" if program.rough is None else None)[0]):
        xlas = program.leaves(recipe, "xla")
        plain = program.leaves(None, "xla")
    errors = list(map(error, ours, xlas))
    print(f"{name}, {recipe}:", *(f"{x:.2e}" for x in errors))
    first = 0.03 if name == "scan" else recipe_programs.PLAIN  # layers quantize anew, too
    assert errors[0] < first
    if program.rough is None:
        noise = map(error, plain, xlas)
        assert all(x < y for x, y in zip(errors, noise, strict=True))
    else:
        assert max(errors) < program.rough
    for spec in program.specs(recipe):
        checked(spec)


@pytest.mark.parametrize(("recipe", "inside"), STEPS)
def test_an_accelerated_step_is_near_that_of_16_bits(recipe, inside, checked):
    arguments = recipe_programs.step_arguments()
    run = recipe_programs.accelerated(recipe, inside)
    value, gradients = jax.jit(run)(*arguments)
    plain_value, plain = jax.jit(jax.value_and_grad(recipe_programs.loss))(*arguments)
    np.testing.assert_allclose(value, plain_value, rtol=0.01)
    errors = [error(*pair) for pair in zip(*map(jax.tree.leaves, (gradients, plain)), strict=True)]
    print(recipe, inside, *(f"{x:.2e}" for x in errors))
    assert 0.01 < min(errors) and max(errors) < 0.15
    for spec in all_specs_of(run, *arguments):
        checked(spec)


@pytest.mark.parametrize("special", [0.0, np.inf, np.nan, 2.0**-140, 2.0**-126])
@pytest.mark.parametrize("kind", ["blocks", "rows"])
def test_a_scale_multiplies_whatever_it_is(kind, special, checked):
    a, b = recipe_programs.scaled_arguments(kind, special)
    result = np.asarray(jax.jit(recipe_programs.scaled)(a, b), np.float64)
    usual, _ = recipe_programs.scaled_arguments(kind, 1.0)
    unharmed = np.asarray(jax.jit(recipe_programs.scaled)(usual, b), np.float64)
    np.testing.assert_array_equal(result[4:], unharmed[4:])
    if np.isfinite(special):
        exact, wide = (np.asarray(x.dequantize(), np.float64) for x in (a, b))
        summation = "promoted" if kind == "blocks" else "wgmma"
        bound = tolerance.error_bound(
            exact @ wide, abs(exact) @ abs(wide), 400, "float32", summation, "float8_e4m3fn"
        )
        bound += 2 * SMALLEST_SUBNORMAL
        bounds.assert_within(result[:4], (exact @ wide)[:4], bound[:4])
    else:
        assert not np.isfinite(result[:4]).any()
    for spec in recipe_programs.scaled_specs():
        checked(spec)


def test_a_small_model_learns_by_each_recipe():
    setting = train_recipes.Setting(128, 2, 4, 128, 8, steps=100, rate=3e-3, averaged=20)
    outcomes = {
        name: train_recipes.trained(setting, recipe)
        for name, recipe in train_recipes.RECIPES.items()
    }
    differences = train_recipes.differences(outcomes)
    print({name: f"{x:+.2%}" for name, x in differences.items()})
    assert max(map(abs, differences.values())) < 0.01
