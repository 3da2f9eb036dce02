"""Partial results of a kernel's reductions are finished as NumPy would, whatever the tiles."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jax_hopper_gemm.gemm.epilogue_graph import Result, ResultKind
from jax_hopper_gemm.lowering.finish import finish_partials

L, M, N = 3, 200, 150
TILES = (16, 64, 150, 256)


def values(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(L, M, N)).astype(np.float32)


def of_parts(x: np.ndarray, axis: int, size: int, reduce) -> np.ndarray:
    """Returns the partial results (L, parts, ...) of `reduce` over parts of an axis."""
    cuts = range(size, x.shape[axis], size)
    return np.stack([reduce(part, axis) for part in np.split(x, cuts, axis)], axis=1)


def sumexp(part: np.ndarray, axis: int) -> np.ndarray:
    """Returns (2, ...) as a kernel writes it."""
    top = part.max(axis)
    base = np.where(np.isinf(top), 0, top)
    with np.errstate(over="ignore"):
        total = np.exp(part - np.expand_dims(base, axis), dtype=np.float32).sum(axis)
    return np.stack([top, total], axis=1)


def finish(kind: ResultKind, partials: np.ndarray):
    return jax.jit(lambda x: finish_partials(Result(kind, 0), x))(partials)


def test_column_sums_add_up():
    x = values()
    found = finish("column_sum", of_parts(x, 1, 64, np.sum))
    np.testing.assert_allclose(found, x.sum(1, dtype=np.float64), rtol=0, atol=M * 2e-7)


@pytest.mark.parametrize("tile", TILES)
def test_row_sums_add_up(tile):
    x = values()
    found = finish("row_sum", of_parts(x, 2, tile, np.sum))
    np.testing.assert_allclose(found, x.sum(2, dtype=np.float64), rtol=0, atol=N * 2e-7)


@pytest.mark.parametrize("tile", TILES)
def test_row_maxima_are_exact_and_keep_nan(tile):
    x = values()
    x[1, 7, 149] = np.nan
    x[2, 9] = -np.inf
    assert np.array_equal(finish("row_max", of_parts(x, 2, tile, np.max)), x.max(2), True)


def test_the_largest_is_over_the_whole_batch_and_keeps_nan():
    x = values()
    partials = np.random.default_rng(1).normal(size=(L, 13, 4)).astype(np.float32)
    assert finish("max", partials) == partials.max()
    partials[2, 12, 3] = np.nan
    assert np.isnan(finish("max", partials))
    assert finish("max", x[:, :1, :1] * 0 - np.inf) == -np.inf


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_row_sumexp_is_that_of_the_whole_row(tile, scale):
    x = values() * np.float32(scale)
    top, total = finish("row_sumexp", of_parts(x, 2, tile, sumexp))
    assert np.array_equal(top, x.max(2))
    expected = np.exp(x - x.max(2, keepdims=True).astype(np.float64)).sum(2)
    # A rounding of each difference, times its size, where exp still counts; those of the sum.
    np.testing.assert_allclose(total, expected, rtol=2e-6)


@pytest.mark.parametrize("tile", TILES)
def test_row_sumexp_of_infinities_makes_no_nan_and_keeps_nan(tile):
    x = values()
    x[0, 0] = -np.inf
    x[0, 1, 3:] = -np.inf  # whole tiles of nothing
    x[0, 2, 100] = np.inf
    x[0, 3] = np.inf
    x[0, 4, 0], x[0, 4, 140] = np.inf, -np.inf
    x[0, 5, 120] = np.nan
    x[0, 6, 0], x[0, 6, 149] = np.nan, np.inf
    x[0, 7, 5] = 3.0e38
    top, total = (np.asarray(part) for part in finish("row_sumexp", of_parts(x, 2, tile, sumexp)))
    assert np.array_equal(top, x.max(2), True)
    assert total[0, 0] == 0
    np.testing.assert_allclose(total[0, 1], np.exp(x[0, 1, :3] - x[0, 1].max()).sum(), rtol=1e-6)
    assert np.all(total[0, 2:5] == np.inf)
    assert np.all(np.isnan(total[0, 5:7]))
    assert total[0, 7] == 1
    assert np.all(np.isfinite(total[0, 8:])) and np.all(total[1:] >= 1)


def test_top_k_comes_finished():
    partials = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    result = Result("top_k_indices", 0, k=4)
    assert np.array_equal(finish_partials(result, jax.numpy.asarray(partials)), partials)
