"""Recipes that tests on the CPU take, and arrays to quantize."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_hopper_gemm import recipes

CURRENT, BLOCKS = recipes.CurrentScaling(), recipes.BlockScaling()
INT8 = recipes.Int8Forward()
ALL = [CURRENT, BLOCKS, INT8]
COLUMNS = recipes.BlockScaling(gradient_columns=128)
GROUPED = [replace(recipe, grouped_weights=True) for recipe in (CURRENT, BLOCKS, COLUMNS)]


def normal(shape: tuple[int, ...], seed: int, dtype: Any = jnp.float32) -> jax.Array:
    """Returns random numbers whose columns are of several orders of magnitude."""
    x = np.random.default_rng(seed).standard_normal(shape)
    return jax.device_put((x * np.exp(np.linspace(-2, 2, shape[-1]))).astype(dtype))
