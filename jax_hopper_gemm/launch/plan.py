"""How a kernel is launched: grid, shared memory, tensor maps, scalars; all but the pointers.

A plan is data. `LaunchPlan.encode` turns it into the int64 words that travel in the HLO and
that `ffi/` decodes; the format is described there and carries `PLAN_VERSION`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..gemm.grid import (
    WRAP_BYTES,
    ceil_div,
    group_raster,
    launched_clusters,
    num_inputs,
    result_shapes,
)
from ..gemm.group_search import SPAN_EXTENT
from ..gemm.problem import ITEMSIZE, GemmProblem, MatrixLayout
from ..gemm.raster import make_raster
from ..gemm.spec import TMA_ALIGNMENT, GemmSpec, RasterOrder, TmaBox

PLAN_VERSION = 2

# Values of CUtensorMapDataType and CUtensorMapSwizzle in cuda.h.
TENSOR_MAP_DTYPE = {"bool": 0, "float16": 6, "float32": 7, "bfloat16": 9}
TENSOR_MAP_SWIZZLE = {0: 0, 32: 1, 64: 2, 128: 3}


@dataclass(frozen=True)
class TensorMap:
    """A kernel parameter: a tiled `CUtensorMap` over one buffer, dimension 0 contiguous.

    Attributes:
      buffer: index among the call's operands, then results.
      dtype: element dtype.
      dims: extents in elements, contiguous one first.
      strides: bytes between neighbours, for every dimension but the first.
      box: elements one copy moves, along each dimension.
      swizzle: bytes of the shared-memory swizzle: 0, 32, 64 or 128.
      offset: bytes from the buffer's start to the first element; a multiple of 16.
    """

    buffer: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    offset: int = 0

    def encode(self) -> list[int]:
        return [
            0, self.buffer, self.offset, TENSOR_MAP_DTYPE[self.dtype],
            TENSOR_MAP_SWIZZLE[self.swizzle], len(self.dims), *self.dims, *self.strides, *self.box,
        ]  # fmt: skip


@dataclass(frozen=True)
class Int32:
    """A kernel parameter: a signed 32-bit scalar."""

    value: int

    def encode(self) -> list[int]:
        return [1, self.value]


@dataclass(frozen=True)
class Pointer:
    """A kernel parameter: the device address of a buffer."""

    buffer: int

    def encode(self) -> list[int]:
        return [2, self.buffer]


@dataclass(frozen=True)
class Workspace:
    """Scratch memory: an extra result of the call, after those of the epilogue.

    Attributes:
      nbytes: size; a multiple of 4.
      cleared: whether the launcher sets it to zero before each launch.
    """

    nbytes: int
    cleared: bool


@dataclass(frozen=True)
class LaunchPlan:
    """One launch.

    Buffers are numbered: A 0, B 1, up where it has an array of its own, the epilogue's operands; of
    a grouped product the sizes, and the indices of gathered rows; of one that reads a stack the
    index; then the results, then workspaces.
    """

    grid: tuple[int, int, int]
    cluster: tuple[int, int, int]
    threads: int
    smem_bytes: int
    params: tuple[TensorMap | Int32 | Pointer, ...]
    workspaces: tuple[Workspace, ...] = ()
    first_workspace: int = 3

    def encode(self) -> tuple[int, ...]:
        """Returns int64 words: version, grid, cluster, threads, smem, cleared, params.

        `cleared` is a count, then (buffer, bytes) pairs; `params` a count, then the
        parameters in the kernel's order, each opened by its kind: 0 tensor map (buffer, offset,
        CUtensorMapDataType, CUtensorMapSwizzle, rank, dims, strides, box), 1 int32, 2 pointer.
        """
        cleared = [
            (self.first_workspace + i, w.nbytes) for i, w in enumerate(self.workspaces) if w.cleared
        ]
        words: list[int] = [PLAN_VERSION, *self.grid, *self.cluster, self.threads, self.smem_bytes]
        words += [len(cleared), *(word for pair in cleared for word in pair)]
        words += [len(self.params)]
        for param in self.params:
            words += param.encode()
        return tuple(words)


def make_plan(
    problem: GemmProblem, spec: GemmSpec, raster_order: RasterOrder, num_sms: int
) -> LaunchPlan:
    """Returns the launch of `spec`'s kernel on `problem`, on a GPU with `num_sms` SMs."""
    k_tiles = ceil_div(problem.k, spec.tile_k)
    clusters_m = ceil_div(problem.m, spec.tile_m * spec.raster_m)
    clusters_n = ceil_div(problem.n, spec.d_tile_n * spec.raster_n)
    params: list[TensorMap | Int32 | Pointer] = list(_operand_maps(problem, spec))
    params += [*_result_params(problem, spec), *_epilogue_params(problem, spec)]
    if groups := problem.groups:
        sizes = num_inputs(problem) - 1 - (groups.gathered is not None)
        params.append(Pointer(sizes))
        if groups.gathered:
            layout = problem.a if groups.gathered == "a" else problem.b
            width = {"k": problem.k, "m": problem.m, "n": problem.n}[layout.major]
            params += [
                Pointer(sizes + 1), Int32(groups.source_rows), Int32(width),
                Int32(layout.leading_stride),
            ]  # fmt: skip
        raster: tuple[int, ...] = group_raster(problem, spec, raster_order)
    else:
        if problem.indexed:
            params += [Pointer(num_inputs(problem) - 1), Int32(problem.stack)]
        raster = make_raster(
            clusters_m,
            clusters_n,
            problem.l,
            along_m=raster_order.along == "m",
            swizzle=raster_order.swizzle,
        )
    launched = launched_clusters(problem, spec, num_sms)
    params += [Int32(value) for value in (*raster, k_tiles)]
    if spec.graph.needs_extents:
        params += [Int32(problem.m), Int32(problem.n)]
    if spec.zero_fill_warp:
        params += [Pointer(num_inputs(problem)), *map(Int32, _rows_of_zeros(problem))]
    first_workspace = num_inputs(problem) + len(result_shapes(problem, spec))
    workspaces: tuple[Workspace, ...] = ()
    if spec.tile_scheduler == "dynamic":
        workspaces = (Workspace(nbytes=4, cleared=True),)
        params.append(Pointer(first_workspace))
    return LaunchPlan(
        grid=(spec.cluster_m * launched, spec.cluster_n, 1),
        cluster=(spec.cluster_m, spec.cluster_n, 1),
        threads=spec.threads,
        smem_bytes=spec.smem_bytes,
        params=tuple(params),
        workspaces=workspaces,
        first_workspace=first_workspace,
    )


