"""Shares of a ragged product: every row meets its matrix on one device, and on no other."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_hopper_gemm.gemm.groups import Groups
from jax_hopper_gemm.primitives.group_sizes import group_of_rows, sizes_of_each
from jax_hopper_gemm.primitives.ragged_dot_sharded import Part, RaggedShard

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
PARTS = [(1, 1), (8, 1), (1, 4), (2, 2), (3, 4)]


def matrices_of_rows(sizes: Any, rule: Groups, length: int) -> jax.Array:
    """Returns for each row and matrix whether it belongs to it, for each of several sizes."""
    numbers = np.arange(rule.matrices(sizes.shape[-1]))
    each = jax.vmap(lambda x: group_of_rows(x, rule, length))
    return each(sizes)[..., None] == numbers


def assert_each_once(
    sizes: Any, rule: Groups, length: int, periods: int, rows: int, groups: int
) -> None:
    """Checks that the devices' rows and matrices make the whole, each pair found once.

    Args:
      sizes: several, (., S).
    """
    whole_periods = rule.periods(sizes.shape[-1])
    own_length = length // (periods * rows)

    def of_device(p: Any, m: Any, g: Any) -> jax.Array:
        share = RaggedShard(rule, Part(p, periods), Part(m, rows), Part(g, groups))
        own = jax.vmap(lambda x: share.own_sizes(x, length))(sizes)
        assert own.dtype == np.int32
        return matrices_of_rows(own, share.own_rule(), own_length)

    places = list(itertools.product(range(periods), range(rows), range(groups)))
    shares = jax.jit(jax.vmap(of_device))(
        *(np.array(x, np.int32) for x in zip(*places, strict=True))
    )
    whole = jax.jit(matrices_of_rows, static_argnums=(1, 2))(sizes, rule, length)
    expected = np.asarray(whole).astype(int)
    own_periods = whole_periods // periods
    matrix_periods = whole_periods if rule.step else 1
    expected = expected.reshape(
        len(sizes), whole_periods, length // whole_periods, matrix_periods, rule.count
    )
    found = np.zeros_like(expected)
    per_period, count = length // whole_periods // rows, rule.count // groups
    own_matrices = own_periods if rule.step else 1
    for (p, m, g), share in zip(places, np.asarray(shares), strict=True):
        share = share.reshape(len(sizes), own_periods, per_period, own_matrices, count)
        matrices = slice(p * own_periods, (p + 1) * own_periods) if rule.step else slice(None)
        found[
            :, p * own_periods : (p + 1) * own_periods, m * per_period : (m + 1) * per_period,
            matrices, g * count : (g + 1) * count,
        ] += share  # fmt: skip
    np.testing.assert_array_equal(found, expected)


ALL = np.array(list(SIZES.values()), np.int32)


@pytest.mark.parametrize("rows, groups", PARTS)
def test_each_row_meets_its_matrix_once(rows, groups):
    assert_each_once(ALL, Groups.plain(GROUPS), LENGTH, 1, rows, groups)


@pytest.mark.parametrize("rows, groups", PARTS)
def test_rows_of_other_devices_stay_without_group(rows, groups):
    rule = Groups(period=GROUPS + 2, count=GROUPS, first=1)
    sizes = np.pad(ALL, ((0, 0), (1, 0)), constant_values=3)
    assert_each_once(sizes, rule, LENGTH, 1, rows, groups)


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, GROUPS])
@pytest.mark.parametrize("rows, groups", PARTS)
def test_periods_that_are_whole_on_each_device(step, rows, groups):
    sizes = sizes_of_each(jnp.array(ALL), LENGTH, len(ALL))[None]
    rule = Groups(period=GROUPS + 1, count=GROUPS, step=step)
    assert_each_once(sizes, rule, LENGTH * len(ALL), 1, rows, groups)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("periods, rows, groups", [(2, 1, 1), (3, 4, 1), (6, 1, 4), (2, 2, 2)])
def test_matrices_of_periods_go_with_their_rows(first, periods, rows, groups):
    each = np.pad(ALL[1:], ((0, 0), (first, 0)), constant_values=2)
    sizes = sizes_of_each(jnp.array(each), LENGTH, 6)[None]
    rule = Groups(period=GROUPS + 1 + first, count=GROUPS, first=first, step=GROUPS)
    assert_each_once(sizes, rule, LENGTH * 6, periods, rows, groups)


def test_spans_are_as_given_where_no_matrix_is_elsewhere():
    rule = Groups(period=7, count=4, first=2)
    assert RaggedShard(rule, rows=Part(1, 2)).own_rule() is rule
