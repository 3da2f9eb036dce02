"""Where a kernel's operands and results lie in flat buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from jax_hopper_gemm.gemm.grid import result_shapes
from jax_hopper_gemm.gemm.problem import GemmProblem, MatrixLayout
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.testing.shapes import Operand

# The indices of each operand's matrices: rows, columns.
INDICES: dict[Operand, tuple[str, str]] = {"a": ("m", "k"), "b": ("k", "n"), "d": ("m", "n")}


def shape_of(problem: GemmProblem, operand: Operand) -> tuple[int, int, int]:
    """Returns (L, rows, columns) of an operand's matrices.

    L is 1 of an operand whose rows or columns are grouped; gathered, it has as many of them as
    its source. Of one matrix of a stack it is that of the stack.
    """
    names = ["stored_k" if index == "k" else index for index in INDICES[operand]]
    groups, extents = problem.groups, [getattr(problem, name) for name in names]
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


def strided(flat: np.ndarray, shape: Sequence[int], steps: Sequence[int]) -> np.ndarray:
    """Returns a view with strides in bytes. NumPy makes none of dtypes that are not its own."""
    bits = flat.view(f"u{flat.itemsize}")
    return np.lib.stride_tricks.as_strided(bits, shape, steps).view(flat.dtype)


@dataclass(frozen=True)
class Place:
    """Where an array of any rank lies in a flat buffer.

    Attributes:
      shape, strides: of each axis; strides in elements.
      dtype: of the elements.
      offset: elements from the buffer's start to the array's.
      nest: extent and stride of each axis of a nested batch, outermost first; the first axis of
        `shape` then counts them all, and its stride means nothing.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    offset: int = 0
    nest: tuple[tuple[int, int], ...] = ()

    @classmethod
    def compact(cls, shape: tuple[int, ...], dtype: str) -> Place:
        strides = [1]
        for extent in reversed(shape[1:]):
            strides.insert(0, strides[0] * extent)
        return cls(shape, tuple(strides), dtype)

    @property
    def axes(self) -> list[tuple[int, int]]:
        """Extent and stride of each axis, those of a nested batch apart."""
        axes = list(zip(self.shape, self.strides, strict=True))
        return [*self.nest, *axes[1:]] if self.nest else axes

    @property
    def end(self) -> int:
        """One past the last element."""
        steps = self.axes
        return self.offset + 1 + sum((extent - 1) * stride for extent, stride in steps)

    def view(self, flat: np.ndarray) -> np.ndarray:
        """Returns the array that lies in `flat`, of this dtype or one as large; not a copy.

        Of a nested batch each axis is one of the array's.

        Raises:
          ValueError: `flat` is too short.
        """
        if flat.ndim != 1 or flat.size < self.end:
            raise ValueError(f"{self} spans {self.end} elements; the buffer has {flat.shape}")
        shape, strides = zip(*self.axes, strict=True) if self.axes else ((), ())
        steps = [stride * flat.itemsize for stride in strides]
        return strided(flat[self.offset :], shape, steps)


def factor_places(problem: GemmProblem) -> list[tuple[Place, ...]]:
    """Returns what lies in the buffers of `input_places` that hold numbers to calculate with."""
    p = problem
    a = Place(shape_of(p, "a"), strides_of(p, "a"), p.a_dtype, nest=_nest(p, p.a))
    gate, *others = (
        Place(shape_of(x, "b"), strides_of(x, "b"), p.b_dtype, nest=_nest(p, p.b)) for x in p.apart
    )
    buffers: list[tuple[Place, ...]] = [(a,), (gate,), *((panel,) for panel in others)]
    if p.gated and p.up_offset is None:
        buffers.append((gate,))
    elif p.up_offset is not None:
        buffers[1] += (replace(gate, offset=p.up_offset),)
    along_rows = shape_of(p, "d")[0]
    operands = (
        (*pair, each.n)
        for each in p.apart
        for pair in zip(p.graph.operands, each.operands, strict=True)
    )
    for operand, layout, n in operands:
        apart = layout.leading_stride
        count, shape, strides = {
            "matrix": (along_rows, (p.m, n), (apart, 1) if layout.major == "n" else (1, apart)),
            "row": (p.l, (n,), (1,)),
            "column": (along_rows, (p.m,), (1,)),
            "scalar": (p.l, (), ()),
        }[operand.kind]
        strides = (layout.batch_stride, *strides)
        buffers.append((Place((count, *shape), strides, operand.dtype, nest=_nest(p, layout)),))
    return buffers


def _nest(problem: GemmProblem, layout: MatrixLayout) -> tuple[tuple[int, int], ...]:
    return tuple(problem.batch_axes(layout)[::-1]) if problem.outer else ()


def result_places(problem: GemmProblem, spec: GemmSpec) -> list[Place]:
    """Returns where each array that a kernel writes lies in its buffer.

    Matrices lie as D does; pairs of planes and reductions are compact.
    """
    arrays = [r for r in problem.graph.results if r.kind != "matrix" or r.plane == 0]
    of_panels, places = product(problem.apart, arrays), []
    for (panel, result), (shape, dtype) in zip(
        of_panels, result_shapes(problem, spec), strict=True
    ):
        if result.kind == "matrix" and result.planes == 1:
            strides = strides_of(panel, "d")
            places.append(Place(shape, strides, dtype, nest=_nest(problem, problem.d)))
        else:
            places.append(Place.compact(shape, dtype))
    return places
