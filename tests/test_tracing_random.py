"""Random functions of a product, and their gradients, mean the same as the graphs they become."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.functions import random_function, vjp_of
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
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_functions_and_their_gradients_mean_the_same(first: int):
    for seed in range(first, first + 20):
        check_random_function(seed)
