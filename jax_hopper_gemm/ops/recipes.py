"""Recipes: products of 16- or 32-bit arrays that run in 8 bits, and so do their gradients.

A recipe says how the operands and the cotangent are quantized. Each of the three products,

    y = x @ w        dx = dy @ w^T        dw = x^T @ dy

then is one of quantized arrays. The gradient is this rule, not a derivative: rounding has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..gemm.product import Options
from . import checks
from .quantized import BLOCK, Quantized, is_quantized, quantize, run_quantized
from .steps import Steps, traced

Gradients = Literal["float8_e4m3fn", "float8_e5m2"]
OPERAND = "float8_e4m3fn"


@dataclass(frozen=True)
class CurrentScaling:
    """One scale for each tensor, from its largest magnitude at this very step.

    Operands are float8_e4m3fn. The products of the backward pass promote their sums.

    Attributes:
      gradients: dtype of the cotangent: float8_e5m2 has the range, float8_e4m3fn the digits.
    """

    gradients: Gradients = "float8_e5m2"


@dataclass(frozen=True)
class BlockScaling:
    """One scale for each 1x128 of activations and cotangents and for each 128x128 of weights.

    Blocks lie along the axis that a product contracts: activations and cotangents are quantized
    once for each of the two products that read them. Weights are the right operand. All sums are
    promoted, as in DeepSeek-V3 (https://arxiv.org/abs/2412.19437).

    Attributes:
      gradients: dtype of the cotangent.
    """

    gradients: Gradients = "float8_e4m3fn"


Recipe = CurrentScaling | BlockScaling


@dataclass(frozen=True)
class _Rule:
    """What is static of a product of (..., M, K) and (..., N, K)."""

    op: str
    recipe: Recipe
    options: Options  # `preferred_element_type` is the result's dtype
    dtypes: tuple[Any, Any]  # of the operands, and so of their gradients

    def quantized(self, x: Any, dtype: str, axis: int, rows: int = 1) -> Quantized:
        """Returns matrices whose blocks lie along `axis`, of as many `rows` across it."""
        if isinstance(self.recipe, CurrentScaling):
            return quantize(x, dtype)
        blocks = [1] * x.ndim
        blocks[-2:] = [rows, rows]
        blocks[axis] = BLOCK
        return quantize(x, dtype, blocks)

    def multiply(self, x: Quantized, y: Quantized, axes: tuple[int, int], options: Any) -> Any:
        """Contracts one axis of each; the others but the batch's are the result's."""
        batch = tuple(range(x.ndim - 2))
        numbers = tuple((axis,) for axis in axes), (batch, batch)
        return run_quantized(
            self.op, (("lhs", x), ("rhs", y)), numbers, Steps(self.op), (), options
        )

    def forward(self, x: Any, w: Any) -> tuple[Any, Quantized]:
        """Returns the product and the quantized weights."""
        k = x.ndim - 1
        left, right = self.quantized(x, OPERAND, k), self.quantized(w, OPERAND, k, BLOCK)
        return self.multiply(left, right, (k, k), self.options), right

    def with_residuals(self, x: Any, w: Any) -> Any:
        """Returns the product, then what the gradients need: 8 bits of an element."""
        y, right = self.forward(x, w)
        return y, (self.quantized(x, OPERAND, x.ndim - 2), right)

    def gradients(self, left: Quantized, right: Quantized, dy: Any) -> tuple[Any, Any]:
        """Returns (..., M, K) and (..., N, K)."""
        m, n, dtype = dy.ndim - 2, dy.ndim - 1, self.recipe.gradients
        along_n, along_m = (self.quantized(dy, dtype, axis) for axis in (n, m))
        lhs, rhs = (
            replace(self.options, preferred_element_type=x, precision=lax.Precision.HIGHEST)
            for x in self.dtypes
        )
        dx = self.multiply(along_n, right, (n, m), lhs)
        return dx, self.multiply(along_m, left, (m, m), rhs)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: Any, w: Any, rule: _Rule) -> Any:
    return rule.forward(x, w)[0]


def _forward(x: Any, w: Any, rule: _Rule) -> Any:
    return _once(rule.with_residuals, rule.op, x, w)


def _backward(rule: _Rule, residuals: Any, dy: Any) -> Any:
    return _once(rule.gradients, rule.op, *residuals, dy)


_product.defvjp(_forward, _backward)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _once(function: Callable[..., Any], op: str, *arrays: Any) -> Any:
    """Calls a rule's function, whose own derivative is an error."""
    return function(*arrays)


@_once.defjvp
def _(function: Any, op: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        f"{op}: a product with a recipe has a first derivative in reverse mode alone, as its "
        "gradient is a rule: leave `recipe` out where you differentiate twice"
    )


def check_recipe(op: str, recipe: Any, pair: tuple[Any, Any], cotangent_dtype: Any) -> None:
    """Checks that a recipe is one, that it has floats to quantize, and alone rounds cotangents."""
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"{op}: recipe is {recipe!r}, expected one of jax_hopper_gemm.recipes, such as "
            "recipes.BlockScaling()"
        )
    if recipe.gradients not in ("float8_e4m3fn", "float8_e5m2"):
        raise ValueError(
            f"{op}: gradients of the recipe are {recipe.gradients!r}, expected float8_e4m3fn or "
            "float8_e5m2"
        )
    if cotangent_dtype is not None:
        raise ValueError(
            f"{op}: cotangent_dtype is {jnp.dtype(cotangent_dtype).name} and there is a recipe, "
            "which quantizes cotangents: leave one out"
        )
    if is_quantized(*pair):
        raise TypeError(f"{op}: an operand is quantized and there is a recipe, which quantizes")
    for x in pair:
        if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            raise TypeError(f"{op}: an operand is {checks.describe(x)}, a recipe takes floats")


