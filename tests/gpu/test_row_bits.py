"""Rows of `batch_invariant` products, bit for bit, in batches of 1 to 512 rows."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from support.invariant_programs import INVARIANT_PROGRAMS, MOST, ROWS


def bits(array: Any) -> np.ndarray:
    found = np.asarray(array)
    return found.view(np.dtype(f"uint{8 * found.itemsize}"))


@pytest.mark.parametrize("name", INVARIANT_PROGRAMS)
def test_rows_have_the_same_bits_in_every_batch(name):
    program = INVARIANT_PROGRAMS[name]
    rows, *weights = (jax.device_put(x) for x in program.arguments())
    run = jax.jit(program.run)
    expected = [bits(x) for x in run(rows, *weights)]
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in run(rows, *weights))
    for m in ROWS:
        for first in {0, (MOST - m) // 2, MOST - m}:
            found = run(rows[first : first + m], *weights)
            for whole, part in zip(expected, found, strict=True):
                wrong = (bits(part) != whole[first : first + m]).sum()
                assert wrong == 0, f"{name}: {wrong} values of {m} rows from {first} differ"


@pytest.mark.parametrize("name", ["1536x7168", "squares"])
def test_other_rows_do_not_matter(name):
    program = INVARIANT_PROGRAMS[name]
    rows, *weights = (jax.device_put(x) for x in program.arguments())
    others = jax.device_put(program.arguments(seed=1)[0]).at[37].set(rows[37])
    run = jax.jit(program.run)
    for one, other in zip(run(rows, *weights), run(others, *weights), strict=True):
        assert (bits(one)[37] == bits(other)[37]).all()
        assert (bits(one)[38] != bits(other)[38]).any()
