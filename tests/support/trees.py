"""Trees of arrays, compared leaf by leaf."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def assert_equal(ours: Any, theirs: Any) -> None:
    """Asserts equal trees: structure, dtypes and values."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(other))
