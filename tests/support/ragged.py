"""What tests of ragged products on the CPU share: operands, and what a loop makes of them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from support.program_inspection import integers

T, K, N, G = 12, 3, 4, 3
LHS, RHS = integers((T, K)), integers((G, K, N), seed=1)
SIZES = jax.device_put(np.array([3, 0, 5]))


def by_loop(lhs: Any, rhs: Any, sizes: Any) -> np.ndarray:
    lhs, rhs = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64)
    out, start = np.zeros((len(lhs), rhs.shape[2])), 0
    for matrix, size in zip(rhs, np.maximum(np.asarray(sizes), 0), strict=True):
        end = start + int(size)
        out[start:end] = lhs[start:end] @ matrix
        start = end
    return out


def numbers(contracting: Any, batch: Any, ragged: Any, group: int | None) -> Any:
    return lax.RaggedDotDimensionNumbers(
        (contracting, batch), [ragged], [] if group is None else [group]
    )
