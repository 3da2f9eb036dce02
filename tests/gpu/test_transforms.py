"""What JAX makes of each public function, on one GPU: exact results, on kernels of ours.

docs/transformations.md has a table of these tests.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest
from support import running
from support.transformations import (
    FUNCTIONS,
    LEFT_TO_XLA,
    TRANSFORMATIONS,
    assert_equal,
    expected,
    on_kernels,
    specs,
)

TARGET = 'custom_call_target="jax_hopper_gemm.v1.launch"'
SINGLE = [name for name, transformation in TRANSFORMATIONS.items() if transformation.devices == 1]
COMBINATIONS = list(itertools.product(SINGLE, FUNCTIONS))


def outcome(combination: tuple[str, str]) -> tuple[Any, str | None] | Exception:
    """Returns the results and, of a single program, what XLA made of it; or what went wrong."""
    name, function = combination
    transformation, known = TRANSFORMATIONS[name], FUNCTIONS[function]
    try:
        expected(name, function)  # compiled here, too, beside others
        program, args = transformation.of(on_kernels(name, function), known), known.arguments()
        if transformation.run is not running.jitted:
            return jax.block_until_ready(transformation.run(program, args, known)), None
        compiled = jax.jit(program).lower(*args).compile()
        return jax.block_until_ready(compiled(*args)), compiled.as_text()
    except Exception as error:
        return error


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, str], Any]:
    """Of all combinations: most of the time is XLA's, which compiles on all cores at once."""
    with ThreadPoolExecutor(12) as pool:
        return dict(zip(COMBINATIONS, pool.map(outcome, COMBINATIONS), strict=True))


@pytest.mark.parametrize("name, function", COMBINATIONS)
def test_results_are_exact_and_from_our_kernels(name, function, outcomes, checked):
    if name == "export":
        pytest.importorskip("flatbuffers")  # jax serialises with it, and does not ask for it
    found = outcomes[name, function]
    if isinstance(found, Exception):
        raise found
    results, text = found
    assert_equal(results, name, function)
    if text is not None and (name, function) not in LEFT_TO_XLA:
        assert TARGET in text and " dot(" not in text and "cublas" not in text
    for spec in specs(name, function):
        checked(spec)


@pytest.mark.parametrize("function", [name for name, known in FUNCTIONS.items() if known.sizes])
def test_nans_that_belong_to_no_group_reach_nothing(function):
    known = FUNCTIONS[function]
    program = TRANSFORMATIONS["vjp"].of(on_kernels("vjp", function), known)
    poisoned = running.poisoned(known.arguments(), known)  # before NaNs are looked for
    with jax.debug_nans(True):
        results = jax.jit(program)(*poisoned)
        assert_equal(results, "vjp", function)
