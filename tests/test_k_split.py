"""Work units of split-K and stream-K: every k-tile once, and no cluster waits for ever."""

from __future__ import annotations

import random

import pytest

from jax_hopper_gemm.gemm.k_split import (
    MIN_K_TILES,
    begin_of,
    first_unit,
    make_k_split,
    next_unit,
    part_of,
    place_of,
    split_of,
)


def cases(count: int) -> list[tuple[int, int, int]]:
    """Returns random (tiles, k_tiles, clusters), and the edges."""
    rng = random.Random(0)
    edges = [(1, 1, 132), (1, 1024, 132), (16, 256, 132), (67, 40, 132), (131, 3, 132)]
    edges += [(132, 8, 132), (133, 8, 132), (263, 1, 132), (264, 7, 132), (5, 2, 1), (1, 9, 1)]
    drawn = [
        (int(4 ** rng.uniform(0, 6)), int(4 ** rng.uniform(0, 5)), rng.choice((1, 2, 30, 66, 132)))
        for _ in range(count)
    ]
    return edges + drawn


def tape(tiles: int, k_tiles: int, clusters: int):
    return make_k_split(tiles, k_tiles, *split_of(tiles, k_tiles, 64 * k_tiles, clusters))


def units(split, k_tiles: int, launched: int) -> list[list]:
    """Returns each cluster's units in the order in which it works on them, as `place_of` says."""
    found = []
    for cluster in range(launched):
        found.append([])
        unit = first_unit(split, k_tiles, cluster)
        while unit.item < split.items:
            found[-1].append(place_of(split, k_tiles, unit))
            unit = next_unit(split, k_tiles, unit, launched)
    return found


@pytest.mark.parametrize(("tiles", "k_tiles", "clusters"), cases(300))
def test_each_k_tile_of_each_tile_is_multiplied_once(tiles, k_tiles, clusters):
    split = tape(tiles, k_tiles, clusters)
    seen: dict[int, list[tuple[int, int, bool]]] = {}
    for tile, k_first, count, part in sum(units(split, k_tiles, min(split.items, clusters)), []):
        assert part.start == tile * k_tiles and count >= 1
        seen.setdefault(tile, []).append((k_first, count, part.is_last))
    assert sorted(seen) == list(range(tiles))
    for parts in seen.values():
        end = 0
        for k_first, count, is_last in sorted(parts):
            assert k_first == end
            end += count
            assert is_last == (end == k_tiles)
        assert end == k_tiles


@pytest.mark.parametrize(("tiles", "k_tiles", "clusters"), cases(300))
def test_clusters_wait_only_for_partial_sums_that_others_below_leave(tiles, k_tiles, clusters):
    split = tape(tiles, k_tiles, clusters)
    launched = min(split.items, clusters)
    assert split.ranges <= launched
    work = units(split, k_tiles, launched)
    left = {part.item: tile for its in work for tile, _, _, part in its if not part.is_last}
    assert all(item < split.ranges for item in left), "each has a slot"
    partial = [part.item for its in work for _, _, _, part in its if not part.is_last]
    assert len(partial) == len(set(partial)), "an item has one partial sum"
    for its in work:
        assert all(place[3].is_last for place in its[1:]), "it is left before all else is done"
    added = []
    for cluster, its in enumerate(work):
        for tile, _, _, part in its:
            item = part.item
            while part.is_last and begin_of(split, k_tiles, item) > part.start:
                item -= 1
                assert item < cluster and left[item] == tile
                added.append(item)
    assert sorted(added) == sorted(left), "each is added once"


@pytest.mark.parametrize(("tiles", "k_tiles", "clusters"), cases(300))
def test_shares_are_even(tiles, k_tiles, clusters):
    split = tape(tiles, k_tiles, clusters)
    lengths = [begin_of(split, k_tiles, i + 1) - begin_of(split, k_tiles, i)
               for i in range(split.ranges)]  # fmt: skip
    assert not lengths or max(lengths) - min(lengths) <= 1
    assert not lengths or min(lengths) >= min(MIN_K_TILES, k_tiles)


def test_few_tiles_are_cut_into_equal_parts_that_end_with_them():
    assert split_of(16, 256, 16384, 132) == (16, 128)
    split = make_k_split(16, 255, 16, 128)
    ends = [begin_of(split, 255, i + 1) % 255 for i in range(128)]
    assert [i for i, end in enumerate(ends) if end == 0] == list(range(7, 128, 8))


def test_parts_are_worth_their_partial_sums():
    assert split_of(1, 1024, 65536, 132) == (1, 24)  # not 132
    assert split_of(4, 8, 512, 132) == (4, 8)  # of 4 k-tiles, two parts
    assert split_of(4, 2, 128, 132) == (4, 4)


def test_whole_waves_are_taken_by_tiles():
    assert split_of(264, 64, 4096, 132) == (0, 0)
    assert split_of(480, 64, 4096, 132) == (480 - 264, 132)
    assert split_of(140, 64, 4096, 132) == (140, 132)
    split = make_k_split(480, 64, 216, 132)
    assert split.items == 132 + 264
    assert begin_of(split, 64, 132) == 216 * 64
    assert begin_of(split, 64, split.items) == 480 * 64


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("k_tiles", [8, 9, 15, 1000])
def test_ctas_of_a_cluster_share_all_k_tiles_evenly(k_tiles: int, ranks: int):
    parts = [part_of(k_tiles, rank, ranks) for rank in range(ranks)]
    assert [k for first, count in parts for k in range(first, first + count)] == list(
        range(k_tiles)
    )
    assert max(count for _, count in parts) - min(count for _, count in parts) <= 1
