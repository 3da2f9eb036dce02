"""The reference reads operands of every layout, and rounds once."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support import reference
from support.matrices import LAYOUTS, normal

from jax_hopper_gemm.gemm.problem import GemmProblem, MatrixLayout

pytestmark = pytest.mark.pure


def test_view_reads_compact_operands_of_every_layout():
    a, b = normal((2, 3, 7)), normal((2, 7, 5), seed=1)
    for a_major, b_major in LAYOUTS:
        problem = GemmProblem.dense(3, 5, 7, 2, a_major=a_major, b_major=b_major)
        flat_a = (a if a_major == "k" else a.swapaxes(1, 2)).ravel()
        flat_b = (b if b_major == "n" else b.swapaxes(1, 2)).ravel()
        assert np.array_equal(reference.view(problem, "a", flat_a), a), a_major
        assert np.array_equal(reference.view(problem, "b", flat_b), b), b_major


def test_view_reads_interleaved_and_shared_batches():
    interleaved = normal((3, 4, 8))  # (M, L, K)
    shared = normal((8, 5), seed=1)
    problem = dataclasses.replace(
        GemmProblem.dense(3, 5, 8, 4), a=MatrixLayout("k", 32, 8), b=MatrixLayout("n", 5, 0)
    )
    a = reference.view(problem, "a", interleaved.ravel())
    b = reference.view(problem, "b", shared.ravel())
    assert np.array_equal(a, interleaved.swapaxes(0, 1))
    assert np.array_equal(b, np.broadcast_to(shared, (4, 8, 5)))
    assert reference.num_elements(problem, "b") == 40


def test_view_refuses_a_short_buffer():
    problem = GemmProblem.dense(3, 5, 8)
    with pytest.raises(ValueError, match="d spans 15 elements"):
        reference.view(problem, "d", np.zeros(14))


def test_integer_product_rounds_once_to_nearest_even():
    a = np.array([[16.0, 1.0], [16.0, 3.0]]).astype(jnp.bfloat16)
    b = np.array([[16.0], [1.0]]).astype(jnp.bfloat16)
    # 257 and 259 lie halfway between bfloat16 numbers, whose last bits are even at 256 and 260.
    rounded = reference.integer_product(a, b, jnp.dtype(jnp.bfloat16))
    assert rounded.astype(float).tolist() == [[256.0], [260.0]]
