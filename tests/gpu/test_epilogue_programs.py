"""Whole programs with epilogues as XLA compiles them: which kernels run, and what they compute."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.programs import HIDDEN, PROGRAMS, TOKENS

TARGET = "jax_hopper_gemm.v1.launch"


@pytest.fixture(params=PROGRAMS)
def program(request):
    return PROGRAMS[request.param]


def compiled(program, arguments):
    return jax.jit(program.ours, donate_argnums=program.donated).lower(*arguments).compile()


def largest_errors(results: Any, exact: Any) -> list[float]:
    pairs = zip(jax.tree.leaves(results), jax.tree.leaves(exact), strict=True)
    return [float(np.max(np.abs(np.float64(x) - np.float64(y)))) for x, y in pairs]


def test_only_the_products_run(program, checked):
    hlo = compiled(program, program.arguments()).as_text() or ""
    entry = hlo[hlo.index("ENTRY") :]
    assert hlo.count(f'custom_call_target="{TARGET}"') == program.launches
    # Whatever else runs reads no (tokens, hidden) array, but for what a user gets back.
    matrix = rf"\w+\[{TOKENS},(?:2,)?{HIDDEN}\]"
    others = [
        line
        for line in entry.splitlines()
        if re.search(rf"= {matrix}\S* (fusion|copy|convert|add|multiply|transpose)\(", line)
    ]
    assert others == []
    for spec in program.specs():
        checked(spec)


def test_results_are_as_good_as_those_of_xla(program):
    arguments = program.arguments()
    wide = [x.astype(np.float32) for x in arguments]
    with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"):
        exact = jax.tree.map(np.asarray, jax.jit(program.plain)(*wide))
    theirs = largest_errors(jax.jit(program.plain)(*map(jnp.asarray, arguments)), exact)
    given = list(map(jnp.asarray, arguments))
    ours = largest_errors(compiled(program, arguments)(*given), exact)
    for i, (before, after) in enumerate(zip(arguments, given, strict=True)):
        assert i in program.donated or np.array_equal(before, after)
    for got, xla, value in zip(ours, theirs, jax.tree.leaves(exact), strict=True):
        if np.issubdtype(value.dtype, np.integer):
            continue  # indices of top-k may change places between values that are nearly equal
        unit = float(np.max(np.abs(value))) * 2.0**-8  # half a unit of the last place of bfloat16
        assert got <= 1.5 * max(xla, unit), f"error {got}, XLA's {xla}"


def test_one_array_of_a_stack_is_not_copied():
    program = PROGRAMS["layers in a stack"]
    hlo = compiled(program, program.arguments()).as_text() or ""
    assert TARGET in hlo and "dynamic-slice" not in hlo and "dynamic_slice" not in hlo


def test_accumulation_takes_the_memory_of_its_operand():
    program = PROGRAMS["accumulation"]
    arguments = list(map(jnp.asarray, program.arguments()))
    hlo = compiled(program, arguments)
    text = hlo.as_text()
    assert text and " copy(" not in text
    address = arguments[0].unsafe_buffer_pointer()
    assert hlo(*arguments).unsafe_buffer_pointer() == address
    assert arguments[0].is_deleted()


def test_accumulation_keeps_an_operand_that_is_used_later():
    program = PROGRAMS["accumulation"]
    c, a, b = map(jnp.asarray, program.arguments())
    before = np.asarray(c)
    result = jax.jit(program.ours)(c, a, b)
    np.testing.assert_array_equal(np.asarray(c), before)
    assert not np.array_equal(np.asarray(result), before)


def test_top_k_selects_from_the_stored_weights():
    program = PROGRAMS["router"]
    weights, values, indices = (
        np.asarray(x) for x in jax.jit(program.ours)(*map(jnp.asarray, program.arguments()))
    )
    picked = np.take_along_axis(weights.astype(np.float32), indices, axis=1)
    np.testing.assert_allclose(picked, values, rtol=2.0**-8)  # the rounding of the stored weights
    assert (np.diff(values, axis=1) <= 0).all()
    others = weights.astype(np.float32).copy()
    np.put_along_axis(others, indices, -np.inf, axis=1)
    assert (others.max(axis=1) <= values[:, -1] * (1 + 2.0**-8)).all()
