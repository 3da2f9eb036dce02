"""Recipes: products of 16- or 32-bit arrays that run in 8 bits, and so do their gradients."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ..gemm.recipes import BlockScaling as BlockScaling
from ..gemm.recipes import ByRecipe, Recipe
from ..gemm.recipes import CurrentScaling as CurrentScaling
from ..gemm.recipes import Int8Forward as Int8Forward
from ..gemm.spec import BLOCKS
from ..primitives import by_recipe as _by_recipe  # noqa: F401
from . import checks
from .contexts import is_batch_invariant
from .delayed import DelayedScaling as DelayedScaling
from .quantized import is_quantized
from .replaced import is_replaced


def as_recipe(op: str, recipe: Any, operands: Any = (), cotangent_dtype: Any = None) -> Any:
    """Returns a recipe, checked, as the option of a product; None for None.

    Args:
      operands: of the product, as the user gave them; they must be floats.
    """
    if recipe is None:
        return None
    if isinstance(recipe, DelayedScaling):
        raise NotImplementedError(
            f"{op}: a DelayedScaling is the state of one product: matmul and dot_general take it. "
            "Take another recipe here"
        )
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"{op}: recipe is {recipe!r}, expected one of jax_hopper_gemm.recipes, such as "
            "recipes.BlockScaling()"
        )
    _check(op, recipe, operands, cotangent_dtype)
    return ByRecipe(recipe)


def _check(op: str, recipe: Any, operands: Any, cotangent_dtype: Any) -> None:
    gradients = getattr(recipe, "gradients", "float8_e4m3fn")
    if gradients not in ("float8_e4m3fn", "float8_e5m2"):
        raise ValueError(
            f"{op}: gradients of the recipe are {gradients!r}, expected the name "
            "'float8_e4m3fn' or 'float8_e5m2'"
        )
    columns = getattr(recipe, "gradient_columns", 1)
    if columns not in BLOCKS:
        raise ValueError(f"{op}: gradient_columns of the recipe is {columns!r}, expected 1 or 128")
    if not isinstance(grouped := getattr(recipe, "grouped_weights", False), bool):
        raise TypeError(
            f"{op}: grouped_weights of the recipe is {grouped!r}, expected True or False"
        )
    if cotangent_dtype is not None:
        raise ValueError(
            f"{op}: cotangent_dtype is {jnp.dtype(cotangent_dtype).name} and there is a recipe, "
            "which quantizes cotangents: leave one out"
        )
    if is_batch_invariant() and isinstance(recipe, CurrentScaling | DelayedScaling):
        raise ValueError(
            f"{op}: batch_invariant asks for rows of the same bits, but "
            f"{type(recipe).__name__} scales one by the largest number of all: take BlockScaling"
        )
    if is_quantized(*operands):
        raise TypeError(f"{op}: an operand is quantized and there is a recipe, which quantizes")
    for x in operands:
        if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            raise TypeError(f"{op}: an operand is {checks.describe(x)}, a recipe takes floats")
    if is_replaced():
        raise NotImplementedError(
            f"{op}: there is a recipe, but jax.lax.dot_general is replaced here, as Qwix does in a "
            "model that it quantizes: leave the recipe or Qwix out"
        )


def delayed(op: str, recipe: Any, operands: Any, cotangent_dtype: Any) -> DelayedScaling | None:
    """Returns a recipe that is the state of a product, checked; None for any other."""
    if not isinstance(recipe, DelayedScaling):
        return None
    _check(op, recipe, operands, cotangent_dtype)
    scale, history = recipe.scale, recipe.amax_history
    checks.as_arrays(op, None, **{"recipe.scale": scale, "recipe.amax_history": history})
    lengths = jnp.shape(history)
    if jnp.shape(scale) != (3,) or len(lengths) != 2 or lengths[0] != 3 or not lengths[1]:
        raise ValueError(
            f"{op}: the recipe has scales {checks.describe(scale)} and a history "
            f"{checks.describe(history)}, expected f32[3] and f32[3,length]: one state a product, "
            "as recipes.DelayedScaling.initial() makes it"
        )
    return recipe
