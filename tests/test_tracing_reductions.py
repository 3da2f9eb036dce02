"""Reductions of a product, and functions of its whole rows, are cut as other functions are."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.fused_functions import assert_same, fused, normal

REDUCTIONS = {
    "column_sum": lambda x: jnp.sum(x, axis=-2),
    "row_sum": lambda x: jnp.sum(x, axis=-1),
    "row_max": lambda x: jnp.max(x, axis=-1, keepdims=True),
    "row_max of the negative": lambda x: jnp.min(x, axis=-1),
    "max": lambda x: jnp.max(jnp.abs(x)),
    "max of the negative": jnp.min,
    "column_sum of everything": jnp.sum,
    "column_sum of batch and rows": lambda x: jnp.sum(x, axis=(0, 1)),
    "row_sum of batch and columns": lambda x: jnp.sum(x, axis=(0, 2)),
    "row_max of batch and columns": lambda x: jnp.max(x, axis=(0, 2)),
    "row_sum for the mean": lambda x: jnp.mean(x, axis=-1),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("tile_limit", [256, 8])
def test_reductions_leave_the_kernel_without_a_matrix(name: str, tile_limit: int):
    fusion = assert_same(
        lambda x: REDUCTIONS[name](jnp.exp(x)), normal("bmn"), out="bmn", tile_limit=tile_limit
    )
    assert [result.kind for result in fusion.graph.results] == [name.split()[0]]
    assert fusion.uncovered == ()
    assert not fusion.graph.needs_whole_rows


@pytest.mark.parametrize("name", ["sum", "max"])
@pytest.mark.parametrize("extents", [(2, 8, 16), (2, 1, 1)])
def test_reductions_over_the_batch_alone(name: str, extents: tuple[int, ...]):
    x = normal("bmn")[: extents[0], : extents[1], : extents[2]]
    fusion = assert_same(lambda x: getattr(jnp, name)(jnp.exp(x), axis=0), x, out="bmn")
    whole = fusion.graph.results[0].kind == "max"  # of D, which is no more than its batch
    assert fusion.uncovered == (() if whole else (f"reduce_{name}",))


def test_a_bias_gradient_comes_from_the_same_pass():
    def loss(acc: Any, bias: Any, cotangent: Any) -> Any:
        return jax.vjp(lambda a, b: jax.nn.gelu(a + b).astype("bfloat16"), acc, bias)[1](cotangent)

    args = normal("bmn"), normal("n", 1, "bfloat16"), normal("bmn", 2, "bfloat16")
    fusion = assert_same(loss, *args, out="bmn")
    assert [result.kind for result in fusion.graph.results] == ["matrix", "column_sum"]
    assert fusion.results == (("b", "m", "n"), ("b", "n"))
    assert fusion.uncovered == ()


ROWS = {
    "softmax": lambda x: jax.nn.softmax(x, -1),
    "log_softmax": lambda x: jax.nn.log_softmax(x, -1),
    "layer norm": lambda x: jax.nn.standardize(x, -1),
    "rms norm": lambda x: x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6),
    "shifted by the least": lambda x: x - jnp.min(x, -1, keepdims=True),
    "in bfloat16": lambda x: x - jnp.max(x.astype("bfloat16"), -1, keepdims=True),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("gradient", [False, True])
def test_rows_that_fit_a_tile_are_normalised_in_the_kernel(name: str, gradient: bool):
    function = ROWS[name]
    if gradient:
        args = (normal("mn"), normal("mn", 1))
        fusion = assert_same(lambda x, g: jax.vjp(function, x)[1](g), *args, ulps=64)
    else:
        fusion = assert_same(function, normal("mn"))
    assert fusion.uncovered == ()
    assert len(fusion.graph.results) == 1
    assert fusion.graph.needs_whole_rows


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("gradient", [False, True])
def test_longer_rows_are_normalised_by_xla(name: str, gradient: bool):
    function, args = ROWS[name], (normal("mn"),)
    if gradient:
        function, args = (lambda x, g: jax.vjp(ROWS[name], x)[1](g)), (*args, normal("mn", 1))
    fusion = assert_same(function, *args, tile_limit=8, ulps=64)
    assert not fusion.graph.needs_whole_rows
    assert len(fusion.graph.matrices) == 1
    assert fusion.uncovered != ()


@pytest.mark.parametrize("tile_limit", [8, 256])
def test_logsumexp_never_writes_the_matrix(tile_limit: int):
    def function(x: Any, bias: Any) -> Any:
        return jax.nn.logsumexp(x + bias, -1), jnp.max(x + bias, -1)

    fusion = assert_same(function, normal("mn"), normal("n"), tile_limit=tile_limit)
    assert [result.kind for result in fusion.graph.results] == ["row_sumexp"]
    assert fusion.uncovered == ()


@pytest.mark.slow
@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan])
def test_sums_of_exp_of_what_is_not_finite(value: float):
    x = normal("mn").at[1, 3].set(value).at[2].set(value)
    for name in ("softmax", "logsumexp"):
        function = partial(getattr(jax.nn, name), axis=-1)
        fusion = fused(function, x, tile_limit=8)
        largest = jnp.max(x, -1)
        terms = jnp.where(x == largest[:, None], 1.0, jnp.exp(x - largest[:, None]))
        finished = [] if name == "logsumexp" else [x]
        finished += [largest, jnp.sum(terms, -1)]
        np.testing.assert_allclose(fusion.finish(*finished)[0], function(x), rtol=1e-6)


def test_top_k_of_a_row_that_fits():
    fusion = assert_same(lambda x: lax.top_k(jax.nn.softmax(x, -1), 3), normal("bmn"), out="bmn")
    assert [result.kind for result in fusion.graph.results] == ["top_k_values", "top_k_indices"]
    assert fusion.results == (("b", "m", "?"),) * 2
    assert fusion.uncovered == ()


@pytest.mark.parametrize(("k", "tile_limit"), [(3, 8)])
def test_other_top_k_is_left_to_xla(k: int, tile_limit: int):
    fusion = assert_same(lambda x: lax.top_k(x, k), normal("mn"), tile_limit=tile_limit)
    assert fusion.uncovered == ("top_k",)
