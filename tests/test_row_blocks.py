"""Rows of groups in whole blocks: where each lies, for any sizes and rule of groups."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jax_hopper_gemm.gemm.groups import Groups
from jax_hopper_gemm.gemm.spec import PROMOTION_K
from jax_hopper_gemm.primitives.group_sizes import row_blocks

CASES = [
    (Groups.plain(4), [40, 0, 130, 17], 200),
    (Groups.plain(3), [0, 0, 0], 50),
    (Groups.plain(3), [128, 256, 128], 512),
    (Groups.plain(3), [-5, 1000, 7], 300),  # the second has all rows
    (Groups(period=5, count=3, first=1), [70, 1, 129, 5], 260),  # of other devices before
    (Groups(period=3, count=2, step=2), [10, 0, 190, 150, 3], 400),  # of a batch
]


def expected(groups: Groups, sizes: list[int], length: int) -> tuple[list[int], list[int]]:
    """Returns the sizes of the runs in blocks, and the rows there; -1 is padding."""
    padded, rows, start = [], [], 0
    for run, size in enumerate(sizes):
        end = min(start + max(size, 0), length)
        own = list(range(start, end)) if groups.matrix_of(run, len(sizes)) >= 0 else []
        own += [-1] * (-len(own) % PROMOTION_K)
        padded.append(len(own))
        rows += own
        start = end
    return padded, rows


@pytest.mark.slow
@pytest.mark.parametrize("groups, sizes, length", CASES)
def test_rows_of_each_group_begin_a_block(groups, sizes, length):
    padded, rows = expected(groups, sizes, length)

    @jax.jit
    def run(sizes: Any, x: Any) -> Any:
        found = row_blocks(sizes, groups, length)
        return found.sizes, found.rows, found.of(x)

    x = np.arange(1, length + 1, dtype=np.float32)[:, None]
    sizes_found, rows_found, of_x = map(np.asarray, run(np.array(sizes, np.int32), x))
    assert sizes_found.tolist() == padded
    assert rows_found.size % PROMOTION_K == 0 and rows_found.size >= len(rows)
    taken = of_x[:, 0].astype(int).tolist()
    assert taken[: len(rows)] == [row + 1 for row in rows]
    assert not any(taken[len(rows) :])


@pytest.mark.slow
def test_padding_is_bounded_by_a_block_for_each_group():
    groups, length = Groups.plain(6), 1000
    rows = jax.eval_shape(lambda x: row_blocks(x, groups, length).rows, np.zeros(6, np.int32))
    assert rows.size <= length + 127 * 6
