"""Rows picked by indices, and rows added up by index, whatever the indices."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.program_inspection import integers

from jax_hopper_gemm.primitives.rows import AT_ONCE, add_rows_p, in_order, pick_rows

WIDTH = 3


def add_rows(x, rows, length, scattered=False):
    return add_rows_p.bind(x, jnp.asarray(rows, jnp.int32), length=length, scattered=scattered)


def picked(x, rows):
    exists = (rows >= 0) & (rows < x.shape[0])
    return jnp.where(exists[:, None], jnp.take(x, rows, axis=0, mode="clip"), 0)


def added(x, rows, length):
    out = np.zeros((length, x.shape[1]))
    exists = (rows >= 0) & (rows < length)
    np.add.at(out, rows[exists], np.asarray(x, np.float64)[exists])
    return out


def indices(kind: str, count: int, length: int) -> np.ndarray:
    rng = np.random.default_rng([count, length])
    if kind == "any":
        return rng.integers(-2, length + 2, count)
    if kind == "uneven":
        return np.minimum(rng.zipf(1.3, count) - 1, length)
    return np.full(count, length // 2)


# Runs that end at, before and behind each multiple of what one pass adds, and several passes deep.
COUNTS = [1, AT_ONCE, AT_ONCE + 1, AT_ONCE**3 + AT_ONCE + 1]


@pytest.mark.parametrize("kind", ["any", "uneven", "one"])
@pytest.mark.parametrize("count, length", [*itertools.product(COUNTS, (2, 70))])
def test_rows_are_added_however_often_one_is_picked(count, length, kind):
    rows, x = indices(kind, count, length), integers((count, WIDTH))
    np.testing.assert_array_equal(add_rows(x, rows, length), added(x, rows, length))
    scattered = add_rows(x, rows, length, scattered=True)
    np.testing.assert_array_equal(scattered, added(x, rows, length))


@pytest.mark.parametrize("count, length", [(0, 4), (5, 0), (0, 0)])
def test_nothing_picked_and_nothing_to_pick_from_is_zeros(count, length):
    rows = np.zeros(count, np.int32)
    out = add_rows(integers((count, WIDTH)), rows, length)
    np.testing.assert_array_equal(out, np.zeros((length, WIDTH)))
    out = pick_rows(integers((length, WIDTH)), jax.device_put(rows))
    if length == 0:
        np.testing.assert_array_equal(out, np.zeros((count, WIDTH)))
    assert out.shape == (count, WIDTH)


def test_rows_that_there_are_not_are_zeros():
    rows: Any = np.array([2, -1, 0, 3, -(2**31), 2**31 - 1], np.int32)
    x: Any = np.asarray(integers((3, WIDTH))) + 5
    expected = [x[2], 0 * x[0], x[0], *[0 * x[0]] * 3]
    np.testing.assert_array_equal(pick_rows(x, rows), expected)


@pytest.mark.slow
def test_16_bit_sums_are_rounded_once():
    x = np.array([[256], *[[1]] * 40], jnp.bfloat16)
    assert add_rows(x, np.zeros(41), 1)[0, 0] == 296  # 256 + 1 is 256 in bfloat16


def test_first_rows_of_a_sum_are_added_in_their_order():
    x = jnp.asarray([[1e8], [5.0], [1.0], [-1e8]], jnp.float32)  # 1e8 + 1 is 1e8 in float32
    rows = np.array([1, 0, 1, 1])
    np.testing.assert_array_equal(add_rows(x, rows, 2), [[5], [0]])


@pytest.mark.slow
def test_derivatives_are_those_of_indexing():
    rows, x = jnp.asarray(indices("uneven", AT_ONCE + 4, 4)), integers((4, WIDTH))
    tangent = integers(x.shape, seed=1)

    @partial(jax.jit, static_argnums=0)
    def outcomes(pick, x):
        def loss(x):
            return (pick(x, rows) ** 3).sum()

        gradients = jax.grad(loss)(x), jax.grad(jax.checkpoint(loss))(x)
        return gradients, jax.hessian(loss)(x), jax.jvp(loss, (x,), (tangent,))

    jax.tree.map(np.testing.assert_array_equal, outcomes(pick_rows, x), outcomes(picked, x))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (1, 1), (2, None)])
def test_every_vmap_follows_indexing(axes):
    rows = np.stack([indices("any", 20, 6), indices("uneven", 20, 6)])
    x = integers((2, 6, WIDTH)) if axes[0] is not None else integers((6, WIDTH))
    if axes[0] is not None:
        x = jnp.moveaxis(x, 0, axes[0])
    rows = jnp.asarray(rows[0] if axes[1] is None else np.moveaxis(rows, 0, axes[1]))

    @partial(jax.jit, static_argnums=0)
    def outcomes(pick, x, rows):
        mapped = jax.vmap(pick, axes)
        gradients = jax.vmap(jax.grad(lambda x, rows: (pick(x, rows) ** 2).sum()), axes)
        of_map = jax.grad(lambda x: (mapped(x, rows) ** 2).sum())
        return mapped(x, rows), gradients(x, rows), of_map(x)

    jax.tree.map(
        np.testing.assert_array_equal, outcomes(pick_rows, x, rows), outcomes(picked, x, rows)
    )


@pytest.mark.slow
def test_a_number_out_of_range_is_none_of_the_next_mapped_array():
    x: Any = np.asarray(integers((2, 3, WIDTH))) + 5
    rows: Any = np.array([[3, 0], [-1, 4]], np.int32)
    expected = np.zeros((2, 2, WIDTH), np.float32)
    expected[0, 1] = x[0, 0]
    np.testing.assert_array_equal(jax.vmap(pick_rows)(x, rows), expected)
    ones, expected = np.ones((2, 2, WIDTH), np.float32), np.zeros((2, 3, WIDTH))
    expected[0, 0] = 1
    found = jax.vmap(lambda x, rows: add_rows(x, rows, 3))(ones, rows)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("count", [4, 2**31 - 2])
def test_numbers_are_sorted_stably(count):
    """With one key of number and place, and where that would not fit."""
    numbers = jnp.asarray([count, 0, 3, 0, count, 3, 1], jnp.int32)
    found, places = in_order(numbers, count)
    np.testing.assert_array_equal(places, [1, 3, 6, 2, 5, 0, 4])
    np.testing.assert_array_equal(found, numbers[places])
