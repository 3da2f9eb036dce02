"""The grid of a launch: clusters' tiles, clusters, the arrays that a kernel reads and writes.

A cluster works on one of its tiles at a time: `cluster_m` x `cluster_n` tiles of D, or those of a
pair (`GemmSpec.raster_m`). What the cost model asks for is arithmetic without branches on a kernel,
so that it takes several at once (`dispatch.several`).
"""

from __future__ import annotations

from itertools import accumulate

from .dtypes import DTYPES
from .group_search import GroupRaster
from .k_split import KSplit, make_k_split, split_of
from .offsets import ZeroRows
from .problem import GemmProblem
from .raster import RasterOrder
from .smem import EPI_TILE_M
from .spec import TMA_ALIGNMENT, GemmSpec

STRANDED_SMS = 12  # that clusters of four cannot use

WRAP_BYTES = 2**34  # times SPAN_EXTENT: 2**64, where addresses wrap around


def cluster_grid(problem: GemmProblem, spec: GemmSpec) -> tuple[int, int]:
    """Returns the clusters' tiles along the kernel's M and N, as if no axis were grouped."""
    p = problem.as_stored(spec.d_major)
    along_m = ceil_div(p.m, spec.tile_m * spec.raster_m)
    return along_m, ceil_div(tiles_n(p, spec), spec.raster_n)


def num_cluster_tiles(problem: GemmProblem, spec: GemmSpec) -> int:
    """Returns the clusters' tiles of a launch; where rows are grouped, the most there can be.

    A group's last tile may be all but empty, and each has a row at least.
    """
    along_m, along_n = cluster_grid(problem, spec)
    groups = problem.groups
    if groups and groups.axis == "m":
        return min(problem.m, along_m + groups.num_sizes) * along_n
    return along_m * along_n * problem.l


def num_k_tiles(problem: GemmProblem, spec: GemmSpec) -> int:
    """Returns the k-tiles of a tile of D, as if K were not grouped; those of all terms of parts."""
    return ceil_div(problem.k, spec.tile_k) * (spec.bf16_terms if spec.reads_parts else 1)


def num_waves(cluster_tiles: int, spec: GemmSpec, num_sms: int) -> int:
    """Returns how many tiles a cluster works on, at most, of those that are resident at once."""
    return ceil_div(cluster_tiles, max_clusters(spec, num_sms))


def launched_clusters(problem: GemmProblem, spec: GemmSpec, num_sms: int) -> int:
    """Returns the clusters of a launch: one for each of their tiles, or as many as stay."""
    cluster_tiles = num_cluster_tiles(problem, spec)
    if not spec.persistent:
        return cluster_tiles
    if spec.split_k:
        return min(k_split(problem, spec, num_sms).items, max_clusters(spec, num_sms))
    even = not spec.dynamic and problem.groups is None
    return persistent_clusters(cluster_tiles, max_clusters(spec, num_sms), even=even)


def k_split(problem: GemmProblem, spec: GemmSpec, num_sms: int) -> KSplit:
    """Returns how a launch shares k-tiles among clusters."""
    tiles, k_tiles = num_cluster_tiles(problem, spec), num_k_tiles(problem, spec)
    clusters = max_clusters(spec, num_sms)
    return make_k_split(tiles, k_tiles, *split_of(tiles, k_tiles, problem.k, clusters))


def group_raster(problem: GemmProblem, spec: GemmSpec, raster_order: RasterOrder) -> GroupRaster:
    """Returns the constants of the raster over a grouped problem's tiles."""
    groups = problem.groups
    assert groups is not None
    clusters_m, clusters_n = cluster_grid(problem, spec)
    rule = groups.rule
    if groups.axis == "m":
        length, tiles = problem.m, tiles_n(problem, spec)
    else:
        length, tiles = problem.k, clusters_m
    return GroupRaster(
        groups.num_sizes, rule.period, rule.first, rule.count, rule.step, length, tiles,
        clusters_n, int(raster_order.along == "m"), raster_order.swizzle,
    )  # fmt: skip


def tiles_n(problem: GemmProblem, spec: GemmSpec) -> int:
    """Returns the tiles along N of one matrix, without those that fill up a cluster."""
    if problem.panels:
        return sum(ceil_div(panel.n, spec.d_tile_n) for panel in problem.panels)
    return ceil_div(problem.n, spec.d_tile_n)


def panel_starts(problem: GemmProblem, spec: GemmSpec) -> list[int]:
    """Returns the tiles of columns before each panel but the first; a panel's are its own."""
    tiles = (ceil_div(panel.n, spec.tile_n) for panel in problem.as_panels[:-1])
    return [*accumulate(tiles)]


def num_inputs(problem: GemmProblem) -> int:
    """Returns how many arrays a call reads; `launch.plan.LaunchPlan` has their order."""
    panels = max(1, len(problem.panels))
    arrays = 1 + panels * (1 + len(problem.operands))
    arrays += problem.gated and problem.up_offset is None
    if problem.groups:
        arrays += 1 + (problem.groups.gathered is not None)
    return arrays + (problem.indexed is not None) + num_scales(problem)