def _rows_of_zeros(problem: GemmProblem) -> tuple[int, int, int, int]:
    """Returns a matrix of D as rows for `kernels.zeros`: how many, and in vectors of 16 bytes their
    length, their distance and that of the matrices. Rows without gaps between them are one."""
    p, size = problem, TMA_ALIGNMENT // ITEMSIZE[problem.d_dtype]
    rows, length, stride = p.m, p.n // size, p.d.leading_stride // size
    if length == stride:
        rows, length, stride = 1, rows * length, 0
    return rows, length, stride, p.d.batch_stride // size


def _operand_maps(problem: GemmProblem, spec: GemmSpec) -> list[TensorMap | Pointer]:
    """Returns the tensor maps of A and B, and of up where there is one.

    A gathered operand has none: it is read through a pointer.
    """
    p, axis = problem, spec.grouped
    offset_of_up = (p.up_offset or 0) * ITEMSIZE[p.ab_dtype]

    def a_map() -> TensorMap | Pointer:
        if spec.gathered == "a":
            return Pointer(0)
        if axis == "k":
            return _span_map(0, p.ab_dtype, p.a, p.m, p.k, spec.a_box)
        return _tensor_map(0, p.ab_dtype, p.a, {"m": p.m, "k": p.k}, p.matrices("a"), spec.a_box)

    def b_map(buffer: int, offset: int = 0) -> TensorMap | Pointer:
        if spec.gathered == "b":
            return Pointer(buffer)
        if axis == "k":
            return _span_map(buffer, p.ab_dtype, p.b, p.n, p.k, spec.b_box, offset)
        extents = {"n": p.n, "k": p.k}
        return _tensor_map(buffer, p.ab_dtype, p.b, extents, p.matrices("b"), spec.b_box, offset)

    maps = [a_map(), b_map(1)]
    if p.gated and p.up_offset is None:
        maps.append(b_map(2))
    elif p.up_offset is not None:
        maps.append(b_map(1, offset_of_up))
    return maps


