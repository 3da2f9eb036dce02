"""The search for the n-th tile of a grouped product, on the GPU, from sizes that only it knows.

An array of sizes cuts an axis into consecutive runs (see `groups`). A warp searches 32 runs at a
time: a lane holds one run, a prefix sum over the lanes says how many tiles end before each, and the
first lane that reaches the tile looked for has it. Tiles are asked for in rising order, so the
search goes on where it stood.

It is written with the operations that `lanes` provides: those of a warp on the GPU, those of
numpy on arrays of 32 elements elsewhere, so tests prove on the CPU what the GPU will do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

LANES = 32
SPAN_EXTENT = 2**30  # of the grouped axis in a tensor map that ends where a run does
MAX_LENGTH = 2**25  # of a grouped axis: the sizes of 32 runs, each at most that, add up in int32
MAX_TILES = 2**27  # cluster tiles of a launch: a band of 16 times as many can be counted in int32


class GroupRaster(NamedTuple):
    """Constants of a grouped product's raster order, all int32."""

    sizes: Any  # how many there are
    period: Any  # this and the next three as in `groups.Groups`
    first: Any
    count: Any
    step: Any
    length: Any  # elements of the grouped axis
    tiles: Any  # of K grouped: cluster tiles along M of one matrix; of M: a CTA's along N
    clusters_n: Any  # cluster tiles along N
    along_m: Any  # this and `width`: the order of one group's tiles, as in `raster.Raster`
    width: Any


class Window(NamedTuple):
    """32 consecutive runs, one a lane."""

    run: Any  # index of the first
    row: Any  # elements of the axis before the first
    tile: Any  # tiles before the first
    start: Any  # where on the axis each lane's run begins
    end: Any
    last: Any  # tiles of all runs up to and with each lane's


class GroupTile(NamedTuple):
    """One cluster tile of a grouped product."""

    matrix: Any  # of B (M is grouped) or of D (K is); -1 for rows that belong to no group
    start: Any  # where on the axis its run begins
    end: Any  # the same as `start` for an empty group
    m: Any  # which cluster tile of the run's rows (M is grouped) or of the matrix's (K is)
    n: Any


class Part(NamedTuple):
    """A part of the matrix of an empty group, where K is the grouped axis."""

    matrix: Any  # of D
    part: Any  # which of the parts that all matrices have


def first_window(
    raster: GroupRaster, size_at: Any, lanes: Any, rows: int | None, skip_empty: bool
) -> Window:
    """Returns the window over the first 32 runs; arguments as for `next_window`."""
    zero = lanes.integer(0)
    return _window(raster, zero, zero, zero, size_at, lanes, rows, skip_empty)


def next_window(
    raster: GroupRaster, window: Window, size_at: Any, lanes: Any, rows: int | None,
    skip_empty: bool,
) -> Window:  # fmt: skip
    """Returns the window over the 32 runs that follow.

    Args:
      size_at: function of a run's index, one a lane: its size; only asked of runs that have one.
      lanes: operations on values that each lane has.
      rows: rows of a cluster tile where M is the grouped axis; None where K is.
      skip_empty: where K is, whether the matrix of an empty group has no tiles.
    """
    final = lanes.integer(LANES - 1)
    return _window(
        raster, window.run + LANES, lanes.of(window.end, final), lanes.of(window.last, final),
        size_at, lanes, rows, skip_empty,
    )  # fmt: skip


def _window(
    raster: GroupRaster, run: Any, row: Any, tile: Any, size_at: Any, lanes: Any,
    rows: int | None, skip_empty: bool,
) -> Window:  # fmt: skip
    index = run + lanes.lane
    clipped = lanes.minimum(lanes.maximum(size_at(index, index < raster.sizes), 0), raster.length)
    # What is left of the axis is the run behind the last that has a size, of no group. It leaves
    # nothing to those behind it, whatever was read as their sizes.
    size = lanes.where(index == raster.sizes, raster.length, clipped)
    sum_to = lanes.prefix_sum(size)
    end = lanes.minimum(row + sum_to, raster.length)
    start = lanes.minimum(row + sum_to - size, raster.length)
    if rows is None:
        has_tiles = _has_group(raster, index)
        if skip_empty:
            has_tiles = has_tiles & (start < end)
        tiles = lanes.where(has_tiles, raster.tiles * raster.clusters_n, 0)
    else:
        tiles = (end - start + (rows - 1)) // rows * raster.clusters_n
    return Window(run, row, tile, start, end, tile + lanes.prefix_sum(tiles))


