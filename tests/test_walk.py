"""The tile order, on the code that the device runs."""

import random

import pytest
from support.lanes import Int32, Int64

from jax_hopper_gemm.gemm.raster import MAX_TILES, Raster, magic_of, make_raster, tile_at

pytestmark = pytest.mark.pure


def random_grids(count, limit):
    rng = random.Random(0)
    for _ in range(count):
        yield rng.randint(1, limit), rng.randint(1, limit), rng.randint(1, 3)


@pytest.mark.parametrize("along_m", [True, False])
@pytest.mark.parametrize("swizzle", [1, 2, 3, 4, 8, 16])
def test_each_tile_is_visited_exactly_once(along_m, swizzle):
    for tiles_m, tiles_n, batches in random_grids(40, 20):
        raster = make_raster(tiles_m, tiles_n, batches, along_m=along_m, swizzle=swizzle)
        visited = [tile_at(raster, i) for i in range(raster.total)]
        expected = {
            (m, n, b) for m in range(tiles_m) for n in range(tiles_n) for b in range(batches)
        }
        assert len(visited) == len(expected)
        assert set(visited) == expected


@pytest.mark.parametrize("along_m", [True, False])
def test_neighbours_in_the_walk_share_an_operand_or_a_band(along_m):
    raster = make_raster(13, 11, 1, along_m=along_m, swizzle=4)
    for i in range(raster.total - 1):
        (m0, n0, _), (m1, n1, _) = tile_at(raster, i), tile_at(raster, i + 1)
        fast0, slow0, fast1, slow1 = (m0, n0, m1, n1) if along_m else (n0, m0, n1, m1)
        assert abs(fast1 - fast0) <= 1
        assert abs(slow1 - slow0) <= 4


def test_bands_are_no_wider_than_the_swizzle():
    raster = make_raster(32, 32, 1, along_m=True, swizzle=8)
    first_band = {tile_at(raster, i)[1] for i in range(32 * 8)}
    assert first_band == set(range(8))


def test_division_by_multiplication_is_exact_up_to_max_tiles():
    rng = random.Random(1)
    divisors = [1, 2, 3, 5, 7, 16, 255, 256, 257, 2**15 - 1, 2**29, 2**30 - 1]
    divisors += [rng.randint(1, MAX_TILES) for _ in range(200)]
    for d in divisors:
        magic, shift = magic_of(d)
        assert magic < 2**31
        for n in {0, 1, d - 1, d, d + 1, 2 * d - 1, MAX_TILES - 1, rng.randrange(MAX_TILES)}:
            if n < MAX_TILES:
                assert n * magic >> shift == n // d


def test_all_constants_fit_int32():
    raster = make_raster(2**15, 2**14, 1, along_m=True, swizzle=16)
    assert all(0 <= constant < 2**31 for constant in raster)


@pytest.mark.parametrize("along_m", [True, False])
@pytest.mark.parametrize("swizzle", [1, 3, 16])
@pytest.mark.parametrize(
    "grid",
    [(2**15, 2**15 - 1, 1), (MAX_TILES - 1, 1, 1), (1, MAX_TILES - 1, 1), (1, 1, MAX_TILES - 1)],
)
def test_the_most_tiles_stay_in_int32(grid, swizzle, along_m):
    raster = make_raster(*grid, along_m=along_m, swizzle=swizzle)
    on_device = Raster(*map(Int32, raster))
    for index in (0, 1, raster.total // 2, raster.total - 1):
        found = tile_at(on_device, Int32(index), Int64, lambda wide: Int32(wide.value))
        assert tuple(map(int, found)) == tile_at(raster, index)


def test_too_many_tiles_are_refused():
    with pytest.raises(AssertionError, match="counts to"):
        make_raster(2**15, 2**15, 1, along_m=True, swizzle=1)
