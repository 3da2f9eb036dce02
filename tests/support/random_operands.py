"""Numbers of the operands of a problem: random ones, with masks and scales."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import numpy as np
from support.places import Place, factor_places
from support.trial import Inputs

from jax_hopper_gemm.gemm.grid import ceil_div
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.spec import PROMOTION_K

_POOL = 4_000_037  # random numbers that operands are cut from; prime, so that rows differ


def integers(problem: GemmProblem, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns A (L, M, K) and B (L, K, N) of integers from -3 to 3: their product is exact."""
    inputs = integer_inputs(problem, seed)
    return inputs.a, inputs.b[0]


def normals(problem: GemmProblem, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns A (L, M, K) and B (L, K, N) of normal random numbers."""
    inputs = normal_inputs(problem, seed, 1.0)
    return inputs.a, inputs.b[0]


def integer_inputs(problem: GemmProblem, seed: int) -> Inputs:
    """Returns inputs of integers from -3 to 3, and masks: sums and products are exact."""
    return _inputs(problem, _integer_pool(seed))


def scale_inputs(problem: GemmProblem, inputs: Inputs, seed: int) -> Inputs:
    """Returns inputs with scales, powers of two; NaNs where there is no block."""
    rng, found = np.random.default_rng(seed), []
    if problem.k_group:
        shape = (
            problem.l if problem.b.batch_stride else 1, ceil_div(problem.k, problem.k_group),
            problem.n,
        )  # fmt: skip
        count = problem.graph.accumulators
        arrays = np.exp2(rng.integers(-2, 3, (count, *shape))).astype(np.float32)
        return replace(inputs, scales=tuple(arrays))
    for scales, lines in ((problem.a_scales, problem.m), (problem.b_scales, problem.n)):
        assert scales
        along_k, length = ceil_div(problem.k, PROMOTION_K), scales.k_stride
        matrices = problem.l if scales.batch_stride else 1
        array = np.exp2(rng.integers(-2, 3, (matrices, along_k, length))).astype(np.float32)
        array[..., -(-lines // scales.block) :] = np.nan
        found.append(array)
    return replace(inputs, scales=tuple(found))


def normal_inputs(problem: GemmProblem, seed: int, spread: float | None = None) -> Inputs:
    """Returns inputs of normal random numbers, and masks.

    Args:
      spread: standard deviation of A's elements; None makes that of the product's about 2, where
        activations bend.
    """
    pool = np.roll(_normal_pool(), seed * 9973 % _POOL)
    return _inputs(problem, pool, 2 / math.sqrt(problem.k) if spread is None else spread)


@cache
def _integer_pool(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-3, 4, _POOL).astype(np.float32)


@cache
def _normal_pool() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(_POOL, np.float32)


def _inputs(problem: GemmProblem, pool: np.ndarray, scale: float = 1.0) -> Inputs:
    """Returns inputs cut from `pool`, A's elements times `scale`."""
    places = [place for buffer in factor_places(problem) for place in buffer]
    values = [_cut(place, np.roll(pool, -i * 1009)) for i, place in enumerate(places)]
    if scale != 1.0:
        values[0] = (values[0].astype(np.float32) * scale).astype(values[0].dtype)
    count = 1 + max(problem.graph.accumulators, len(problem.panels))
    return Inputs(values[0], tuple(values[1:count]), tuple(values[count:]))


def _cut(place: Place, pool: np.ndarray) -> np.ndarray:
    """Returns an array filled from `pool`, over again where it is too short."""
    batch = place.nest or ((place.shape[0], place.strides[0]),)
    distinct = [extent if stride else 1 for extent, stride in batch]
    one = np.resize(pool, (*distinct, *place.shape[1:]))
    cast = one > 0 if place.dtype == "bool" else one.astype(jnp.dtype(place.dtype))
    whole = np.broadcast_to(cast, (*(extent for extent, _ in batch), *place.shape[1:]))
    return whole.reshape(place.shape) if place.nest else whole
