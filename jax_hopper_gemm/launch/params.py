"""Parameters of a kernel at its launch: tensor maps over matrices, scalars, pointers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..gemm import grid
from ..gemm.dtypes import DTYPES
from ..gemm.group_search import SPAN_EXTENT
from ..gemm.kernel_params import BATCH_MODES, ParamKind
from ..gemm.problem import GemmProblem, MatrixLayout
from ..gemm.spec import TMA_ALIGNMENT
from ..gemm.tma_box import TmaBox

# Values of CUtensorMapSwizzle in cuda.h.
TENSOR_MAP_SWIZZLE = {0: 0, 32: 1, 64: 2, 128: 3}


@dataclass(frozen=True)
class TensorMap:
    """A kernel parameter: a tiled `CUtensorMap` over one buffer, dimension 0 contiguous."""

    kind: ClassVar[ParamKind] = "tensor_map"
    buffer: int  # index among the call's operands, then results
    dtype: str  # of an element
    dims: tuple[int, ...]  # extents in elements
    strides: tuple[int, ...]  # bytes between neighbours, for every dimension but the first
    box: tuple[int, ...]  # elements one copy moves, along each dimension
    swizzle: int  # bytes of the shared-memory swizzle: 0, 32, 64 or 128
    offset: int = 0  # bytes from the buffer's start to the first element; a multiple of 16
    rounds: bool = False  # whether copies round to the digits that the tensor cores read

    @property
    def data_type(self) -> int:
        """The value of `CUtensorMapDataType` in cuda.h."""
        row = DTYPES[self.dtype]
        return row.rounding_map if self.rounds else row.tensor_map

    def encode(self) -> list[int]:
        return [
            0, self.buffer, self.offset, self.data_type,
            TENSOR_MAP_SWIZZLE[self.swizzle], len(self.dims), *self.dims, *self.strides, *self.box,
        ]  # fmt: skip


@dataclass(frozen=True)
class Int32:
    """A kernel parameter: a signed 32-bit scalar."""

    kind: ClassVar[ParamKind] = "int32"
    value: int

    def encode(self) -> list[int]:
        return [1, self.value]


@dataclass(frozen=True)
class Pointer:
    """A kernel parameter: the device address of a buffer."""

    kind: ClassVar[ParamKind] = "pointer"
    buffer: int

    def encode(self) -> list[int]:
        return [2, self.buffer]


Param = TensorMap | Int32 | Pointer


def batch_axes(problem: GemmProblem, layout: MatrixLayout, matrices: int) -> list[tuple[int, int]]:
    """Returns extent and stride of the axes of an array's batch, in all of `matrices`."""
    if not problem.outer:
        return [(matrices, layout.batch_stride)]
    axes = problem.batch_axes(layout)
    return axes + [(1, 0)] * (len(BATCH_MODES) - len(axes))


def outer_dims(axes: list[tuple[int, int]], dtype: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the dimensions of a tensor map behind the contiguous one, and their strides in bytes.

    The stride of a dimension of extent 1 is never used: 16 will do.
    """
    nbytes = DTYPES[dtype].nbytes
    strides = (nbytes(stride) if extent > 1 else TMA_ALIGNMENT for extent, stride in axes)
    return tuple(extent for extent, _ in axes), tuple(strides)


def span_map(
    buffer: int,
    dtype: str,
    layout: MatrixLayout,
    contiguous: int,
    length: int,
    box: TmaBox,
    offset: int = 0,
) -> TensorMap:
    """Returns the map over rows of which a copy can be told where to stop.

    Row r of a span of `size` rows that ends at row `end` has the coordinates (SPAN_EXTENT - size +
    r, end, SPAN_EXTENT): so r >= size is outside of the map, which loads as zeros and is not
    stored. The three add up to row end - size + r, modulo 2**64 bytes. There are `length` rows of
    `contiguous` elements.
    """
    stride = layout.leading_stride * DTYPES[dtype].itemsize
    return TensorMap(
        buffer, dtype, dims=(contiguous, SPAN_EXTENT, length + 1, SPAN_EXTENT + 1),
        strides=(stride, stride, grid.WRAP_BYTES - stride), box=(box.contiguous, box.other, 1, 1),
        swizzle=box.swizzle, offset=offset,
    )  # fmt: skip


def tensor_map(
    buffer: int,
    dtype: str,
    layout: MatrixLayout,
    extents: dict[str, int],
    batch: list[tuple[int, int]],
    box: TmaBox,
    offset: int = 0,
) -> TensorMap:
    contiguous = extents.pop(layout.major) // DTYPES[dtype].packed
    (other,) = extents.values()
    dims, strides = outer_dims([(other, layout.leading_stride), *batch], dtype)
    return TensorMap(
        buffer, dtype, (contiguous, *dims), strides,
        box=(box.contiguous, box.other, *(1,) * len(batch)), swizzle=box.swizzle, offset=offset,
    )  # fmt: skip
