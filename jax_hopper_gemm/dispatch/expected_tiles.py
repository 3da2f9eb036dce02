"""The tiles of a launch, and the SMs that work on them at the same time.

Sizes of groups are not known. A grouped product is taken for a batch of equal groups, but for the
tiles that they fill in part, which are counted as if sizes were spread (`expected_pieces`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import exp
from typing import Any, NamedTuple

from ..gemm import grid
from ..gemm.k_split import is_worth_splitting, split_of
from ..gemm.problem import GemmProblem
from ..gemm.spec import GemmSpec
from .device import Device
from .several import each, each_where, where


def equal_groups(problem: GemmProblem) -> GemmProblem:
    """Returns the dense problem of the same work, were all groups equal; a dense one itself.

    Where there are fewer rows than groups, only as many groups count.
    """
    p, g = problem, problem.groups
    if g is None:
        return p
    length = p.m if g.axis == "m" else p.k
    groups = max(1, min(g.total, length) if g.axis == "m" else g.total)
    mean = grid.ceil_div(length, groups)
    apart = {x: replace(getattr(p, x), batch_stride=1) for x in ("ad" if g.axis == "m" else "abd")}
    return replace(p, l=groups, groups=None, **{g.axis: mean}, **apart)


def mean_rows(problem: GemmProblem) -> float | None:
    """Returns the rows of a group that has some, where rows are grouped."""
    if problem.groups and problem.groups.axis == "m":
        return problem.m / equal_groups(problem).l
    return None


def expected_pieces(mean: float, piece: int) -> float:
    """Returns how many pieces a group of `mean` elements is cut into, the last one smaller.

    Sizes are taken to be spread as a gamma distribution of shape 2 (shares of a Dirichlet
    distribution of 2): the sum over j of the probability that a size exceeds j pieces. Of many
    pieces, half of one is lost; of few, there is at least one.
    """
    a = 2 * piece / mean
    q = exp(-a)
    return 1 / (1 - q) + a * q / (1 - q) ** 2


@lru_cache
def expected_largest(groups: int) -> float:
    """Returns how many times the mean the largest of so many groups is, spread likewise."""
    sizes = ((i + 0.5) / 64 for i in range(64 * 40))  # in halves of the mean
    return sum(1 - (1 - (1 + x) * exp(-x)) ** groups for x in sizes) / 64 / 2


def expected_tiles(problem: GemmProblem, spec: GemmSpec) -> int:
    """Returns the tiles of D; those to expect where its rows are grouped."""
    return _pieces(problem, spec.tile_m, grid.tiles_n(problem, spec))


def _pieces(problem: GemmProblem, rows: int, along_n: int) -> int:
    """Returns the pieces of so many rows that D is cut into, `along_n` side by side."""
    p = equal_groups(problem)
    mean = mean_rows(problem)
    if mean:
        along_m = each(lambda piece: round(expected_pieces(mean, piece) * p.l), rows)
    else:
        along_m = grid.ceil_div(p.m, rows) * p.l
    return along_m * along_n


def expected_k_tiles(problem: GemmProblem, spec: GemmSpec) -> float:
    """Returns the k-tiles of a tile; those to expect where K is grouped."""
    if problem.groups and problem.groups.axis == "k":
        return each(expected_pieces, problem.k / equal_groups(problem).l, spec.tile_k)
    return grid.num_k_tiles(problem, spec)


def partial_tiles(problem: GemmProblem, spec: GemmSpec) -> tuple[float, float]:
    """Returns which share of the tiles hold a group's last rows, and of these how much is computed.

    Their blocks of 64 rows without any are loaded, but not multiplied.
    """
    mean = mean_rows(problem)
    if mean is None:
        return 0.0, 1.0
    tiles, blocks = each(expected_pieces, mean, spec.tile_m), expected_pieces(mean, 64)
    blocks_of_tile = spec.tile_m // 64
    if spec.b_in_registers:  # warpgroups share columns, and multiply all rows of a tile
        return 1 / tiles, 1.0
    return 1 / tiles, (blocks - (tiles - 1) * blocks_of_tile) / blocks_of_tile


class Waves(NamedTuple):
    """The tiles that clusters compute together, and how these take turns."""

    tiles: Any
    resident: Any  # clusters, at most
    number: Any  # tiles that one cluster computes at most
    active_sms: Any  # that load at the same time
    shared: Shared


class Shared(NamedTuple):
    """How clusters share k-tiles of some tiles (`k_split`), and what the busiest one does."""

    clusters: Any  # that have work
    ranges: Any  # of k-tiles
    stored: Any  # tiles
    multiplied: Any  # k-tiles
    added: Any  # partial sums of others that work on its tile
    gains: Any  # whether whole tiles would leave most clusters idle


def expected_waves(problem: GemmProblem, spec: GemmSpec, device: Device) -> Waves:
    """Returns the waves of a launch; those to expect where its rows are grouped."""
    along_n = grid.ceil_div(grid.tiles_n(problem, spec), spec.raster_n)
    tiles = _pieces(problem, spec.tile_m * spec.raster_m, along_n)
    resident = grid.max_clusters(spec, device.num_sms)
    number, k_tiles = grid.ceil_div(tiles, resident), grid.num_k_tiles(problem, spec)
    numbers = tiles, k_tiles, problem.k, resident
    shared = Shared(*each_where(spec.split_k, _split_k_work, *numbers, other=NOT_SHARED))
    clusters = where(spec.split_k, shared.clusters, grid.ceil_div(tiles, number))
    return Waves(tiles, resident, number, clusters * spec.cluster_size, shared)


@lru_cache(maxsize=4096)
def _split_k_work(tiles: int, k_tiles: int, k: int, resident: int) -> Shared:
    split_tiles, ranges = split_of(tiles, k_tiles, k, resident)
    whole, added = tiles - split_tiles, 0
    clusters = min(whole + ranges, resident)
    multiplied = whole // clusters * k_tiles
    if ranges:
        multiplied += grid.ceil_div(split_tiles * k_tiles, ranges)
        added = grid.ceil_div(ranges, split_tiles) - (ranges % split_tiles == 0)
    gains = is_worth_splitting(tiles, resident)
    return Shared(clusters, ranges, grid.ceil_div(tiles, clusters), multiplied, added, gains)


NOT_SHARED = Shared(clusters=1, ranges=0, stored=1, multiplied=0, added=0, gains=False)
