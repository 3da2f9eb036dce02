"""Tiles of a grouped GEMM and their CTAs, by the scheduler's own arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from ..gemm.grid import ceil_div, group_raster, num_k_tiles, tiles_n
from ..gemm.group_search import GroupRaster, tile_in_pair
from ..gemm.problem import GemmProblem
from ..gemm.raster import RasterOrder
from ..gemm.spec import GemmSpec
from ..launch.plan import make_plan
from ..testing.lanes import WARP, group_tiles
from .canvas import cell, frame, plain_colour, rectangle, subplots
from .fragments import ROWS

OF_NO_GROUP = "#6c757d"
GAP = 24  # rows' worth of paper between spans
LINE_OF_TEXT = 56  # rows' worth of paper


@dataclass(frozen=True)
class GroupedTile:
    """One CTA's tile of a grouped product."""

    index: int  # number of its cluster's tile in the launch
    cta: int  # that computes it; CTAs of a cluster have adjacent numbers
    turn: int  # number of tiles that the CTA computes before it
    matrix: int  # this and the next two: of its group, as in `group_search.GroupTile`
    start: int
    end: int
    m: int  # its place along the rows of the group (M is grouped) or of the matrix (K is)
    n: int  # its place along N
    rows: int  # that belong to the group, or to the matrix
    blocks: int  # of 64 rows that are multiplied; later ones are skipped
    k_tiles: int  # that it adds up

    @property
    def work(self) -> int:
        """Multiplications of 64 rows by one k-tile."""
        return self.blocks * self.k_tiles


def grouped_tiles(
    problem: GemmProblem,
    spec: GemmSpec,
    raster_order: RasterOrder,
    sizes: Sequence[int],
    num_sms: int = 132,
) -> list[GroupedTile]:
    """Returns the tiles of all CTAs of a launch, in their order.

    Args:
      spec: with a static tile scheduler. With a dynamic one the tiles and their order are the
        same, but their CTAs are decided at run time.
      sizes: the group sizes.

    Raises:
      ValueError: the product is not grouped, the scheduler not static, or sizes are missing.
    """
    groups = problem.groups
    if groups is None or spec.grouped != groups.axis:
        raise ValueError(
            f"groups of {spec.name} are along {spec.grouped}, those of the problem along "
            f"{groups and groups.axis}: give GemmProblem.grouped(...) and a spec with its axis"
        )
    if spec.dynamic or not spec.persistent:
        raise ValueError(
            f"which CTA takes which tile of a {spec.tile_scheduler} scheduler is decided while it "
            'runs: give dataclasses.replace(spec, tile_scheduler="static")'
        )
    if len(sizes) != groups.num_sizes:
        raise ValueError(f"{len(sizes)} sizes, but the problem has {groups.num_sizes}")
    clusters = make_plan(problem, spec, raster_order, num_sms).grid[0] // spec.cluster_m
    raster = group_raster(problem, spec, raster_order)
    rows = spec.tile_m * spec.raster_m if spec.grouped == "m" else None
    tiles = [
        _of_cta(problem, spec, tile, cluster + turn * clusters, cluster, turn, rank)
        for cluster in range(clusters)
        for turn, tile in enumerate(
            group_tiles(raster, sizes, rows, count(cluster, clusters), spec.zero_fill_warp)
        )
        for rank in range(spec.cluster_size)
    ]
    return sorted(tiles, key=lambda tile: (tile.index, tile.cta))


def _of_cta(
    problem: GemmProblem, spec: GemmSpec, tile: Any, index: int, cluster: int, turn: int, rank: int
) -> GroupedTile:
    counts = tile.matrix >= 0
    if spec.paired:
        m, n, together = map(int, tile_in_pair(tile, rank, spec.tile_m, WARP))
        counts = counts and (not together or n * spec.d_tile_n < problem.n)
    else:
        m = tile.m * spec.cluster_m + rank % spec.cluster_m
        n = tile.n * spec.cluster_n + rank // spec.cluster_m
    length = tile.end - tile.start
    height = length if spec.grouped == "m" else problem.m
    rows = min(max(height - m * spec.tile_m, 0), spec.tile_m)
    if spec.grouped == "m":
        blocks, k_tiles = ceil_div(rows, ROWS), num_k_tiles(problem, spec) if counts else 1
    else:
        blocks, k_tiles = spec.tile_m // ROWS, max(1, ceil_div(length, spec.tile_k))
    return GroupedTile(
        index, cluster * spec.cluster_size + rank, turn,
        tile.matrix, tile.start, tile.end, m, n, rows, blocks, k_tiles,
    )  # fmt: skip


