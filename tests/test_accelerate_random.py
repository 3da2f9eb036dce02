"""Random programs: what `accelerate` makes of them gives their results and derivatives.

JAX_HOPPER_GEMM_PROGRAMS=20000 runs so many, 500:1000 those from 500 on; each is one number to a
generator of random numbers. They run an operation at a time: XLA would compile each for seconds.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.random_programs import writer_of
from support.stepwise import Run, run_stepwise

import jax_hopper_gemm as jhg

PROGRAMS = range(*map(int, os.environ.get("JAX_HOPPER_GEMM_PROGRAMS", "0:30").split(":")))
CACHED = 1000  # programs whose traces JAX and this library keep
EPSILON, EPSILON_WIDE = 2.0**-8, 2.0**-24  # of bfloat16 and float32


def leaves_of(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]


def outcome(function: Any, arguments: Any) -> list[np.ndarray]:
    return leaves_of(run_stepwise(function, arguments))


def assert_alike(ours: Any, theirs: Any, exact: Any, largest: float) -> None:
    """Asserts errors no larger than the program's.

    Where it rounds nothing, a sum of gradients in another order may round: half an ulp of a partial
    sum, of up to twice the largest number on the program's way.
    """
    for x, y, z in zip(ours, theirs, exact, strict=True):
        rounded = 4 * np.abs(y - z).max() + 8 * EPSILON * np.abs(z).max()
        allowed = EPSILON * largest if np.array_equal(y, z) else rounded
        assert np.abs(x - z).max() <= allowed


def check_random_program(seed: int) -> None:
    """Checks results and derivatives of a random program under `accelerate`.

    In float32 all but derivatives of maxima that several numbers share are exact.
    """
    program, arguments = writer_of(seed)
    narrow, wide = arguments(jnp.bfloat16), arguments(jnp.float32)
    step = jax.value_and_grad(program)
    run = Run(step, wide, measured=True)
    theirs, exact = outcome(step, narrow), leaves_of(run.results)
    for ours in (jax.value_and_grad(jhg.accelerate(program)), jhg.accelerate(step)):
        for x, z in zip(outcome(ours, wide), exact, strict=True):
            assert np.abs(x - z).max() <= 16 * EPSILON_WIDE * np.abs(z).max()
        assert_alike(outcome(ours, narrow), theirs, exact, run.largest)


@pytest.mark.slow
@pytest.mark.usefixtures("all_fused")
@pytest.mark.parametrize("seed", PROGRAMS)
def test_results_and_derivatives_are_those_of_the_program(seed: int) -> None:
    if seed % CACHED == CACHED - 1:
        jax.clear_caches()
    check_random_program(seed)