def num_scales(problem: GemmProblem) -> int:
    """Returns how many of these are scales: of blocks of both operands, or of groups of each B."""
    if problem.k_group:
        return problem.graph.accumulators
    return 2 if problem.a_scales else 0


def result_shapes(problem: GemmProblem, spec: GemmSpec) -> list[tuple[tuple[int, ...], str]]:
    """Returns shape and dtype of each array that a kernel writes, without workspaces.

    Matrices are (L, M, N), a pair of planes (L, M, 2, N). Reductions are partial, to be finished
    along axis 1 in its order, so that results have the same bits on every run:

      column_sum       (L, ceil(M / 64), N)
      row_sum, row_max (L, tiles along N, M)
      row_sumexp       (L, tiles along N, 2, M), largest value and sum
      max              (L, ceil(M / 16), tiles along N), a part for each warp
      top_k_*          (L, M, k), whole

    L is 1 where the rows of D are grouped.
    """
    p = problem
    if p.panels:
        return [((p.l, p.m, x.n), result.dtype) for x in p.panels for result in p.graph.results]
    l = 1 if p.groups and p.groups.axis == "m" else p.l  # noqa: E741
    columns = tiles_n(p, spec)
    partial = {
        "column_sum": (l, ceil_div(p.m, EPI_TILE_M), p.n),
        "row_sum": (l, columns, p.m),
        "row_max": (l, columns, p.m),
        "row_sumexp": (l, columns, 2, p.m),
        "max": (l, ceil_div(p.m, 16), columns),
    }
    shapes: list[tuple[tuple[int, ...], str]] = []
    for result in p.graph.results:
        if result.kind == "matrix":
            if result.plane == 0:
                planes = (result.planes,) if result.planes > 1 else ()
                shapes.append(((l, p.m, *planes, p.n), result.dtype))
        elif result.kind in partial:
            shapes.append((partial[result.kind], "float32"))
        else:
            dtype = "int32" if result.kind == "top_k_indices" else "float32"
            shapes.append(((l, p.m, result.k), dtype))
    return shapes


def loaded_rows(problem: GemmProblem, spec: GemmSpec) -> tuple[int, int]:
    """Returns the rows of the kernel's A and of one B that a stage gets: a tile's, if there are.

    wgmma reads all of the tile's. The others belong to rows and columns past the end of D, which
    are neither stored nor reduced, so they may hold anything.
    """
    p, s = problem.as_stored(spec.d_major), spec
    rows_a, rows_b = s.tile_m, s.d_tile_n
    if s.a_major == "k":
        rows_a = rows_a - s.short_boxes * (rows_a > p.m) * (rows_a - p.m)
    if s.b_major == "k":
        rows_b = rows_b - s.short_boxes * (rows_b > p.n) * (rows_b - p.n)
    return rows_a, rows_b


def loaded_bytes(problem: GemmProblem, spec: GemmSpec) -> int:
    """Returns the bytes that TMA brings to a stage."""
    rows_a, rows_b = loaded_rows(problem, spec)
    a, b = DTYPES[spec.a_dtype], DTYPES[spec.b_dtype]
    of_a = a.nbytes(rows_a * spec.tile_k)
    of_b = b.nbytes(rows_b * spec.graph.accumulators * spec.tile_k)
    return of_a + of_b + spec.scale_bytes


def max_clusters(spec: GemmSpec, num_sms: int) -> int:
    """Returns how many clusters of `spec` are resident at once.

    A cluster lies within one GPC, and SMs pair up in TPCs: pairs always find room, while fours
    strand what a GPC has over a multiple of four. cuOccupancyMaxActiveClusters says 30 on an
    H200 of 132 SMs. A wrong figure costs speed, never a result.
    """
    stranded = STRANDED_SMS * (spec.cluster_size > 2)
    clusters = (num_sms - stranded) // spec.cluster_size
    return clusters * (clusters > 0) + (clusters < 1)


def persistent_clusters(cluster_tiles: int, limit: int, *, even: bool) -> int:
    """Returns how many clusters a persistent kernel launches for `cluster_tiles`.

    Those with even shares are the fewest that need no more waves than `limit` of them would. Where
    tiles are scheduled dynamically, or depend on sizes that are known only while the program runs,
    they are as many as stay.
    """
    if not even:
        return min(cluster_tiles, limit)
    waves = ceil_div(cluster_tiles, limit)
    return ceil_div(cluster_tiles, waves)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def zero_rows(problem: GemmProblem) -> ZeroRows:
    """Returns the matrices of D as rows for `kernels.zero_fill`; rows without gaps are one."""
    p, size = problem, TMA_ALIGNMENT // DTYPES[problem.d_dtype].itemsize
    rows, length, stride = p.m, p.n // size, p.d.leading_stride // size
    if length == stride:
        rows, length, stride = 1, rows * length, 0
    return ZeroRows(rows, length, stride, p.d.batch_stride // size)