def _has_group(raster: GroupRaster, run: Any) -> Any:
    place = _place_in_period(raster, run)
    return (place >= 0) & (place < raster.count) & (run < raster.sizes)


def _place_in_period(raster: GroupRaster, run: Any) -> Any:
    """Returns which group of its period a run is; outside of 0 .. count - 1: of none."""
    return run - run // raster.period * raster.period - raster.first


def holds(window: Window, index: Any, lanes: Any) -> Any:
    """Returns whether the `index`-th cluster tile, from 0, lies in the window or before it."""
    return index < lanes.of(window.last, lanes.integer(LANES - 1))


def is_last(raster: GroupRaster, window: Window) -> Any:
    """Returns whether no run follows the window's."""
    return window.run + LANES > raster.sizes


def tile_in(
    raster: GroupRaster, window: Window, index: Any, lanes: Any, rows: int | None
) -> GroupTile:
    """Returns the `index`-th cluster tile, which the window holds."""
    lane = lanes.first(index < window.last)
    start, end = lanes.of(window.start, lane), lanes.of(window.end, lane)
    clusters_m = raster.tiles if rows is None else (end - start + (rows - 1)) // rows
    before = lanes.of(window.last, lane) - clusters_m * raster.clusters_n
    m, n = _tile_of_matrix(raster, index - before, clusters_m, lanes)
    run = window.run + lane
    # NOTE: keep this order. It changes the cubin's bytes, and verified.json is keyed by them.
    if rows is None:
        matrix = lanes.where(_has_group(raster, run), _matrix(raster, run), -1)
    else:
        matrix = _matrix(raster, run)
        matrix = lanes.where(_has_group(raster, run), matrix, -1)
    return GroupTile(matrix, start, end, m, n)


def empty_before_end(raster: GroupRaster, window: Window, before: Any, lanes: Any) -> Any:
    """Returns how many empty groups there are up to each lane's run, `before` the window too."""
    empty = _has_group(raster, window.run + lanes.lane) & (window.start == window.end)
    return before + lanes.prefix_sum(lanes.where(empty, 1, 0))


def part_in(
    raster: GroupRaster, window: Window, empty: Any, index: Any, parts: Any, lanes: Any
) -> Part:
    """Returns the `index`-th part of the matrices of empty groups, which the window holds.

    A matrix has `parts`; `empty` is what `empty_before_end` returned.
    """
    group = index // parts
    run = window.run + lanes.first(group < empty)
    return Part(_matrix(raster, run), index - group * parts)


def _matrix(raster: GroupRaster, run: Any) -> Any:
    return run // raster.period * raster.step + _place_in_period(raster, run)


def tile_in_pair(tile: GroupTile, cta: Any, rows: int, lanes: Any) -> tuple[Any, Any, Any]:
    """Returns (m, n, together): which tile one CTA of a pair takes of the cluster tile `tile`.

    Cluster tiles are counted as if the CTAs lay side by side along N. Of two of them, one below
    the other, the CTAs instead take the left columns first, then the right, and have these columns
    together. Only the last tile of a run with an odd number of them is shared along N. `rows` are
    those of a CTA's tile.
    """
    tiles = (tile.end - tile.start + (rows - 1)) // rows
    upper = tile.m // 2 * 2
    odd = tile.m - upper
    together = upper + 1 < tiles
    m = lanes.where(together, upper + cta, tile.m)
    return m, tile.n * 2 + lanes.where(together, odd, cta), together


def _tile_of_matrix(
    raster: GroupRaster, index: Any, clusters_m: Any, lanes: Any
) -> tuple[Any, Any]:
    """Returns (m, n) of a matrix's `index`-th cluster tile, in the order of `raster.Raster`."""
    fast = lanes.where(raster.along_m == 1, clusters_m, raster.clusters_n)
    slow = lanes.where(raster.along_m == 1, raster.clusters_n, clusters_m)
    band = index // (raster.width * fast)
    index = index - band * raster.width * fast
    width = lanes.minimum(raster.width, slow - band * raster.width)
    step = index // width
    across = band * raster.width + index - step * width
    step = lanes.where(band % 2 == 1, fast - 1 - step, step)
    m = lanes.where(raster.along_m == 1, step, across)
    return m, across + step - m
