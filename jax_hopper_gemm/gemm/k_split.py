"""Work units of split-K and stream-K, and the arithmetic that says which comes next.

The k-tiles of all tiles, one tile after the other in the raster's order, form a tape. Its first
part is cut into ranges of equal length, whatever tiles they begin and end in; the tiles behind are
taken whole. Clusters take *items* by their numbers: the ranges first, then whole tiles. A work unit
is what an item has of one tile.

    tape      |   tile 0   |   tile 1   |   tile 2   |   tile 3   |   tile 4   |
    items     |   range 0   |   range 1   |  range 2  | whole, 3   | whole, 4   |
    units     |     0      |2|     1     |  4  |  3  | ...

Where a range is 1 / parts of a tile this is split-K. Where clusters share the last one to two waves
of tiles, whose number is no multiple of theirs, it is the hybrid of stream-K and whole tiles
(https://arxiv.org/abs/2301.03598).

A cluster walks through its range backwards. So the one unit of a range that does not end its tile
comes first: an item has one partial sum at most, whose slot is the item's number, and it is there
early. The unit that ends a tile adds the partial sums of the items before it.

The host fills a `KSplit` once per launch; the device evaluates the rest. It is the same code, which
the tests run on Python's integers.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd, isqrt
from typing import Any, NamedTuple

from .raster import magic_of

MAX_TAPE = 2**30  # k-tiles; what follows is exact below
MIN_K_TILES = 4  # of a range: fewer do not fill the ring of stages
# A part more saves k-tiles and costs a partial sum, which the last part reads. An element of a tile
# takes K / 2048 cycles of an SM's tensor cores, its partial sum 4 bytes / 77 of those it takes in.
# So parts**2 = K / (2048 * 4 / 77) takes the least time.
K_OF_SQUARE = 106


class KSplit(NamedTuple):
    """Constants of one tape, all int32. The i-th range begins at i * base + i * extra // period."""

    items: Any  # ranges and whole tiles
    ranges: Any
    base: Any  # k-tiles of a range, rounded down
    extra: Any
    period_magic: Any
    period_shift: Any
    k_magic: Any  # of a division by the k-tiles of a tile
    k_shift: Any


class WorkUnit(NamedTuple):
    """What one item has of one tile; positions are on the tape."""

    item: Any
    first: Any  # where the item begins
    end: Any  # where the unit ends


class Part(NamedTuple):
    """A work unit's place among those of its tile."""

    item: Any
    start: Any  # where the tile begins on the tape
    is_last: Any  # whether it ends the tile; it alone stores


def make_k_split(tiles: int, k_tiles: int, split_tiles: int, ranges: int) -> KSplit:
    """Returns the tape of `tiles`, of which the first `split_tiles` are cut into `ranges`."""
    assert 0 <= split_tiles <= tiles and tiles * k_tiles < MAX_TAPE, (tiles, k_tiles, split_tiles)
    length = split_tiles * k_tiles
    assert 0 < ranges <= length or ranges == length == 0, f"{ranges} ranges of {length} k-tiles"
    base, rest = divmod(length, ranges) if ranges else (0, 0)
    shared = gcd(rest, ranges) or 1
    extra, period = rest // shared, max(1, ranges // shared)
    assert ranges * extra < MAX_TAPE, f"{ranges} ranges of {length} k-tiles"
    items = ranges + tiles - split_tiles
    return KSplit(items, ranges, base, extra, *magic_of(period), *magic_of(k_tiles))


def split_of(tiles: int, k_tiles: int, k: int, clusters: int) -> tuple[int, int]:
    """Returns how many of the tiles are split, and into how many ranges.

    Up to half as many tiles as clusters are each cut into equal parts. Of more, all after the last
    but one whole wave are shared evenly, so that each cluster has one to two tiles' k-tiles of
    them and most tiles have two parts.

    Args:
      tiles: of clusters.
      k_tiles: of a tile.
      k: elements of K.
      clusters: that are resident at once.
    """
    most = k_tiles // MIN_K_TILES
    if 2 * tiles <= clusters:
        return tiles, tiles * max(1, min(clusters // tiles, most, isqrt(k // K_OF_SQUARE)))
    if tiles % clusters == 0:
        return 0, 0
    split_tiles = tiles - max(0, tiles // clusters - 1) * clusters
    return split_tiles, min(clusters, max(split_tiles, split_tiles * most))


def part_of(k_tiles: Any, rank: Any, ranks: int) -> tuple[Any, Any]:
    """Returns first k-tile and k-tiles of one of the CTAs of a cluster that share a tile."""
    first = k_tiles * rank // ranks
    return first, k_tiles * (rank + 1) // ranks - first


def is_worth_splitting(tiles: int, clusters: int) -> bool:
    """Returns whether whole tiles would leave most clusters idle, at once or in the last wave."""
    return 0 < 2 * (tiles % clusters) <= clusters


def first_unit(
    split: KSplit, k_tiles: Any, item: Any, widen: Callable = int, narrow: Callable = int
) -> WorkUnit:
    """Returns an item's first unit; `widen` and `narrow` as in `raster.tile_at`."""
    begin = begin_of(split, k_tiles, item, widen, narrow)
    return WorkUnit(item, begin, begin_of(split, k_tiles, item + 1, widen, narrow))


def next_unit(
    split: KSplit, k_tiles: Any, unit: WorkUnit, stride: Any, widen: Callable = int,
    narrow: Callable = int,
) -> WorkUnit:  # fmt: skip
    """Returns the unit after `unit` of a cluster that takes every `stride`-th item."""
    start = _tile_of(split, unit, widen, narrow) * k_tiles
    before = -((unit.first - start) >> 31)  # 1 where the item begins before this tile, else 0
    following = first_unit(split, k_tiles, unit.item + stride, widen, narrow)
    return WorkUnit(
        following.item - before * stride,
        following.first + before * (unit.first - following.first),
        following.end + before * (start - following.end),
    )


def place_of(
    split: KSplit, k_tiles: Any, unit: WorkUnit, widen: Callable = int, narrow: Callable = int
) -> tuple[Any, Any, Any, Part]:
    """Returns tile, first k-tile, k-tiles and `Part` of a unit."""
    tile = _tile_of(split, unit, widen, narrow)
    start = tile * k_tiles
    k_first = _positive(unit.first - start)
    return (
        tile, k_first, unit.end - start - k_first,
        Part(unit.item, start, unit.end == start + k_tiles),
    )  # fmt: skip


def begin_of(
    split: KSplit, k_tiles: Any, item: Any, widen: Callable = int, narrow: Callable = int
) -> Any:
    """Returns where an item begins on the tape; of the one behind the last, where that ends."""
    behind = _positive(item - split.ranges)
    number = item - behind
    extra = _divide(number * split.extra, split.period_magic, split.period_shift, widen, narrow)
    return number * split.base + extra + behind * k_tiles


def _tile_of(split: KSplit, unit: WorkUnit, widen: Callable, narrow: Callable) -> Any:
    return _divide(unit.end - 1, split.k_magic, split.k_shift, widen, narrow)


def _divide(n: Any, magic: Any, shift: Any, widen: Callable, narrow: Callable) -> Any:
    return narrow((widen(n) * widen(magic)) >> widen(shift))


def _positive(n: Any) -> Any:
    """Returns max(n, 0) of an int32."""
    return n & ~(n >> 31)
