"""How a kernel is launched: grid, shared memory, tensor maps, scalars; all but the pointers.

A plan is data. `LaunchPlan.encode` turns it into the int64 words that travel in the HLO and
that `ffi/` decodes; the format is described there and carries `PLAN_VERSION`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .problem import ITEMSIZE, GemmProblem, MatrixLayout
from .spec import GemmSpec, TmaBox, Traversal
from .walk import make_walk

PLAN_VERSION = 1

# Values of CUtensorMapDataType and CUtensorMapSwizzle in cuda.h.
TENSOR_MAP_DTYPE = {"float16": 6, "float32": 7, "bfloat16": 9}
TENSOR_MAP_SWIZZLE = {0: 0, 32: 1, 64: 2, 128: 3}
STRANDED_SMS = 12  # that clusters of four cannot use
TMA_ALIGNMENT = 16  # bytes: addresses and strides that a tensor map takes are multiples


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
    """

    buffer: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    def encode(self) -> list[int]:
        return [
            0, self.buffer, TENSOR_MAP_DTYPE[self.dtype], TENSOR_MAP_SWIZZLE[self.swizzle],
            len(self.dims), *self.dims, *self.strides, *self.box,
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
    """Scratch memory: an extra result of the call, after D.

    Attributes:
      nbytes: size; a multiple of 4.
      cleared: whether the launcher sets it to zero before each launch.
    """

    nbytes: int
    cleared: bool


@dataclass(frozen=True)
class LaunchPlan:
    """One launch. Buffers are numbered operands first (A 0, B 1), then D, then workspaces."""

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
        parameters in the kernel's order, each opened by its kind: 0 tensor map (buffer,
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
    problem: GemmProblem, spec: GemmSpec, traversal: Traversal, num_sms: int
) -> LaunchPlan:
    """Returns the launch of `spec`'s kernel on `problem`, on a GPU with `num_sms` SMs."""
    k_tiles = ceil_div(problem.k, spec.tile_k)
    clusters_m = ceil_div(problem.m, spec.tile_m * spec.cluster_m)
    clusters_n = ceil_div(problem.n, spec.tile_n * spec.cluster_n)
    clusters = clusters_m * clusters_n * problem.l
    launched = clusters
    if spec.tile_scheduler != "single":
        launched = persistent_clusters(clusters, max_clusters(spec, num_sms))
    params: list[TensorMap | Int32 | Pointer] = list(tensor_maps(problem, spec))
    walk = make_walk(
        clusters_m, clusters_n, problem.l,
        along_m=traversal.along == "m", swizzle=traversal.swizzle,
    )  # fmt: skip
    params += [Int32(value) for value in (*walk, k_tiles)]
    workspaces: tuple[Workspace, ...] = ()
    if spec.tile_scheduler == "dynamic":
        workspaces = (Workspace(nbytes=4, cleared=True),)
        params.append(Pointer(buffer=3))
    return LaunchPlan(
        grid=(spec.cluster_m * launched, spec.cluster_n, 1),
        cluster=(spec.cluster_m, spec.cluster_n, 1),
        threads=spec.threads,
        smem_bytes=spec.smem_bytes,
        params=tuple(params),
        workspaces=workspaces,
    )


def tensor_maps(problem: GemmProblem, spec: GemmSpec) -> tuple[TensorMap, TensorMap, TensorMap]:
    """Returns the tensor maps of A, B and D."""
    p = problem
    return (
        _tensor_map(0, p.ab_dtype, p.a, {"m": p.m, "k": p.k}, p.l, spec.a_box),
        _tensor_map(1, p.ab_dtype, p.b, {"n": p.n, "k": p.k}, p.l, spec.b_box),
        _tensor_map(2, p.d_dtype, p.d, {"m": p.m, "n": p.n}, p.l, spec.d_box),
    )


def _tensor_map(
    buffer: int,
    dtype: str,
    layout: MatrixLayout,
    extents: dict[str, int],
    batches: int,
    box: TmaBox,
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
    )


def _stride_bytes(stride: int, extent: int, itemsize: int) -> int:
    """Returns the stride in bytes; one of a dimension of extent 1 is never used: 16 will do."""
    return stride * itemsize if extent > 1 else TMA_ALIGNMENT


def max_clusters(spec: GemmSpec, num_sms: int) -> int:
    """Returns how many clusters of `spec` are resident at once.

    A cluster lies within one GPC, and SMs pair up in TPCs: pairs always find room, while fours
    strand what a GPC has over a multiple of four. cuOccupancyMaxActiveClusters says 30 on an
    H200 of 132 SMs. A wrong figure costs speed, never a result.
    """
    if spec.cluster_size <= 2:
        return num_sms // spec.cluster_size
    return max(1, (num_sms - STRANDED_SMS) // spec.cluster_size)


def persistent_clusters(clusters: int, limit: int) -> int:
    """Returns the smallest grid that needs no more waves than `limit` clusters would."""
    waves = ceil_div(clusters, limit)
    return ceil_div(clusters, waves)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
