"""What a grouped product must give, and whether a kernel gave it.

Where the groups lie is computed here in Python, on whole arrays of int64: nothing is shared with
`gemm/group_search.py`, which the kernels run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from support import bounds, outcome, reference, tolerance
from support.places import shape_of
from support.trial import Inputs

from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.spec import GemmSpec

_CHECKED = 400_000_000  # products of elements that a check in float64 may cost


class Span(NamedTuple):
    """Elements `start` to `end` - 1 of the grouped axis; its group's matrix, -1: of no group."""

    start: int
    end: int
    matrix: int


def spans(problem: GemmProblem, sizes: np.ndarray) -> list[Span]:
    """Returns every span of the grouped axis, empty ones too, what is left over last."""
    groups = problem.groups
    assert groups is not None
    rule = groups.rule
    assert len(sizes) == groups.num_sizes
    length = problem.m if groups.axis == "m" else problem.k
    ends = np.minimum(np.cumsum(np.clip(sizes.astype(np.int64), 0, length)), length)
    edges = [0, *map(int, ends), length]
    found = []
    for i, (start, end) in enumerate(zip(edges, edges[1:], strict=False)):
        place = i % rule.period - rule.first
        belongs = i < groups.num_sizes and 0 <= place < rule.count
        matrix = i // rule.period * rule.step + place if belongs else -1
        assert matrix < problem.l, f"group {i} has matrix {matrix} of {problem.l}"
        found.append(Span(start, end, matrix))
    return found


def matrix_of_rows(problem: GemmProblem, sizes: np.ndarray) -> np.ndarray:
    """Returns (length,) the matrix of each element of the grouped axis; -1: none."""
    found = spans(problem, sizes)
    return np.repeat([span.matrix for span in found], [span.end - span.start for span in found])


def products(
    problem: GemmProblem,
    inputs: Inputs,
    b: np.ndarray,
    multiply: Callable[[np.ndarray, np.ndarray], np.ndarray] = reference.product,
    rows: np.ndarray | None = None,
) -> np.ndarray:
    """Returns the sums before the epilogue, in float64.

    Args:
      b: one of `inputs.b`.
      multiply: of a group's A and B.
      rows: in rising order, those of D that are wanted, where they are grouped; None: all.

    Returns:
      (1, rows, N) where rows are grouped, 0 in those of no group; else (W, M, N).
    """
    assert inputs.sizes is not None and problem.groups is not None
    a, b = gathered(problem, inputs, b)
    if problem.groups.axis == "m":
        rows = np.arange(problem.m) if rows is None else rows
        found = np.zeros((1, rows.size, problem.n))
        for span in _owned(problem, inputs.sizes):
            low, high = np.searchsorted(rows, (span.start, span.end))
            if low < high:
                found[0, low:high] = multiply(a[0, rows[low:high]], b[span.matrix])
        return found
    found = np.zeros(shape_of(problem, "d"))
    for span in _owned(problem, inputs.sizes):
        part = slice(span.start, span.end)
        found[span.matrix] = multiply(a[0, :, part], b[0, part])
    return found


