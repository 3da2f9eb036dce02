"""Casts as `jax.numpy.astype` does them, on NumPy's arrays."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np


def cast(x: np.ndarray, dtype: str) -> np.ndarray:
    """Returns numbers in another dtype; int8 saturates, and NaN is 0 there."""
    if dtype != "int8":
        return x.astype(jnp.dtype(dtype))
    whole = np.trunc(np.where(np.isnan(x), 0, x))
    return np.clip(whole, -128, 127).astype(np.int8)


def same(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Whether elements are the same number; a NaN is another NaN's equal."""
    return (x == y) | ((x != x) & (y != y))
