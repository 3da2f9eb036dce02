"""Matrices of random numbers, and the layouts of the two operands of a product."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np

from jax_hopper_gemm.gemm.problem import Major

A_MAJORS: tuple[Major, ...] = ("k", "m")
B_MAJORS: tuple[Major, ...] = ("n", "k")
LAYOUTS = list(itertools.product(A_MAJORS, B_MAJORS))


def normal(shape, dtype="bfloat16", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))
