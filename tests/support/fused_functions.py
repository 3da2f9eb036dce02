"""Functions of a product of small extents, fused and checked."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.functions import interpret
from support.stepwise import Run

from jax_hopper_gemm.fusion import Fusion, fuse
from jax_hopper_gemm.gemm.epilogue_checks import graph_violations

EXTENTS = {"b": 2, "m": 8, "n": 16}


def shape(labels: str) -> tuple[int, ...]:
    return tuple(EXTENTS[x] for x in labels)


def normal(labels: str, seed: int = 0, dtype: Any = "float32") -> jax.Array:
    values = np.random.default_rng(seed).normal(size=shape(labels)) * 2
    return jax.device_put(values.astype(dtype))


def fused(function: Any, *args: Any, out: str = "mn", **options: Any) -> Fusion:
    """Returns the fusion of a function, having checked its graph."""
    fusion = fuse(jax.make_jaxpr(function)(*args), 1, out, "m", "n", **options)
    assert [*graph_violations(fusion.graph)] == []
    return fusion


def assert_same(
    function: Any, *args: Any, out: str = "mn", ulps: float = 8, **options: Any
) -> Fusion:
    """Checks that a function's fusion gives what it gives, run operation by operation.

    Sums may be taken in another order, so `ulps` are of the largest element, too, and of a reduced
    result of the magnitudes that the function adds up, which may cancel. Of results in 16 bits one
    in fifty may round to the other side of a tie.
    """
    fusion = fused(function, *args, out=out, **options)
    with jax.disable_jit():
        wanted = jax.tree.leaves(function(*args))
    found = interpret(fusion, args[:1], args[1:], out, "m", "n")
    for got, want in zip(found, wanted, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        ulp = float(jnp.finfo(got.dtype).eps) if jnp.issubdtype(got.dtype, jnp.floating) else 0.0
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        scale = np.max(np.abs(want), initial=0, where=np.isfinite(want))
        tolerance = dict(rtol=ulps * 2**-23, atol=ulps * 2**-23 * scale)
        with np.errstate(invalid="ignore"):
            near = np.abs(got - want) <= ulp * np.abs(want)
        ties = near & ~np.isclose(got, want, **tolerance)
        if ties.sum() <= 1 + ties.size // 50:
            got = np.where(ties, want, got)
        if got.ndim < len(out) and not np.allclose(got, want, **tolerance, equal_nan=True):
            added = Run(function, *args, measured=True).added
            tolerance["atol"] = ulps * 2**-23 * max(scale, added)
        np.testing.assert_allclose(got, want, **tolerance)
    return fusion
