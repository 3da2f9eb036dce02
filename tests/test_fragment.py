"""The exchange patterns of the epilogue's reductions, run on the CPU as the GPU runs them.

A NumPy array stands for a register: one element a thread of a warpgroup.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jax_hopper_gemm.gemm import wgmma_fragment

THREADS = np.arange(128, dtype=np.int32)
LANES = THREADS % 32
WIDTHS = (16, 32, 64)


def shuffle(x: np.ndarray, distance: int) -> np.ndarray:
    return x[THREADS ^ distance]


def elements_of(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows and columns (values, threads) of a subtile's values."""
    values = range(columns // 2)
    return (
        np.stack([wgmma_fragment.row_of(THREADS, v) for v in values]),
        np.stack([wgmma_fragment.column_of(THREADS, v) for v in values]),
    )


def held(matrix: np.ndarray) -> list[np.ndarray]:
    """Returns the registers in which a warpgroup holds a (64, columns) matrix."""
    return list(matrix[elements_of(matrix.shape[1])])


@pytest.mark.parametrize("columns", [8, *WIDTHS, 256])
def test_each_element_of_a_subtile_is_one_value_of_one_thread(columns):
    row, column = elements_of(columns)
    assert sorted((row * columns + column).ravel()) == list(range(64 * columns))


def test_a_threads_values_lie_where_wgmma_leaves_them():
    """Figure "WGMMA .m64nNk16 register fragment layout for accumulator matrix D" of the PTX ISA."""
    elements = {(0, 0): (0, 0), (0, 1): (0, 1), (0, 2): (8, 0), (0, 4): (0, 8), (1, 0): (0, 2)}
    elements |= {(4, 0): (1, 0), (31, 3): (15, 7), (32, 0): (16, 0), (127, 7): (63, 15)}
    for (thread, v), element in elements.items():
        assert (wgmma_fragment.row_of(thread, v), wgmma_fragment.column_of(thread, v)) == element


def test_a_position_is_the_same_by_shifts_and_by_divisions():
    shifted = wgmma_fragment.position_of(THREADS)
    divided = wgmma_fragment.DividedPosition(THREADS)
    for part in ("warp", "quad", "quad_lane"):
        assert np.array_equal(getattr(shifted, part), getattr(divided, part))


@pytest.mark.parametrize("v", range(16))
def test_a_value_lies_as_far_from_a_threads_first_as_in_thread_0(v):
    """As kernels compute it, from a start of their own."""
    position = wgmma_fragment.DividedPosition(THREADS)
    of_two, i = wgmma_fragment.line_of(v)
    row = wgmma_fragment.nth_row(wgmma_fragment.first_row(position, 640), of_two)
    assert np.array_equal(row, 640 + wgmma_fragment.row_of(THREADS, v))
    column = wgmma_fragment.first_column(position, 96) + wgmma_fragment.nth_column(0, i)
    assert np.array_equal(column, 96 + wgmma_fragment.column_of(THREADS, v))


@pytest.mark.parametrize("v", range(16))
def test_a_value_is_the_crossing_of_one_row_and_one_column_of_its_thread(v):
    of_two, i = wgmma_fragment.line_of(v)
    assert np.array_equal(
        wgmma_fragment.row_of(THREADS, v), wgmma_fragment.row_of(THREADS, 2 * of_two)
    )
    assert np.array_equal(
        wgmma_fragment.column_of(THREADS, v), wgmma_fragment.nth_column(THREADS % 4, i)
    )


@pytest.mark.parametrize(
    "distances, group",
    [
        (wgmma_fragment.ROW_LANES, wgmma_fragment.row_of(THREADS, 0)),
        (wgmma_fragment.COLUMN_LANES, THREADS // 32 * 4 + THREADS % 4),
        (wgmma_fragment.WARP_LANES, THREADS // 32),
    ],
    ids=["row", "column", "warp"],
)
def test_lanes_combine_with_those_that_hold_the_same_line_and_no_others(distances, group):
    everyone = [frozenset([int(thread)]) for thread in THREADS]
    sets = np.array(everyone, dtype=object)
    for distance in distances:
        assert all(a.isdisjoint(b) for a, b in zip(sets, shuffle(sets, distance), strict=True))
        sets = wgmma_fragment.over_lanes(sets, [distance], shuffle, lambda a, b: a | b)
    for thread in THREADS:
        assert sets[thread] == set(THREADS[group == group[thread]].tolist())


def test_all_lanes_of_a_sum_get_the_same_bits():
    values = np.random.default_rng(0).normal(size=128).astype(np.float32)
    sums = wgmma_fragment.over_lanes(values, wgmma_fragment.WARP_LANES, shuffle, np.add)
    assert all(len(set(warp.tolist())) == 1 for warp in sums.reshape(4, 32))


def columns_of_warps(matrix: np.ndarray) -> np.ndarray:
    """Returns what the four warps find for each column (4, columns), by `add_columns`."""
    columns = matrix.shape[1]
    registers = held(matrix)
    sums: list = [None] * (columns // 4)
    for v, value in enumerate(registers):
        i = wgmma_fragment.line_of(v)[1]
        sums[i] = value if sums[i] is None else sums[i] + value
    sums = wgmma_fragment.add_columns(sums, LANES, shuffle, np.where, np.add)
    found = np.full((4, columns), np.nan, matrix.dtype)
    for i, value in zip(wgmma_fragment.kept_columns(LANES, columns // 4), sums, strict=True):
        at = THREADS // 32, wgmma_fragment.nth_column(THREADS % 4, i)
        assert np.all(np.isnan(found[at]) | (found[at] == value))
        found[at] = value
        assert np.array_equal(found[at], value), "lanes that keep one column differ"
    return found


@pytest.mark.parametrize("columns", WIDTHS)
def test_column_sums_count_each_element_once(columns):
    for row in range(64):
        matrix = np.zeros((64, columns))
        matrix[row] = 1.0 + np.arange(columns)
        expected = np.zeros((4, columns))
        expected[row // 16] = matrix[row]
        assert np.array_equal(columns_of_warps(matrix), expected)


def test_column_sums_have_the_same_bits_for_all_widths_of_a_subtile():
    matrix = np.random.default_rng(1).normal(size=(64, 64)).astype(np.float32)
    whole = columns_of_warps(matrix)
    for width in WIDTHS:
        parts = [columns_of_warps(matrix[:, at : at + width]) for at in range(0, 64, width)]
        assert np.array_equal(np.concatenate(parts, axis=1), whole)


def top_k(row: np.ndarray, k: int, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns values and columns that a quad finds in one row, which a tile of `tile` holds."""
    padded = np.zeros(tile, np.float32)
    padded[: len(row)] = row
    quad_lane = THREADS % 4
    columns = tile // 4
    bits = [padded[wgmma_fragment.nth_column(quad_lane, i)].view(np.int32) for i in range(columns)]
    keys = [wgmma_fragment.order_key(b) for b in bits]
    extent = np.full(128, len(row), np.int32)
    taken = wgmma_fragment.columns_outside(quad_lane, extent, columns, np.where)
    values, indices = [], []
    for _ in range(k):
        key, i = wgmma_fragment.largest(keys, taken, np.where)
        mine = wgmma_fragment.nth_column(quad_lane, i)
        key, column = wgmma_fragment.largest_of_row(key, mine, shuffle, np.where)
        assert len(set(column.tolist())) == 1, "lanes disagree"
        taken = wgmma_fragment.take(taken, i, column == mine, np.where)
        assert all(word.dtype == np.int32 for word in (key, *taken))
        values.append(wgmma_fragment.order_key(key)[0])
        indices.append(column[0])
    return np.array(values, np.int32), np.array(indices)


def special_rows() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1.0, -1e-45], np.float32)
    payloads = np.array([0x7FFFFFFF, -1, 0x7F800001, -0x7FFFFF], np.int32).view(np.float32)
    return {
        "normal": rng.normal(size=256),
        "ties": rng.integers(0, 3, 200),
        "zeros": rng.choice([0.0, -0.0], 64),
        "special": rng.choice(special, 96),
        "payloads": rng.choice(np.concatenate([payloads, special]), 40),
        "least": np.full(33, -1, np.int32).view(np.float32),
        "all -inf": np.full(50, -np.inf),
        "odd": rng.normal(size=37),
    }


@pytest.mark.parametrize("name", special_rows())
@pytest.mark.parametrize("k", [1, 8, 32])
def test_top_k_is_that_of_lax_bit_by_bit(name, k):
    row = special_rows()[name]
    row = row if row.dtype == np.float32 else row.astype(np.float32)
    values, indices = jax.lax.top_k(row, k)
    tile = -(-len(row) // 16) * 16
    found_values, found_indices = top_k(row, k, tile)
    assert np.array_equal(found_indices, np.asarray(indices))
    assert np.array_equal(found_values, np.asarray(values).view(np.int32))


@pytest.mark.parametrize("extent", range(0, 70))
def test_columns_outside_of_d_are_taken_from_the_start(extent):
    words = wgmma_fragment.columns_outside(
        THREADS % 4, np.full(128, extent, np.int32), 16, np.where
    )
    for i in range(16):
        is_taken = words[0] >> i & 1
        assert np.array_equal(is_taken, wgmma_fragment.nth_column(THREADS % 4, i) >= extent)
