"""Sizes of groups are what their kinds are called."""

from __future__ import annotations

import itertools

import group_sizes
import numpy as np
import pytest

pytestmark = pytest.mark.pure


def test_sizes_add_up():
    kinds = ("even", "uneven", "zipf", "half_empty", "single")
    shapes = ((0, 3), (1, 1), (5, 8), (1000, 7), (65536, 128))
    for kind, (total, groups) in itertools.product(kinds, shapes):
        sizes = group_sizes.KINDS[kind](total, groups, 3)
        assert sizes.dtype == np.int32 and sizes.shape == (groups,), kind
        assert sizes.sum() == total and (sizes >= 0).all(), (kind, total, groups)


def test_kinds_of_sizes_are_what_they_are_called():
    def sizes(kind):
        return group_sizes.KINDS[kind](10_000, 40, 1)

    assert np.ptp(sizes("even")) <= 1
    assert np.ptp(sizes("uneven")) > 100
    assert (np.sort(sizes("zipf"))[::-1][:3] == [2337, 1169, 779]).all()
    assert np.count_nonzero(sizes("half_empty")) <= 20
    assert (sizes("one_row") == 1).all()
    assert np.count_nonzero(sizes("single")) == 1
    assert not sizes("empty").any()
    assert sizes("under").sum() == 7000
    assert sizes("over").sum() == 13_001


def test_hostile_sizes_are_hostile():
    def sizes(kind):
        return group_sizes.HOSTILE[kind](1000, 40, 1).astype(np.int64)

    assert sizes("negative").min() == -(2**31) and (sizes("negative") > 0).any()
    assert sizes("huge").min() > 1000 and sizes("huge")[:32].sum() > 2**31
    assert (sizes("largest") == 2**31 - 1).all()
    assert {-(2**31), 2**31 - 1} <= set(sizes("late_largest"))
    assert (sizes("random_bits") < 0).any() and (sizes("random_bits") > 2**30).any()


def test_uneven_sizes_depend_on_their_seed_alone():
    first, again, other = (group_sizes.uneven(1000, 9, seed) for seed in (1, 1, 2))
    assert (first == again).all() and (first != other).any()
