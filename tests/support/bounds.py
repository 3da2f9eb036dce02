"""Assertions that results are within the error bounds of `support.tolerance`."""

from __future__ import annotations

import numpy as np
from support.tolerance import Summation, Worst, error_bound, farthest

from jax_hopper_gemm.gemm.problem import GemmProblem

SUMMATIONS: dict[int, Summation] = {0: "wgmma", 3: "bf16x3", 6: "bf16x6", 9: "bf16x9"}


def summation_of(problem: GemmProblem) -> Summation:
    """Returns what adds the products of a problem up in a kernel."""
    if problem.simt:
        return "fma"
    if problem.bf16_terms:
        return SUMMATIONS[problem.bf16_terms]
    return "promoted" if problem.promoted else "wgmma"


def assert_within_bound(
    result: np.ndarray,
    expected: np.ndarray,
    magnitude: np.ndarray,
    k: int,
    what: str = "result",
    summation: Summation = "wgmma",
    operands: str = "bfloat16",
) -> Worst:
    """Returns the worst element of `result`, having checked that it is within its bound.

    Raises:
      AssertionError: an element is farther from `expected` than `error_bound` allows.
    """
    bound = error_bound(expected, magnitude, k, result.dtype, summation, operands)
    return assert_within(result, expected, bound, what)


def assert_within(
    got: np.ndarray, expected: np.ndarray, bound: np.ndarray, what: str = "result"
) -> Worst:
    """Returns the worst element of `got`, having checked that it is within its bound.

    Raises:
      AssertionError: an element is farther from `expected` than `bound`, or is or is not a NaN
        where it must.
    """
    assert np.shape(got) == expected.shape, f"{what}: {np.shape(got)} is not {expected.shape}"
    found = farthest(got, expected, bound)
    assert found.ratio <= 1, (
        f"{what}: element {found.index} is {found.got!r}, expected {found.expected!r} within "
        f"{found.bound:.3e}: {found.ratio:.3g} times the bound"
    )
    return found