def gathered(problem: GemmProblem, inputs: Inputs, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns A and `b` with the rows that `inputs.indices` picks in place of their sources.

    An index that no row has picks zeros.
    """
    groups = problem.groups
    assert groups is not None
    if groups.gathered is None:
        return inputs.a, b
    indices = inputs.indices
    assert indices is not None
    absent = (indices < 0) | (indices >= groups.source_rows)

    def picked(array: np.ndarray, axis: int) -> np.ndarray:
        found = np.take(array, np.where(absent, 0, indices), axis=axis)
        np.moveaxis(found, axis, 0)[absent] = 0
        return found

    if groups.gathered == "a":
        return picked(inputs.a, 1 if groups.axis == "m" else 2), b
    return inputs.a, picked(b, 1)


def _owned(problem: GemmProblem, sizes: np.ndarray) -> Iterator[Span]:
    return (span for span in spans(problem, sizes) if span.matrix >= 0 and span.start < span.end)


def assert_exact(
    problem: GemmProblem, spec: GemmSpec, inputs: Inputs, got: list[np.ndarray], what: str
) -> None:
    """Checks results for small integers bit for bit; rows of no group are 0.

    Raises:
      AssertionError: an element is wrong, or was not written.
    """

    def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return reference.integer_product(a, b, np.dtype(np.float32))

    rows = _rows(problem, inputs)
    assert_rows_of_no_group_are_zero(problem, inputs, got, what)
    if rows is not None and rows.size == 0:
        return
    sums = [products(problem, inputs, b, multiply, rows).astype(np.float32) for b in inputs.b]
    values = outcome.exact_values(problem.graph, sums, operands_at(problem, inputs, rows))
    stored = [values[result.value] for result in problem.graph.results]
    expected = outcome.arrays_of(problem.graph, spec, stored, sums[0].shape)
    outcome.assert_exact(_at_rows(problem, got, rows), expected, what)


def assert_within_bound(
    problem: GemmProblem, spec: GemmSpec, inputs: Inputs, got: list[np.ndarray], what: str
) -> None:
    """Checks results against float64, within the error that their operations may make.

    Of many rows only those at the ends of groups and an even spread are checked; rows of no group
    are 0, all of them.

    Raises:
      AssertionError: an element is farther off, or was not written.
    """
    from support import epilogue

    assert inputs.sizes is not None
    rows = _rows(problem, inputs, _CHECKED // (problem.n * problem.k))
    assert_rows_of_no_group_are_zero(problem, inputs, got, what)
    if rows is not None and rows.size == 0:
        return
    sums, errors = [], []
    lengths: int | np.ndarray = problem.k
    if rows is None:
        of_matrix = {s.matrix: s.end - s.start for s in _owned(problem, inputs.sizes)}
        lengths = np.array([of_matrix.get(i, 0) for i in range(problem.l)])
    summation = bounds.summation_of(problem)
    error_of = np.vectorize(tolerance.accumulation_error)
    relative = error_of(lengths, summation, problem.a_dtype)
    for b in inputs.b:
        sums.append(products(problem, inputs, b, reference.product, rows))
        magnitude = products(problem, inputs, b, reference.magnitude, rows)
        errors.append(relative.reshape(-1, 1, 1) * magnitude)
    expected = epilogue.evaluate(problem.graph, sums, operands_at(problem, inputs, rows), errors)
    found = outcome.finished(problem, _at_rows(problem, got, rows))
    outcome.assert_near(found, expected, problem.n, what)


def assert_rows_of_no_group_are_zero(
    problem: GemmProblem, inputs: Inputs, got: list[np.ndarray], what: str
) -> None:
    """Checks the matrices of the results where rows are grouped.

    Raises:
      AssertionError: such a row was not written, or with something else.
    """
    assert problem.groups is not None and inputs.sizes is not None
    if problem.groups.axis != "m":
        return
    nobody = np.flatnonzero(matrix_of_rows(problem, inputs.sizes) < 0)
    arrays = [r for r in problem.graph.results if r.kind != "matrix" or r.plane == 0]
    for i, (result, array) in enumerate(zip(arrays, got, strict=True)):
        if result.kind == "matrix":
            wrong = np.argwhere(~(array[0, nobody] == 0))
            assert wrong.size == 0, (
                f"{what}: result {i} of {len(wrong)} elements of no group is not 0, the first in "
                f"row {nobody[wrong[0][0]]}: {array[0, nobody][tuple(wrong[0])]}"
            )


def _rows(problem: GemmProblem, inputs: Inputs, count: int | None = None) -> np.ndarray | None:
    """Returns the rows of D that belong to groups, `count` and some more; None: all, of all."""
    assert problem.groups is not None and inputs.sizes is not None
    if problem.groups.axis != "m":
        return None
    owned = np.flatnonzero(matrix_of_rows(problem, inputs.sizes) >= 0)
    if count is None or owned.size <= count:
        return owned
    found = spans(problem, inputs.sizes)
    edges = np.array([edge for span in found for edge in (span.start, span.end - 1)])
    if edges.size > count:
        edges = edges[np.linspace(0, edges.size - 1, count).astype(int)]
    spread = owned[np.linspace(0, owned.size - 1, max(2, count)).astype(int)]
    return np.intersect1d(np.union1d(edges, spread), owned)


def operands_at(problem: GemmProblem, inputs: Inputs, rows: np.ndarray | None) -> list[np.ndarray]:
    """Returns the epilogue's operands in shapes that broadcast to those of `products`."""
    if rows is None:
        return outcome.broadcast_operands(problem, inputs)
    assert inputs.sizes is not None
    matrices, found = matrix_of_rows(problem, inputs.sizes)[rows], []
    for operand, array in zip(problem.graph.operands, inputs.operands, strict=True):
        if operand.kind in ("matrix", "column"):
            taken = array[:, rows]
            found.append(taken if operand.kind == "matrix" else taken[..., None])
        else:
            taken = array[matrices]
            found.append(taken[None] if operand.kind == "row" else taken[None, :, None])
    return found


def _at_rows(
    problem: GemmProblem, got: list[np.ndarray], rows: np.ndarray | None
) -> list[np.ndarray]:
    """Returns the arrays that a kernel wrote, only `rows` of D of them."""
    if rows is None:
        return got
    axes = {"row_sum": 2, "row_max": 2, "row_sumexp": 3}
    arrays = [r for r in problem.graph.results if r.kind != "matrix" or r.plane == 0]
    pairs = zip(arrays, got, strict=True)
    return [np.take(array, rows, axis=axes.get(result.kind, 1)) for result, array in pairs]
