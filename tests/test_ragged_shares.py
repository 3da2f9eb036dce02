"""Shares of a ragged product: every row meets its matrix on one device, and on no other."""

from __future__ import annotations

import itertools
from collections import Counter

import jax
import numpy as np
import pytest

from jax_hopper_gemm.ragged_shares import Part, RaggedShare
from jax_hopper_gemm.span_sizes import group_of_rows, sizes_of_each
from jax_hopper_gemm.spans import Spans

LENGTH, GROUPS = 24, 4
SIZES = {
    "even": [6, 6, 6, 6],
    "uneven": [1, 13, 0, 10],
    "one group": [0, 0, 24, 0],
    "none": [0, 0, 0, 0],
    "too few": [3, 0, 5, 2],
    "too many": [9, 2, 30, 4],
    "negative": [5, -3, 2**31 - 1, -(2**31)],
}
PARTS = [(1, 1), (2, 1), (8, 1), (1, 2), (1, 4), (2, 2), (3, 4)]


def pairs(sizes: jax.Array, spans: Spans, length: int) -> list[tuple[int, int]]:
    """Returns the rows that belong to a matrix, each with its number."""
    owners = np.asarray(group_of_rows(sizes, spans, length))
    return [(row, int(matrix)) for row, matrix in enumerate(owners) if matrix >= 0]


def assert_each_once(
    sizes: jax.Array, spans: Spans, length: int, periods: int, rows: int, groups: int
) -> None:
    """Checks the pairs of all devices, each in numbers of the whole product."""
    found: Counter[tuple[int, int]] = Counter()
    own_length = length // (periods * rows)
    own_periods = spans.periods(sizes.shape[0]) // periods
    own_groups = spans.count // groups
    for p, m, g in itertools.product(range(periods), range(rows), range(groups)):
        share = RaggedShare(spans, Part(p, periods), Part(m, rows), Part(g, groups))
        own = share.local_sizes(sizes, length)
        assert own.dtype == np.int32
        for row, matrix in pairs(own, share.local_spans(), own_length):
            period, place = divmod(matrix, own_groups) if spans.step else (0, matrix)
            whole = (p * own_periods + period) * spans.step + g * own_groups + place
            found[(p * rows + m) * own_length + row, whole] += 1
    assert found == Counter(pairs(sizes, spans, length))


@pytest.mark.parametrize("rows, groups", PARTS)
@pytest.mark.parametrize("name", SIZES)
def test_each_row_meets_its_matrix_once(name, rows, groups):
    sizes = np.array(SIZES[name], np.int32)
    assert_each_once(sizes, Spans.plain(GROUPS), LENGTH, 1, rows, groups)


@pytest.mark.parametrize("rows, groups", PARTS)
def test_rows_of_other_devices_stay_without_group(rows, groups):
    spans = Spans(period=GROUPS + 2, count=GROUPS, first=1)
    assert_each_once(np.array([5, 3, 0, 7, 2], np.int32), spans, LENGTH, 1, rows, groups)


@pytest.mark.parametrize("step", [0, GROUPS])
@pytest.mark.parametrize("rows, groups", PARTS)
def test_periods_that_are_whole_on_each_device(step, rows, groups):
    sizes = sizes_of_each(np.array(list(SIZES.values()), np.int32), LENGTH, len(SIZES))
    spans = Spans(period=GROUPS + 1, count=GROUPS, step=step)
    assert_each_once(sizes, spans, LENGTH * len(SIZES), 1, rows, groups)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("periods, rows, groups", [(2, 1, 1), (3, 1, 2), (6, 1, 4), (6, 4, 1)])
def test_matrices_of_periods_go_with_their_rows(first, periods, rows, groups):
    each = np.array(list(SIZES.values()), np.int32)[:6]
    each = np.pad(each, ((0, 0), (first, 0)), constant_values=2)
    sizes = sizes_of_each(each, LENGTH, 6)
    spans = Spans(period=GROUPS + 1 + first, count=GROUPS, first=first, step=GROUPS)
    assert_each_once(sizes, spans, LENGTH * 6, periods, rows, groups)


def test_spans_are_as_given_where_no_matrix_is_elsewhere():
    spans = Spans(period=7, count=4, first=2)
    assert RaggedShare(spans, rows=Part(1, 2)).local_spans() is spans
