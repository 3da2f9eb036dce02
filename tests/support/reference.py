"""The exact product, in float64 on the host, for operands of any layout.

Products of two 16-bit floats are exact in float64, and summing K of them there errs by less
than K * 2**-53, which is nothing beside the float32 accumulation that is tested.

A buffer is a flat array; `view` shows the (L, rows, columns) matrices that a problem's layout
places in it, so the same code reads padded, interleaved, transposed and shared operands.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from support.places import Operand, Place, factor_places, shape_of, strided, strides_of

from jax_hopper_gemm.gemm.grid import ceil_div
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.spec import PROMOTION_K


def dtype_of(problem: GemmProblem, operand: Operand) -> np.dtype:
    return jnp.dtype(getattr(problem, f"{operand}_dtype"))


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
    return strided(
        flat, shape_of(problem, operand), [s * flat.itemsize for s in strides_of(problem, operand)]
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


def input_places(problem: GemmProblem) -> list[tuple[Place, ...]]:
    """Returns what lies in each buffer that a kernel reads.

    A, B, up, the epilogue's operands; sizes of groups, indices of gathered rows; the index of a
    matrix. Gate and up are two places, in two buffers or in one. Operands are (L, M, N), rows
    (L, N), columns (L, M), scalars (L,); where rows are grouped, the first and third have L = 1.
    """
    found, groups = factor_places(problem), problem.groups
    if groups:
        found.append((Place.compact((groups.num_sizes,), "int32"),))
        if groups.gathered:
            length = problem.m if groups.axis == "m" else problem.k
            found.append((Place.compact((length,), "int32"),))
    if problem.indexed:
        found.append((Place.compact((1,), "int32"),))
    if problem.k_group:
        groups = -(-problem.k // problem.k_group)
        matrices = problem.l if problem.b.batch_stride else 1
        scales = Place.compact((matrices, groups, problem.n), "float32")
        found += [(scales,)] * problem.graph.accumulators
    for scales in (problem.a_scales, problem.b_scales):
        if scales:
            along_k, length = ceil_div(problem.k, PROMOTION_K), scales.k_stride
            matrices = problem.l if scales.batch_stride else 1
            found.append((Place.compact((matrices, along_k, length), "float32"),))
    return found


def scaled(problem: GemmProblem, inputs: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns A and B times their scales, in float64; A is one matrix of grouped rows.

    `inputs` are `trial.Inputs`.
    """
    found = []
    if problem.k_group:
        each = np.repeat(inputs.scales[0].astype(np.float64), problem.k_group, 1)[:, : problem.k]
        return inputs.a.astype(np.float64), inputs.b[0].astype(np.float64) * each
    arrays = (inputs.a, problem.a_scales), (np.swapaxes(inputs.b[0], 1, 2), problem.b_scales)
    for (values, scales), array in zip(arrays, inputs.scales, strict=True):
        assert scales
        each = np.repeat(np.repeat(np.swapaxes(array, 1, 2), scales.block, 1), PROMOTION_K, 2)
        found.append(values.astype(np.float64) * each[:, : values.shape[1], : values.shape[2]])
    return found[0], np.swapaxes(found[1], 1, 2)