def draw_grouped_tiles(
    problem: GemmProblem, spec: GemmSpec, sizes: Sequence[int], tiles: Sequence[GroupedTile]
) -> Any:
    """Draws the tiles of a GEMM whose rows are grouped, by `grouped_tiles`, group below group.

    A tile's number is its CTA; darker tiles are a CTA's second, third ... At the end of a group,
    rows that are multiplied but not stored are hatched, and skipped blocks of 64 rows are dotted.
    """
    from matplotlib.patches import Patch

    if spec.grouped != "m":
        raise ValueError(
            f"groups are along {spec.grouped}, and tiles are drawn where they are along m: "
            "draw_grouped_work draws both"
        )
    columns = tiles_n(problem, spec)
    tops, bottom = _tops(problem, spec, sizes)
    figure, axis = subplots(1, 1, (3 + 0.75 * columns, 1.2 + bottom / 220))
    for start, end, matrix, top in tops:
        name = f"group {matrix}" if matrix >= 0 else "no group"
        rows = f"rows {start} to {end - 1}" if end > start else "empty"
        label = f"{name}: {rows}" if matrix >= 0 or end > start else ""
        middle = top + (LINE_OF_TEXT / 2 if end == start else 0)
        axis.text(-0.1, middle, label, ha="right", va="center" if end == start else "top")
        for tile in tiles:
            if (tile.start, tile.end, tile.matrix) == (start, end, matrix) and tile.n < columns:
                _draw_tile(axis, tile, spec, top + tile.m * spec.tile_m)
    white: dict[str, Any] = {"facecolor": "white", "edgecolor": "#777777"}
    axis.legend(
        handles=[
            Patch(color=plain_colour(0), label="rows of a group; darker: not its CTA's first tile"),
            Patch(color=OF_NO_GROUP, label="rows of no group, stored as zeros"),
            Patch(**white, hatch="////", label="multiplied, not stored"),
            Patch(**white, linestyle=":", label="64 rows that are skipped"),
        ],
        loc="upper left", bbox_to_anchor=(0, 0), ncols=2, frameon=False,
    )  # fmt: skip
    axis.set_xlim(0, columns)
    axis.set_ylim(bottom, -GAP)
    axis.set_xticks([i + 0.5 for i in range(columns)], [f"{i}" for i in range(columns)])
    axis.xaxis.tick_top()
    axis.set_xlabel(f"tiles along N, {spec.d_tile_n} columns each")
    axis.xaxis.set_label_position("top")
    axis.set_yticks([])
    axis.spines[:].set_visible(False)
    turns = 1 + max(tile.turn for tile in tiles)
    figure.suptitle(
        f"{len(tiles)} tiles of {spec.tile_m} x {spec.d_tile_n} on "
        f"{len({tile.cta for tile in tiles})} CTAs, {turns} at most for each"
    )
    return figure


def _tops(
    problem: GemmProblem, spec: GemmSpec, sizes: Sequence[int]
) -> tuple[list[tuple[int, int, int, int]], int]:
    """Returns (start, end, matrix, place on paper) of each group, and the end of the last one."""
    groups = problem.groups
    assert groups is not None
    tops, start, top = [], 0, 0
    for i, size in enumerate([*sizes, problem.m]):
        end = min(problem.m, start + max(int(size), 0))
        matrix = groups.rule.matrix_of(i, groups.num_sizes)
        tops.append((start, end, matrix, top))
        if end > start:
            top += ceil_div(end - start, spec.tile_m) * spec.tile_m + GAP
        elif matrix >= 0:
            top += LINE_OF_TEXT + GAP
        start = end
    return tops, top


