"""Groups along an axis, counted and numbered."""

from __future__ import annotations

import itertools

import pytest

from jax_hopper_gemm.gemm.groups import (
    DGRAD,
    FORMS,
    VARLEN_K,
    VARLEN_M_KN,
    VARLEN_M_NK,
    GroupedAxis,
    Groups,
    gate_up_letter,
    is_varlen_k,
    weights_in_order,
)
from jax_hopper_gemm.gemm.subscripts import Subscripts


def test_groups_number_their_matrices():
    plain = Groups.plain(8)
    assert (plain.total(8), plain.matrices(8)) == (8, 8)
    batched = Groups(9, 8, step=8)
    assert (batched.total(3 * 9), batched.matrices(3 * 9)) == (24, 24)
    shared = Groups(9, 8)
    assert (shared.total(3 * 9), shared.matrices(3 * 9)) == (24, 8)
    local = Groups(6, 3, first=1)
    assert (local.total(5), local.matrices(5)) == (3, 3)
    assert (local.total(2), local.matrices(2)) == (1, 1)  # the sizes end within the groups
    assert (local.total(1), local.matrices(1)) == (0, 0)


def test_counts_follow_the_matrix_of_each_run():
    for period, count, first, num_sizes in itertools.product(range(1, 6), repeat=4):
        if first - 1 + count > period:
            continue
        for step in (0, count):
            groups = Groups(period, count, first - 1, step)
            matrices = [groups.matrix_of(run, num_sizes) for run in range(num_sizes + 1)]
            owned = [matrix for matrix in matrices if matrix >= 0]
            axis = GroupedAxis("m", num_sizes, groups)
            assert matrices[-1] == -1  # what the sizes leave over
            assert axis.total == len(owned)
            whole_periods = (num_sizes + 1) % period == 0
            if owned or whole_periods:
                assert axis.matrices == max(owned, default=-1) + 1


def test_periods_are_whole_ones():
    assert Groups(4, 3).periods(7) == 2
    with pytest.raises(AssertionError, match="8 runs are no whole periods of 3"):
        Groups(3, 2).periods(7)


def test_one_size_for_each_group_is_plain():
    assert Groups.plain(3).is_plain(3)
    assert not Groups.plain(3).is_plain(7)
    assert not Groups(5, 3, first=1).is_plain(4)


def test_forms_are_each_others_gradients():
    assert [is_varlen_k(form) for form in FORMS] == [False, False, True]
    assert GroupedAxis.of(VARLEN_K, Groups.plain(2), 2).axis == "k"
    assert GroupedAxis.of(VARLEN_M_NK, Groups.plain(2), 2).axis == "m"
    for form, dgrad in DGRAD.items():
        swapped = {"k": "n", "n": "k"}  # the gradient has K columns of a cotangent with N
        renamed = "".join(swapped.get(x, x) for x in str(form.transpose_lhs()))
        assert renamed == str(dgrad)
    assert DGRAD[VARLEN_M_KN] == VARLEN_M_NK


@pytest.mark.parametrize(
    "text, letter, in_order",
    [
        ("mk,gkn->mn", "", True), ("mk,gnk->mn", "", True), ("mk,kgn->mn", "", False),
        ("mk,gkcn->mn", "c", True), ("mk,gckn->mn", "c", True), ("mk,gknc->mn", "c", False),
    ],
)  # fmt: skip
def test_weights_hold_gate_and_up_along_a_letter_of_their_own(text, letter, in_order):
    subscripts = Subscripts.parse(text)
    assert gate_up_letter(subscripts) == letter
    assert weights_in_order(subscripts) == in_order
