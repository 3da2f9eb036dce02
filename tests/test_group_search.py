"""Which tile of a grouped product comes n-th, on the code that the scheduler warp runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from support.lanes import INT32_LANES, Int32

from jax_hopper_gemm.gemm.group_search import (
    LANES,
    MAX_LENGTH,
    MAX_TILES,
    GroupRaster,
    Part,
    empty_before_end,
    first_window,
    is_last,
    next_window,
    part_in,
    tile_in_pair,
)
from jax_hopper_gemm.gemm.groups import Groups
from jax_hopper_gemm.gemm.raster import make_raster, tile_at
from jax_hopper_gemm.testing.lanes import WARP, NumpyLanes, group_tiles

pytestmark = pytest.mark.pure

HUGE = 2**31 - 1


class Span(NamedTuple):
    matrix: int
    start: int
    end: int


@dataclass(frozen=True)
class Case:
    """A grouped axis; `rows` of a cluster tile, or None where K is grouped.

    With `skip_empty` an empty group of K has no tiles.
    """

    sizes: list[int]
    length: int
    rows: int | None
    clusters_m: int = 3
    clusters_n: int = 2
    period: int | None = None  # None: all runs are groups
    first: int = 0
    count: int | None = None
    step: int = 0
    along_m: bool = True
    width: int = 8
    skip_empty: bool = False

    @property
    def raster(self) -> GroupRaster:
        count = len(self.sizes) if self.count is None else self.count
        return GroupRaster(
            len(self.sizes), self.period or len(self.sizes) + 1, self.first, count, self.step,
            self.length, self.clusters_m, self.clusters_n, int(self.along_m), self.width,
        )  # fmt: skip


def runs_of(case: Case) -> list[Span]:
    """Returns all runs, by the definition in `gemm.groups`: one size after the other."""
    raster, found, at = case.raster, [], 0
    for i, size in enumerate(case.sizes):
        end = min(case.length, at + max(0, size))
        period, place = divmod(i, raster.period)
        alive = raster.first <= place < raster.first + raster.count
        found.append(Span(period * raster.step + place - raster.first if alive else -1, at, end))
        at = end
    return [*found, Span(-1, at, case.length)]


def expected_tiles(case: Case) -> Iterator[tuple[int, int, int, int, int]]:
    """Yields all tiles: run by run, each in the order of a dense product of its extents."""
    for run in runs_of(case):
        clusters_m = case.clusters_m if run.matrix >= 0 else 0
        if case.rows:
            clusters_m = math.ceil((run.end - run.start) / case.rows)
        if case.skip_empty and run.start == run.end:
            clusters_m = 0
        if clusters_m:
            order = make_raster(
                clusters_m, case.clusters_n, 1, along_m=case.along_m, swizzle=case.width
            )
            for i in range(order.total):
                m, n, _ = tile_at(order, i)
                yield run.matrix, run.start, run.end, m, n


def found_tiles(case: Case, indices=None, lanes: NumpyLanes = INT32_LANES) -> list[tuple[int, ...]]:
    indices = itertools.count() if indices is None else indices
    tiles = group_tiles(case.raster, case.sizes, case.rows, indices, case.skip_empty, lanes)
    return [tuple(tile) for tile in tiles]


def parts_of_empty_groups(
    raster: GroupRaster, sizes: Sequence[int], parts: int, first: int, stride: int
) -> Iterator[Part]:
    """Yields the parts, of ints, that one of `stride` warps finds in matrices of empty groups.

    Args:
      raster, sizes: as for `group_tiles`.
      parts: of each matrix.
      first: which warp it is.
    """
    lanes = INT32_LANES
    on_device = GroupRaster(*map(lanes.integer, raster))
    size_at, index = lanes.size_reader(sizes), lanes.integer(first)
    window, before = first_window(on_device, size_at, lanes, None, True), lanes.integer(0)
    while True:
        empty = empty_before_end(on_device, window, before, lanes)
        before = lanes.of(empty, lanes.integer(LANES - 1))
        while index < before * parts:
            found = part_in(on_device, window, empty, index, lanes.integer(parts), lanes)
            yield Part(*map(int, found))
            index = index + stride
        if is_last(on_device, window):
            return
        window = next_window(on_device, window, size_at, lanes, None, True)


def random_sizes(random: Random) -> tuple[list[int], int]:
    """Returns sizes and the axis' length, which they seldom fill exactly."""
    number = random.choice([1, 2, 8, 31, 32, 33, 64, 65, 100])
    kind = random.choice(["even", "uneven", "mostly empty", "ones", "one", "hostile"])
    if kind == "even":
        sizes = [random.randint(0, 200)] * number
    elif kind == "uneven":
        sizes = [int(random.expovariate(1 / 150)) for _ in range(number)]
    elif kind == "mostly empty":
        sizes = [random.choice([0, 0, 0, random.randint(0, 300)]) for _ in range(number)]
    elif kind == "ones":
        sizes = [1] * number
    elif kind == "one":
        sizes = [0] * number
        sizes[random.randrange(number)] = random.randint(0, 3000)
    else:
        values = [-1, -(2**31), 0, 1, 77, HUGE, HUGE - 1, 2**30, 63, 64, 65]
        sizes = [random.choice(values) for _ in range(number)]
    total = sum(max(0, size) for size in sizes)
    length = random.choice([total, total + random.randint(1, 300), total * 2 // 3, 1])
    return sizes, max(1, min(length, 4000))


def random_case(random: Random, grouped: str) -> Case:
    sizes, length = random_sizes(random)
    case = Case(
        sizes, length,
        rows=random.choice([64, 128, 256]) if grouped == "m" else None,
        clusters_m=random.randint(1, 5) if len(sizes) < 40 else 1,
        clusters_n=random.randint(1, 5 if len(sizes) < 40 else 2),
        along_m=random.random() < 0.5,
        width=random.randint(1, 16),
        skip_empty=grouped == "k" and random.random() < 0.5,
    )  # fmt: skip
    if random.random() < 0.5:  # some runs belong to no group, as of other devices or batches
        period = random.randint(1, len(sizes) + 1)
        first = random.randrange(period)
        count = random.randint(1, period - first)
        case = replace(
            case, period=period, first=first, count=count, step=random.choice([0, count])
        )
    return case


@pytest.mark.parametrize("grouped", ["m", "k"])
def test_every_tile_is_found_once_in_order_with_its_matrix(grouped):
    random = Random(f"tiles {grouped}")
    for _ in range(120):
        case = random_case(random, grouped)
        expected = list(expected_tiles(case))
        assert found_tiles(case) == found_tiles(case, lanes=WARP) == expected, case


def test_tiles_of_grouped_rows_cover_each_row_once():
    """Said again without the reference's arithmetic: rows and columns are painted."""
    random = Random(2)
    for _ in range(60):
        case = random_case(random, "m")
        assert case.rows
        painted = np.zeros((case.clusters_n, case.length), int)
        matrix_of_row = np.full(case.length, -2)
        for matrix, start, end, m, n in found_tiles(case):
            rows = slice(start + m * case.rows, min(end, start + (m + 1) * case.rows))
            assert rows.start < rows.stop <= case.length
            painted[n, rows] += 1
            assert np.isin(matrix_of_row[rows], (-2, matrix)).all()
            matrix_of_row[rows] = matrix
        assert (painted == 1).all()
        for run in runs_of(case):
            assert (matrix_of_row[run.start : run.end] == run.matrix).all()


def test_pairs_cover_each_row_and_column_once_and_part_at_the_last_odd_tile_alone():
    random = Random(4)
    for _ in range(60):
        case = random_case(random, "m")
        rows = case.rows
        assert rows
        painted = np.zeros((2 * case.clusters_n, case.length), int)
        for tile in group_tiles(
            case.raster, case.sizes, rows, itertools.count(), lanes=INT32_LANES
        ):
            places = [tile_in_pair(tile, cta, rows, INT32_LANES) for cta in (0, 1)]
            (m, n, together), other = [tuple(map(int, place)) for place in places]
            tiles = math.ceil((tile.end - tile.start) / rows)
            assert together == (m - m % 2 + 1 < tiles)
            assert other[:2] == ((m + 1, n) if together else (m, n + 1))
            for row, column in ((m, n), other[:2]):
                start = tile.start + row * rows
                assert start < tile.end
                painted[column, start : min(tile.end, start + rows)] += 1
        assert (painted == 1).all()


def test_each_matrix_of_grouped_k_is_written_once_also_for_empty_groups():
    random = Random(3)
    for _ in range(60):
        case = replace(random_case(random, "k"), skip_empty=False)
        case = replace(case, step=case.raster.count)
        count, num_sizes = case.raster.count, len(case.sizes)
        groups = Groups(case.raster.period, count, case.first, step=count)
        matrices = groups.matrices(num_sizes)
        painted = np.zeros((matrices, case.clusters_m, case.clusters_n), int)
        for matrix, _, _, m, n in found_tiles(case):
            assert matrix >= 0
            painted[matrix, m, n] += 1
        assert (painted == 1).all() and groups.total(num_sizes) == matrices


@pytest.mark.parametrize("warps", [1, 3, 132])
def test_each_part_of_an_empty_group_is_found_once_and_none_of_another(warps):
    random = Random(f"parts {warps}")
    for _ in range(25):
        case = replace(random_case(random, "k"), skip_empty=True)
        case = replace(case, step=case.raster.count)
        parts = random.choice([1, 2, 7])
        found = [
            tuple(part)
            for first in range(warps)
            for part in parts_of_empty_groups(case.raster, case.sizes, parts, first, warps)
        ]
        empty = [s.matrix for s in runs_of(case)[:-1] if s.matrix >= 0 and s.start == s.end]
        assert sorted(found) == list(itertools.product(empty, range(parts)))
        multiplied = {tile[0] for tile in found_tiles(case)}
        assert not multiplied & set(empty)


def test_warps_share_the_parts_evenly():
    case = Case([0, 5, 0, 0] * 20, 100, None)
    counts = [
        len(list(parts_of_empty_groups(case.raster, case.sizes, 3, first, 7))) for first in range(7)
    ]
    assert sum(counts) == 60 * 3 and max(counts) - min(counts) <= 1


@pytest.mark.parametrize("along_m", [True, False])
@pytest.mark.parametrize("width", range(1, 17))
def test_every_width_walks_both_ways(along_m, width):
    for rows, clusters_m in ((64, 0), (None, 7)):
        case = Case(
            [64 * 9 + 1, 0, 64 * 18, 5], 2000, rows, clusters_m, clusters_n=5, along_m=along_m,
            width=width,
        )  # fmt: skip
        assert found_tiles(case) == list(expected_tiles(case))


@pytest.mark.parametrize("grouped", ["m", "k"])
@pytest.mark.parametrize("stride", [1, 3, 132, 5000])
def test_ctas_that_step_over_each_others_tiles_share_them_all(grouped, stride):
    random = Random(f"strides {grouped}")
    for _ in range(4):
        case = random_case(random, grouped)
        expected = list(expected_tiles(case))
        for start in range(min(stride, 3)):
            indices = itertools.count(start, stride)
            assert found_tiles(case, indices) == expected[start::stride]


@pytest.mark.parametrize("rows", [128, None])
def test_thousands_of_groups(rows):
    random = Random(5)
    sizes = [random.choice([0, 0, 1, 5, 300, -3]) for _ in range(3000)]
    case = Case(sizes, sum(max(0, s) for s in sizes) - 100, rows, clusters_m=1, clusters_n=1)
    tiles = found_tiles(case, range(0, 10**6, 7))
    assert tiles == list(expected_tiles(case))[::7] and len(tiles) > 100


@pytest.mark.parametrize("number", [1, 31, 32, 33, 63, 64, 95, 96])
def test_what_sizes_leave_is_found_wherever_a_window_ends(number):
    """It is the run behind the last size, which may be the first of a window."""
    case = Case([2] * number, 2 * number + 130, 128, clusters_n=1)
    tiles = found_tiles(case)
    start, end = 2 * number, 2 * number + 130
    assert tiles[-2:] == [(-1, start, end, 0, 0), (-1, start, end, 1, 0)]
    assert [tile[0] for tile in tiles[:-2]] == list(range(number))
    assert [tile[0] for tile in found_tiles(replace(case, rows=None, clusters_m=1))] == list(
        range(number)
    )


def test_what_sizes_leave_is_of_no_group_where_a_period_would_begin():
    """So a batch of sizes that fill their rows has no matrix behind its last."""
    batches, groups = 3, 4
    sizes = [10, 20, 0, 2, 8] * batches  # the fifth: what the four leave of each 40 rows
    for rows, length in ((64, 40 * batches), (None, 40 * batches + 7), (64, 40 * batches + 7)):
        case = Case(
            sizes, length, rows, 1, 1, period=groups + 1, first=0, count=groups, step=groups
        )
        matrices = [tile[0] for tile in found_tiles(case)]
        assert max(matrices) == batches * groups - 1
        assert found_tiles(case) == list(expected_tiles(case))


def test_groups_of_other_devices_are_rows_of_none():
    """Sizes: the rows before the local groups, three local groups, the rest."""
    case = Case([100, 5, 0, 70, 40], 215, 64, clusters_n=1, period=6, first=1, count=3)
    assert [(tile[0], tile[1], tile[2]) for tile in found_tiles(case)] == [
        (-1, 0, 100), (-1, 0, 100), (0, 100, 105), (2, 105, 175), (2, 105, 175), (-1, 175, 215),
    ]  # fmt: skip
    of_k = found_tiles(replace(case, rows=None, clusters_m=1))
    assert [tile[:3] for tile in of_k] == [(0, 100, 105), (1, 105, 105), (2, 105, 175)]


def test_batches_may_share_the_matrices():
    case = Case([3, 4, 1] * 3, 24, 64, clusters_n=1, period=3, count=2, step=0)
    assert [tile[0] for tile in found_tiles(case)] == [0, 1, -1] * 3


@pytest.mark.parametrize("rows", [64, None])
@pytest.mark.parametrize("size", [HUGE, MAX_LENGTH, MAX_LENGTH - 1])
def test_the_longest_axis_and_the_largest_sizes_stay_in_int32(rows, size):
    case = Case([size] * 100, MAX_LENGTH, rows, clusters_m=1, clusters_n=128)
    if rows:
        total = sum(
            math.ceil((run.end - run.start) / rows) * case.clusters_n for run in runs_of(case)
        )
    else:
        total = 100 * case.clusters_n
    assert total < MAX_TILES
    indices = [0, total // 2, total - 1]
    first, _, last = found_tiles(case, [*indices, total])
    assert first[:3] == (0, 0, min(size, MAX_LENGTH))
    assert last[0] == (99 if rows is None else 1 if size < MAX_LENGTH else 0)


def test_a_matrix_of_the_most_tiles_stays_in_int32():
    for along_m, width in itertools.product((True, False), (1, 16)):
        case = Case([5], 5, None, 1, MAX_TILES - 1, along_m=along_m, width=width)
        (tile,) = found_tiles(case, [MAX_TILES - 2])
        order = make_raster(1, MAX_TILES - 1, 1, along_m=along_m, swizzle=width)
        assert (tile[3], tile[4]) == tile_at(order, MAX_TILES - 2)[:2]


# The lanes themselves


def test_lanes_calculate_as_int32_of_the_device():
    with pytest.raises(OverflowError):
        print(Int32(2**30) * 2)
    with pytest.raises(OverflowError):
        print(Int32(np.full(LANES, HUGE)) + np.arange(LANES))
    with pytest.raises(ZeroDivisionError):
        print(Int32(3) // Int32(0))
    assert int(Int32(-7) // 2) == -3 and int(Int32(7) // 2) == 3 and int(Int32(-7) % 4) == -3
    halves = Int32(np.array([-7, 7] * 16)) // 2
    assert np.array_equal(halves.value, [-3, 3] * 16)


def test_lanes_see_those_before_them():
    lanes = INT32_LANES
    assert np.array_equal(lanes.prefix_sum(lanes.lane).value, np.cumsum(range(LANES)))
    assert int(lanes.first(lanes.lane > 4)) == 5
    assert int(lanes.of(lanes.lane * 3, lanes.integer(7))) == 21
    with pytest.raises(AssertionError, match="no lane"):
        lanes.first(lanes.lane < 0)
