"""The exact product, in float64 on the host, for operands of any layout.

Products of two 16-bit floats are exact in float64, and summing K of them there errs by less
than K * 2**-53, which is nothing beside the float32 accumulation that is tested.

A buffer is a flat array; `view` shows the (L, rows, columns) matrices that a problem's layout
places in it, so the same code reads padded, interleaved, transposed and shared operands.
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
import numpy as np

from ..problem import GemmProblem

Operand = Literal["a", "b", "d"]

# The indices of each operand's matrices: rows, columns.
INDICES: dict[Operand, tuple[str, str]] = {"a": ("m", "k"), "b": ("k", "n"), "d": ("m", "n")}


def shape_of(problem: GemmProblem, operand: Operand) -> tuple[int, int, int]:
    """Returns (L, rows, columns) of an operand's matrices."""
    rows, columns = INDICES[operand]
    return problem.l, getattr(problem, rows), getattr(problem, columns)


def strides_of(problem: GemmProblem, operand: Operand) -> tuple[int, int, int]:
    """Returns the distances in elements between matrices, rows and columns."""
    layout = getattr(problem, operand)
    row, column = (1 if layout.major == i else layout.leading_stride for i in INDICES[operand])
    return layout.batch_stride, row, column


def dtype_of(problem: GemmProblem, operand: Operand) -> np.dtype:
    return jnp.dtype(problem.d_dtype if operand == "d" else problem.ab_dtype)


def num_elements(problem: GemmProblem, operand: Operand) -> int:
    """Returns the elements from the operand's first to its last, gaps included."""
    extents, strides = shape_of(problem, operand), strides_of(problem, operand)
    return 1 + sum((e - 1) * s for e, s in zip(extents, strides, strict=True))


def view(problem: GemmProblem, operand: Operand, flat: np.ndarray) -> np.ndarray:
    """Returns the (L, rows, columns) matrices that lie in `flat`; a view, not a copy.

    Args:
      flat: (num_elements(problem, operand) or more,), whose first element is the operand's.

    Raises:
      ValueError: `flat` is too short for the layout.
    """
    need = num_elements(problem, operand)
    if flat.ndim != 1 or flat.size < need:
        raise ValueError(f"{operand} spans {need} elements; the buffer has shape {flat.shape}")
    return np.lib.stride_tricks.as_strided(
        flat,
        shape_of(problem, operand),
        [s * flat.itemsize for s in strides_of(problem, operand)],
    )


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns a @ b in float64: (..., M, K) times (..., K, N)."""
    return np.matmul(a.astype(np.float64), b.astype(np.float64))


def magnitude(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns |a| @ |b| in float64: what rounding errors of a @ b are proportional to."""
    return np.matmul(np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64)))


def integer_product(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns the one right answer, in `dtype`, for operands of small integers.

    Any order of summation is exact in float32 while sums stay under 2**24, so a correct kernel
    returns these very values: the exact sum, rounded once, to nearest even.
    """
    exact = np.matmul(a.astype(np.float32), b.astype(np.float32))
    assert np.abs(exact).max(initial=0) < 2**24, "sums too large to be exact in float32"
    return exact.astype(dtype)
