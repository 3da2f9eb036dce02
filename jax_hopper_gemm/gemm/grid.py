"""The grid of a launch: clusters, the arrays that a kernel reads and writes."""

from __future__ import annotations

from .group_search import GroupRaster
from .problem import GemmProblem
from .spec import EPI_TILE_M, GemmSpec, RasterOrder

STRANDED_SMS = 12  # that clusters of four cannot use

WRAP_BYTES = 2**34  # times SPAN_EXTENT: 2**64, where addresses wrap around


def launched_clusters(problem: GemmProblem, spec: GemmSpec, num_sms: int) -> int:
    """Returns the clusters of a launch: one for each of their tiles, or as many as stay."""
    clusters_m = ceil_div(problem.m, spec.tile_m * spec.raster_m)
    clusters_n = ceil_div(problem.n, spec.d_tile_n * spec.raster_n)
    groups = problem.groups
    if groups and groups.axis == "m":
        clusters = min(problem.m, clusters_m + groups.num_sizes) * clusters_n  # at most
    else:
        clusters = clusters_m * clusters_n * problem.l
    if spec.tile_scheduler == "single":
        return clusters
    even = spec.tile_scheduler == "static" and groups is None
    return persistent_clusters(clusters, max_clusters(spec, num_sms), even=even)


def group_raster(problem: GemmProblem, spec: GemmSpec, raster_order: RasterOrder) -> GroupRaster:
    """Returns the constants of the walk over a grouped problem's tiles."""
    groups = problem.groups
    assert groups is not None
    rule = groups.rule
    if groups.axis == "m":
        length, tiles = problem.m, ceil_div(problem.n, spec.d_tile_n)
    else:
        length, tiles = problem.k, ceil_div(problem.m, spec.tile_m * spec.raster_m)
    return GroupRaster(
        groups.num_sizes, rule.period, rule.first, rule.count, rule.step, length, tiles,
        ceil_div(problem.n, spec.d_tile_n * spec.raster_n),
        int(raster_order.along == "m"), raster_order.swizzle,
    )  # fmt: skip


def num_inputs(problem: GemmProblem) -> int:
    """Returns how many arrays a call reads: A, B, up in an array of its own, the operands, sizes
    and indices of groups, the index of a matrix."""
    arrays = 2 + (problem.gated and problem.up_offset is None) + len(problem.operands)
    if problem.groups:
        arrays += 1 + (problem.groups.gathered is not None)
    return arrays + (problem.indexed is not None)


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
    l = 1 if p.groups and p.groups.axis == "m" else p.l  # noqa: E741
    tiles_n = ceil_div(p.n, spec.d_tile_n)
    shapes = {
        "column_sum": (l, ceil_div(p.m, EPI_TILE_M), p.n),
        "row_sum": (l, tiles_n, p.m),
        "row_max": (l, tiles_n, p.m),
        "row_sumexp": (l, tiles_n, 2, p.m),
        "max": (l, ceil_div(p.m, 16), tiles_n),
    }
    found: list[tuple[tuple[int, ...], str]] = []
    for result in p.graph.results:
        if result.kind == "matrix":
            if result.plane == 0:
                planes = (result.planes,) if result.planes > 1 else ()
                found.append(((l, p.m, *planes, p.n), result.dtype))
        elif result.kind in shapes:
            found.append((shapes[result.kind], "float32"))
        else:
            dtype = "int32" if result.kind == "top_k_indices" else "float32"
            found.append(((l, p.m, result.k), dtype))
    return found


def max_clusters(spec: GemmSpec, num_sms: int) -> int:
    """Returns how many clusters of `spec` are resident at once.

    A cluster lies within one GPC, and SMs pair up in TPCs: pairs always find room, while fours
    strand what a GPC has over a multiple of four. cuOccupancyMaxActiveClusters says 30 on an
    H200 of 132 SMs. A wrong figure costs speed, never a result.
    """
    if spec.cluster_size <= 2:
        return max(1, num_sms // spec.cluster_size)
    return max(1, (num_sms - STRANDED_SMS) // spec.cluster_size)


def persistent_clusters(clusters: int, limit: int, *, even: bool) -> int:
    """Returns how many clusters a persistent kernel launches for `clusters` tiles of theirs.

    Those with even shares are the fewest that need no more waves than `limit` of them would. Where
    tiles are claimed, or depend on sizes that nobody knows yet, they are as many as stay.
    """
    if not even:
        return min(clusters, limit)
    waves = ceil_div(clusters, limit)
    return ceil_div(clusters, waves)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