def _draw_tile(axis: Any, tile: GroupedTile, spec: GemmSpec, top: int) -> None:
    edge: dict[str, Any] = {"edgecolor": "#777777", "linewidth": 0.7}
    multiplied = tile.blocks * ROWS
    parts: list[tuple[int, int, dict[str, Any]]] = [
        (0, tile.rows, {"facecolor": _colour(tile.matrix, tile.turn)} | edge),
        (tile.rows, multiplied, {"facecolor": "white", "hatch": "////"} | edge),
        (multiplied, spec.tile_m, {"facecolor": "none", "linestyle": ":"} | edge),
    ]
    for first, last, style in parts:
        if last > first:
            rectangle(axis, tile.n, top + first, 0.94, last - first, **style)
    fits = tile.rows >= LINE_OF_TEXT
    axis.text(
        tile.n + 0.47, top + (tile.rows if fits else ROWS) / 2, str(tile.cta),
        ha="center", va="center", fontsize=8, weight="bold" if tile.turn else "normal",
        color="white" if tile.matrix < 0 and fits else "black",
        bbox=None if fits else {"facecolor": "white", "edgecolor": "none", "pad": 1},
    )  # fmt: skip


def _colour(matrix: int, turn: int) -> Any:
    from matplotlib.colors import to_rgba

    red, green, blue, alpha = to_rgba(OF_NO_GROUP if matrix < 0 else plain_colour(matrix))
    darker = 0.72 ** min(turn, 3)
    return red * darker, green * darker, blue * darker, alpha


def draw_grouped_work(spec: GemmSpec, tiles: Sequence[GroupedTile]) -> Any:
    """Draws the work of each CTA, its `grouped_tiles` on top of each other, a colour a group."""
    totals: dict[int, int] = {}
    figure, axis = subplots(1, 1, (13, 3.2))
    for tile in tiles:
        below = totals.get(tile.cta, 0)
        axis.bar(
            tile.cta, tile.work, bottom=below, width=0.9, color=_colour(tile.matrix, 0),
            edgecolor="#777777", linewidth=0.4,
        )  # fmt: skip
        totals[tile.cta] = below + tile.work
    mean = sum(totals.values()) / len(totals)
    axis.axhline(mean, color="black", linestyle="--", linewidth=1)
    axis.set_xlim(-1, max(totals) + 1)
    axis.set_xlabel("CTA; dashed: the mean")
    axis.set_ylabel(f"64 rows x {spec.tile_k} of K")
    axis.set_title(
        f"groups along {spec.grouped}, static scheduler: the busiest CTA has "
        f"{max(totals.values()) / mean:.2f} times the mean"
    )
    return figure


def draw_group_order(
    tiles_m: int, tiles_n: int, traversals: Sequence[RasterOrder], together: int = 16
) -> Any:
    """Draws the order of one group's tiles, for each raster order.

    The first `together` tiles, which run at the same time, are outlined. The fewer tiles of A and B
    they need together, the cheaper their loads.
    """
    figure, axes = subplots(
        1, len(traversals), (0.6 + 0.5 * tiles_n * len(traversals), 1.2 + 0.5 * tiles_m),
        squeeze=False,
    )  # fmt: skip
    for axis, raster_order in zip(axes[0], traversals, strict=True):
        raster = GroupRaster(
            1, 2, 0, 1, 0, tiles_m, tiles_m, tiles_n,
            int(raster_order.along == "m"), raster_order.swizzle,
        )  # fmt: skip
        tiles = list(group_tiles(raster, [tiles_m], 1, count()))
        for i, tile in enumerate(tiles):
            cell(axis, tile.n, tile.m, plain_colour(i // together), str(i), bold=i < together)
        axis.plot(
            [tile.n + 0.5 for tile in tiles], [tile.m + 0.5 for tile in tiles],
            color="#555555", linewidth=0.8, alpha=0.4,
        )  # fmt: skip
        first = tiles[:together]
        of_a, of_b = len({tile.m for tile in first}), len({tile.n for tile in first})
        axis.set_title(
            f"along {raster_order.along}, width {raster_order.swizzle}:\n"
            f"{len(first)} tiles read {of_a} of A, {of_b} of B",
            fontsize=10,
        )
        frame(axis, tiles_n, tiles_m)
        axis.set_xlabel("tiles along N")
        axis.set_ylabel("tiles along the group's rows")
    return figure
