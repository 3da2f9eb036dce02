"""The exact product, in float64 on the host, for operands of any layout.

Products of two 16-bit floats are exact in float64, and summing K of them there errs by less
than K * 2**-53, which is nothing beside the float32 accumulation that is tested.

A buffer is a flat array; `view` shows the (L, rows, columns) matrices that a problem's layout
places in it, so the same code reads padded, interleaved, transposed and shared operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np

from ..gemm.grid import result_shapes
from ..gemm.problem import GemmProblem
from ..gemm.spec import GemmSpec

Operand = Literal["a", "b", "d"]

# The indices of each operand's matrices: rows, columns.
INDICES: dict[Operand, tuple[str, str]] = {"a": ("m", "k"), "b": ("k", "n"), "d": ("m", "n")}


def shape_of(problem: GemmProblem, operand: Operand) -> tuple[int, int, int]:
    """Returns (L, rows, columns) of an operand's matrices.

    L is 1 of an operand whose rows or columns are grouped; gathered, it has as many of them as
    its source. Of one matrix of a stack it is that of the stack.
    """
    groups, extents = problem.groups, [getattr(problem, index) for index in INDICES[operand]]
    if groups is None or groups.axis not in INDICES[operand]:
        matrices = problem.stack if problem.indexed == operand else problem.l
        return matrices, extents[0], extents[1]
    if groups.gathered == operand:
        extents[INDICES[operand].index(groups.axis)] = groups.source_rows
    return 1, extents[0], extents[1]


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


@dataclass(frozen=True)
class Place:
    """Where an array of any rank lies in a flat buffer.

    Attributes:
      shape, strides: of each axis; strides in elements.
      dtype: of the elements.
      offset: elements from the buffer's start to the array's.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    offset: int = 0

    @classmethod
    def compact(cls, shape: tuple[int, ...], dtype: str) -> Place:
        strides = [1]
        for extent in reversed(shape[1:]):
            strides.insert(0, strides[0] * extent)
        return cls(shape, tuple(strides), dtype)

    @property
    def end(self) -> int:
        """One past the last element."""
        steps = zip(self.shape, self.strides, strict=True)
        return self.offset + 1 + sum((extent - 1) * stride for extent, stride in steps)

    def view(self, flat: np.ndarray) -> np.ndarray:
        """Returns the array that lies in `flat`, of this dtype or one as large; not a copy.

        Raises:
          ValueError: `flat` is too short.
        """
        if flat.ndim != 1 or flat.size < self.end:
            raise ValueError(f"{self} spans {self.end} elements; the buffer has {flat.shape}")
        strides = [stride * flat.itemsize for stride in self.strides]
        return np.lib.stride_tricks.as_strided(flat[self.offset :], self.shape, strides)


def input_places(problem: GemmProblem) -> list[tuple[Place, ...]]:
    """Returns what lies in each buffer that a kernel reads.

    A, B, up, the epilogue's operands; sizes of groups, indices of gathered rows; the index of a
    matrix. Gate and up are
    two places, in two buffers or in one. Operands are (L, M, N), rows (L, N), columns (L, M),
    scalars (L,); where rows are grouped, the first and third have L = 1.
    """
    found, groups = factor_places(problem), problem.groups
    if groups:
        found.append((Place.compact((groups.num_sizes,), "int32"),))
        if groups.gathered:
            length = problem.m if groups.axis == "m" else problem.k
            found.append((Place.compact((length,), "int32"),))
    if problem.indexed:
        found.append((Place.compact((1,), "int32"),))
    return found


def factor_places(problem: GemmProblem) -> list[tuple[Place, ...]]:
    """Returns what lies in the buffers of `input_places` that hold numbers to calculate with."""
    p = problem
    a, gate = (Place(shape_of(p, x), strides_of(p, x), p.ab_dtype) for x in ("a", "b"))
    buffers: list[tuple[Place, ...]] = [(a,), (gate,)]
    if p.gated and p.up_offset is None:
        buffers.append((gate,))
    elif p.up_offset is not None:
        buffers[1] += (Place(gate.shape, gate.strides, gate.dtype, p.up_offset),)
    along_rows = shape_of(p, "d")[0]
    for operand, layout in zip(p.graph.operands, p.operands, strict=True):
        count, shape, strides = {
            "matrix": (along_rows, (p.m, p.n), (layout.leading_stride, 1)),
            "row": (p.l, (p.n,), (1,)),
            "column": (along_rows, (p.m,), (1,)),
            "scalar": (p.l, (), ()),
        }[operand.kind]
        place = Place((count, *shape), (layout.batch_stride, *strides), operand.dtype)
        buffers.append((place,))
    return buffers


def result_places(problem: GemmProblem, spec: GemmSpec) -> list[Place]:
    """Returns where each array that a kernel writes lies in its buffer.

    Matrices lie as D does; pairs of planes and reductions are compact.
    """
    arrays = [r for r in problem.graph.results if r.kind != "matrix" or r.plane == 0]
    places = []
    for result, (shape, dtype) in zip(arrays, result_shapes(problem, spec), strict=True):
        if result.kind == "matrix" and result.planes == 1:
            places.append(Place(shape, strides_of(problem, "d"), dtype))
        else:
            places.append(Place.compact(shape, dtype))
    return places


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
