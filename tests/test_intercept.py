"""`intercept_ragged_dot`: calls of JAX's own ragged products run on this library's."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import lax
from support.ragged import LHS, RHS, SIZES, numbers

import jax_hopper_gemm as jhg


def ragged_names(function, *args) -> set[str]:
    equations = jax.make_jaxpr(function)(*args).eqns
    return {e.primitive.name for e in equations if "ragged" in e.primitive.name}


def test_intercepted_calls_run_on_ours():
    def layer(lhs, rhs, sizes):
        dimensions = numbers(([1], [1]), ([], []), 0, 0)
        return lax.ragged_dot(lhs, rhs, sizes) + lax.ragged_dot_general(lhs, rhs, sizes, dimensions)

    args = (LHS, RHS, SIZES)
    theirs, before = layer(*args), (lax.ragged_dot, lax.ragged_dot_general)
    with jhg.intercept_ragged_dot():
        assert ragged_names(layer, *args) == {"hopper_ragged_dot"}
        np.testing.assert_array_equal(layer(*args), theirs)
        assert jax.lax.ragged_dot.__name__ == "ragged_dot"
    assert (lax.ragged_dot, lax.ragged_dot_general) == before
    assert ragged_names(lambda *args: lax.ragged_dot(*args), *args) == {"ragged_dot_general"}


def test_interception_nests_and_ends_with_an_exception():
    before = lax.ragged_dot
    with pytest.raises(RuntimeError, match="stop"):
        with jhg.intercept_ragged_dot():
            outer = lax.ragged_dot
            with jhg.intercept_ragged_dot(implementation="hopper"):
                with pytest.raises(NotImplementedError, match="implementation='hopper'"):
                    lax.ragged_dot(LHS, RHS, SIZES)
            assert lax.ragged_dot is outer
            raise RuntimeError("stop")
    assert lax.ragged_dot is before
