"""The suites of shapes, and a problem's arrays in JAX."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import reference
from support.matrices import LAYOUTS, normal

from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.testing import shapes

pytestmark = pytest.mark.pure


def test_bars_hold_every_shape_in_both_layouts_of_b():
    bars = set(shapes.suite("bars"))
    assert len(bars) == 24
    for m, n, k in [(1024, 1024, 1024), (3000, 5000, 4104), (8192, 28672, 8192)]:
        assert GemmProblem.dense(m, n, k) in bars
        assert GemmProblem.dense(m, n, k, b_major="k") in bars
    assert GemmProblem.dense(8192, 8192, 8192, a_major="m") in bars


def test_suites_are_addressable_by_tma():
    for name in shapes.SUITES:
        problems = shapes.suite(name)
        assert problems, name
        for p in problems:
            assert all(x.leading_stride * 2 % 16 == 0 for x in (p.a, p.b, p.d)), p


def test_dimension_numbers_multiply_stored_operands():
    for (a_major, b_major), batch in itertools.product(LAYOUTS, (1, 3)):
        problem = GemmProblem.dense(4, 5, 6, batch, a_major=a_major, b_major=b_major)
        a = normal(shapes.operand_shape(problem, "a"))
        b = normal(shapes.operand_shape(problem, "b"), seed=1)
        result = jax.lax.dot_general(
            a, b, shapes.dimension_numbers(problem), preferred_element_type=jnp.float32
        )
        views = reference.view(problem, "a", a.ravel()), reference.view(problem, "b", b.ravel())
        expected = reference.product(*views).reshape(shapes.operand_shape(problem, "d"))
        assert np.allclose(result, expected, rtol=1e-5, atol=1e-5), (a_major, b_major, batch)