def _result_params(problem: GemmProblem, spec: GemmSpec) -> list[TensorMap | Pointer]:
    """Returns the tensor maps of the matrices, the pointers of the other results, in order."""
    p, buffer = problem, num_inputs(problem) - 1
    params: list[TensorMap | Pointer] = []
    for result in p.graph.results:
        buffer += result.plane == 0
        if result.kind != "matrix":
            params.append(Pointer(buffer))
            continue
        layout, planes = p.d, result.planes
        if planes > 1:
            layout = MatrixLayout("n", planes * p.n, p.m * planes * p.n)
        offset = result.plane * p.n * ITEMSIZE[result.dtype]
        box = spec.epi_box(result.dtype)
        if spec.grouped == "m":
            params.append(_span_map(buffer, result.dtype, layout, p.n, p.m, box, offset))
            continue
        extents = {"m": p.m, "n": p.n}
        params.append(_tensor_map(buffer, result.dtype, layout, extents, p.l, box, offset))
    return params


def _epilogue_params(problem: GemmProblem, spec: GemmSpec) -> list[TensorMap | Pointer | Int32]:
    """Returns the epilogue's operands in order.

    A tensor map each; of a scalar a pointer and the distance, in elements, to the next matrix's.
    """
    p = problem
    first = 2 + (p.gated and p.up_offset is None)
    along_rows = 1 if spec.grouped == "m" else p.l  # arrays of an operand that varies along rows
    params: list[TensorMap | Pointer | Int32] = []
    for i, (operand, layout) in enumerate(zip(p.graph.operands, p.operands, strict=True)):
        if operand.kind == "scalar":
            params += [Pointer(first + i), Int32(layout.batch_stride)]
        elif operand.kind == "matrix":
            extents, box = {"m": p.m, "n": p.n}, spec.epi_box(operand.dtype)
            params.append(_tensor_map(first + i, operand.dtype, layout, extents, along_rows, box))
        else:
            row = operand.kind == "row"
            params.append(
                _vector_map(
                    first + i,
                    operand.dtype,
                    p.n if row else p.m,
                    layout.batch_stride,
                    p.l if row else along_rows,
                    spec.epi_tile_n if row else spec.column_elements(operand.dtype),
                )  # fmt: skip
            )
    return params


def _vector_map(
    buffer: int, dtype: str, extent: int, batch_stride: int, batches: int, box: int
) -> TensorMap:
    """Returns the map over one contiguous vector for each matrix of D; a copy reads `box` of it."""
    stride = _stride_bytes(batch_stride, batches, ITEMSIZE[dtype])
    return TensorMap(buffer, dtype, (extent, batches), (stride,), (box, 1), swizzle=0)


def _span_map(
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
    stored. The three add up to row end - size + r, modulo 2**64 bytes.

    Args:
      contiguous, length: extents along the rows, and number of rows.
    """
    stride = layout.leading_stride * ITEMSIZE[dtype]
    return TensorMap(
        buffer,
        dtype,
        dims=(contiguous, SPAN_EXTENT, length + 1, SPAN_EXTENT + 1),
        strides=(stride, stride, WRAP_BYTES - stride),
        box=(box.contiguous, box.other, 1, 1),
        swizzle=box.swizzle,
        offset=offset,
    )


def _tensor_map(
    buffer: int,
    dtype: str,
    layout: MatrixLayout,
    extents: dict[str, int],
    batches: int,
    box: TmaBox,
    offset: int = 0,
) -> TensorMap:
    contiguous = extents.pop(layout.major)
    (other,) = extents.values()
    itemsize = ITEMSIZE[dtype]
    return TensorMap(
        buffer,
        dtype,
        dims=(contiguous, other, batches),
        strides=(
            _stride_bytes(layout.leading_stride, other, itemsize),
            _stride_bytes(layout.batch_stride, batches, itemsize),
        ),
        box=(box.contiguous, box.other, 1),
        swizzle=box.swizzle,
        offset=offset,
    )


def _stride_bytes(stride: int, extent: int, itemsize: int) -> int:
    """Returns the stride in bytes; one of a dimension of extent 1 is never used: 16 will do."""
    return stride * itemsize if extent > 1 else TMA_ALIGNMENT