def run_recipe(
    recipe: Recipe,
    arrays: tuple[Any, Any],
    dimension_numbers: Any,
    steps: Steps,
    following: tuple[Any, ...],
    options: Options,
) -> Any:
    """Returns a product by a recipe, and what follows it.

    Args:
      arrays: floats; the right one is the weights.
      dimension_numbers: as in `dot_general`.
      steps: what follows; `following` are its operands, checked.
      options: `preferred_element_type` None is the promoted dtype of the operands.
    """
    lhs, rhs = map(jnp.asarray, arrays)
    (lhs_k, rhs_k), (lhs_batch, rhs_batch) = dimension_numbers
    x, rows = _matrices(lhs, lhs_batch, lhs_k)
    w, columns = _matrices(rhs, rhs_batch, rhs_k)
    preferred = options.preferred_element_type
    several = isinstance(preferred, tuple)
    whole = jnp.result_type(lhs, rhs) if preferred is None or several else jnp.dtype(preferred)
    plain = not (steps.named or steps.activation or steps.epilogue)
    dtype = whole if plain else jnp.dtype(jnp.float32)
    if isinstance(recipe, BlockScaling):
        options = replace(options, precision=lax.Precision.HIGHEST)
    options = replace(options, preferred_element_type=dtype)
    product: Any = _product(x, w, _Rule(steps.op, recipe, options, (lhs.dtype, rhs.dtype)))
    batch = tuple(lhs.shape[axis] for axis in lhs_batch)
    product = product.reshape(*batch, *rows, *columns)
    if plain:
        return product
    follow = traced(steps.op, steps, (product,), following, whole, preferred if several else None)
    return follow.apply(product)


def _matrices(x: Any, batch: Any, contracted: Any) -> tuple[Any, tuple[int, ...]]:
    """Returns (M, K) or (B, M, K) of an operand, and the extents of M's axes."""
    free = [axis for axis in range(x.ndim) if axis not in (*batch, *contracted)]
    shape = [tuple(x.shape[axis] for axis in axes) for axes in (batch, free, contracted)]
    lead = (int(np.prod(shape[0], dtype=int)),) if batch else ()
    m, k = (int(np.prod(extents, dtype=int)) for extents in shape[1:])
    return lax.transpose(x, (*batch, *free, *contracted)).reshape(*lead, m, k), shape[1]
