"""Runs of one program, which give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def assert_same_bits(run: Callable[..., Any], arguments: Sequence[Any], repeats: int = 20) -> None:
    """Checks results of 16 bits, none of which may be zeros alone."""
    first = [np.asarray(x).view("u2") for x in run(*arguments)]
    assert all(np.any(x) for x in first)
    for _ in range(repeats):
        for one, other in zip(first, run(*arguments), strict=True):
            assert np.array_equal(one, np.asarray(other).view("u2"))
