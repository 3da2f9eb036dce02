"""Random functions of a product, and their gradients, mean the same as the graphs they become."""

from __future__ import annotations

import random
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import fused_functions
from support.functions import interpret, random_function, vjp_of
from support.fused_functions import EXTENTS, assert_same, normal

from jax_hopper_gemm.fusion import NotFusable


def check_random_function(seed: int) -> None:
    """Checks that a random function, and its gradient, mean the same as the graph they become."""
    rng = random.Random(seed)
    out = rng.choice(("mn", "bmn"))
    differentiable = rng.random() < 0.5
    function = random_function(rng, out, differentiable)
    operands = function.random_operands(rng, {x: EXTENTS[x] for x in out})
    args = (normal(out, seed), *map(jnp.asarray, operands))
    fusion = assert_same(function.function, *args, out=out, ulps=64)
    assert fusion.uncovered == (), function.description
    results = jax.eval_shape(function.function, *args)
    cotangents = [
        jnp.asarray(np.random.default_rng(seed).normal(size=r.shape)).astype(r.dtype)
        for r in results
    ]
    try:
        fusion = assert_same(vjp_of(function), *args, *cotangents, out=out, ulps=64)
        # Gradients of operands without the batch's axis are sums over it: of matrices that the
        # kernel stores, or of what XLA computes from those, where that stores less.
        sums = out == "bmn" and "reduce_sum" in fusion.uncovered
        assert not differentiable or sums or fusion.uncovered == (), function.description
    except NotFusable as error:
        assert "depends on the product" in str(error)


@pytest.mark.pure
@pytest.mark.parametrize("share, found", [(1e-6, False), (1e-4, True)])
def test_a_wrong_sum_is_found_though_its_terms_cancel(share: float, found: bool, monkeypatch):
    """By its share of the terms' magnitudes, not those of a sum beside it that is infinite."""
    acc = normal("mn")
    others = -acc[::-1, ::-1] + 1e-6

    def function(acc, others):
        return jnp.sum(acc + others), jnp.sum(jnp.exp(1000.0 * acc))

    def spoiled(*args):
        total, infinite = interpret(*args)
        assert np.isinf(infinite)
        return total + share * float(jnp.abs(acc + others).sum()), infinite

    monkeypatch.setattr(fused_functions, "interpret", spoiled)
    with pytest.raises(AssertionError, match="Not equal") if found else nullcontext():
        assert_same(function, acc, others, ulps=64)


@pytest.mark.pure
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_functions_and_their_gradients_mean_the_same(first: int):
    for seed in range(first, first + 20):
        check_random_function(seed)
