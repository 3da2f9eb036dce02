"""Numbers of programs lowered for CUDA, whose launches NumPy computes: every way to lower them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from support import emulated, running
from support.covering import ALL
from support.random_programs import writer_of
from support.stepwise import Run, run_stepwise
from support.transformations import (
    COMBINATIONS,
    LEFT_TO_XLA,
    TRANSFORMATIONS,
    assert_equal,
    covering_combinations,
    on_kernels,
)
from support.transformed_functions import FUNCTIONS
from test_accelerate_random import PROGRAMS, assert_alike, leaves_of

import jax_hopper_gemm as jhg

JITTED = [
    combination
    for combination in (COMBINATIONS if ALL else covering_combinations())
    if TRANSFORMATIONS[combination[0]].lower is running.lowered
    and TRANSFORMATIONS[combination[0]].run is running.jitted
    and combination not in LEFT_TO_XLA
]


@pytest.fixture
def launched(monkeypatch):
    found = []
    emulated.use(monkeypatch, found)
    return found


@pytest.mark.parametrize(("name", "function"), JITTED)
def test_a_transformed_function_gives_exact_results(name, function, launched):
    known = FUNCTIONS[function]
    program = TRANSFORMATIONS[name].of(on_kernels(name, function), known)
    assert_equal(jax.jit(program)(*known.arguments()), name, function)
    assert launched


@pytest.mark.slow
@pytest.mark.parametrize("seed", PROGRAMS[::5])
def test_a_random_program_under_accelerate_is_as_exact_as_itself(seed, launched):
    program, arguments = writer_of(seed)
    step = jax.value_and_grad(program)
    ours = jhg.accelerate(step, implementation="hopper")
    found = leaves_of(jax.jit(ours)(arguments(jnp.bfloat16)))
    exact = Run(step, arguments(jnp.float32), measured=True)
    plain = leaves_of(run_stepwise(step, arguments(jnp.bfloat16)))
    assert_alike(found, plain, leaves_of(exact.results), exact.largest)
    if not launched:
        pytest.skip("no kernel runs a product of this program")
