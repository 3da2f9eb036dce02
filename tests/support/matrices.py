"""Matrices of random numbers, and the layouts of the two operands of a product."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np

LAYOUTS = list(itertools.product("km", "nk"))


def normal(shape, dtype="bfloat16", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))
