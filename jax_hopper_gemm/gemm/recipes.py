"""Recipes: which numbers of 8 bits the operands of a product are rounded to, and their scales.

A product by a recipe is one of 16- or 32-bit arrays that quantizes its operands. Its gradients are
products of the same recipe,

    y = x @ w        dx = dy @ w^T        dw = x^T @ dy

so a recipe knows an operand by its role: an activation, the weights, or a cotangent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from .spec import PROMOTION_K

Role = Literal["activation", "weights", "cotangent"]
Float8 = Literal["float8_e4m3fn", "float8_e5m2"]
E4M3: Float8 = "float8_e4m3fn"


@dataclass(frozen=True)
class Format:
    """How an operand is quantized: rows lie across the axis that a product contracts.

    Attributes:
      dtype: of 8 bits.
      rows: how many rows share a scale; None: all.
      along: how many elements of a row share it; None: all.
    """

    dtype: str
    rows: int | None = None
    along: int | None = None


@dataclass(frozen=True)
class CurrentScaling:
    """One scale for each tensor, from its largest magnitude at this very step.

    Activations and weights are float8_e4m3fn. The products of the backward pass promote their sums.

    Attributes:
      gradients: dtype of cotangents: float8_e5m2 has the range, float8_e4m3fn the digits.
      grouped_weights: whether gradients of grouped weights, too, are products of 8 bits. Else they
        are of the arrays as they are: on an H200 XLA's quantization takes more than kernels save,
        and of small groups that of blocks by a kernel does.
    """

    gradients: Float8 = "float8_e5m2"
    grouped_weights: bool = False

    def format(self, role: Role) -> Format | None:
        return Format(self.gradients if role == "cotangent" else E4M3)


@dataclass(frozen=True)
class BlockScaling:
    """One scale for each 1x128 of activations and cotangents and for each 128x128 of weights.

    Blocks lie along the axis that a product contracts: activations and cotangents are quantized
    once for each of the two products that read them. All sums are promoted, as in DeepSeek-V3
    (https://arxiv.org/abs/2412.19437).

    Attributes:
      gradients: dtype of cotangents.
      grouped_weights: as of `CurrentScaling`.
      gradient_columns: of a gradient of weights, how many columns share a scale for each 128 of
        what is contracted, 1 or 128. Rows have one each. Tensor cores wait for multiplication by
        scales of rows and of columns: with 128 a gradient takes 0.7 to 0.8 of the time.
    """

    gradients: Float8 = E4M3
    grouped_weights: bool = False
    gradient_columns: Literal[1, 128] = 1

    def format(self, role: Role) -> Format | None:
        rows = PROMOTION_K if role == "weights" else 1
        return Format(self.gradients if role == "cotangent" else E4M3, rows, PROMOTION_K)


@dataclass(frozen=True)
class Int8Forward:
    """int8 with a scale for each row of activations and each column of weights; 16-bit gradients.

    Cotangents are not quantized: products of them multiply the arrays as they are.
    """

    def format(self, role: Role) -> Format | None:
        return None if role == "cotangent" else Format("int8", 1)


Recipe = CurrentScaling | BlockScaling | Int8Forward


@dataclass(frozen=True)
class ByRecipe:
    """A recipe, and the roles of a product's two operands."""

    recipe: Recipe
    roles: tuple[Role, Role] = ("activation", "weights")

    def of_gradient(self, kept: int) -> ByRecipe:
        """Returns that of a gradient: of the cotangent and the operand `kept`, in this order."""
        return replace(self, roles=("cotangent", self.roles[kept]))

    def swapped(self) -> ByRecipe:
        return replace(self, roles=self.roles[::-1])

    def formats(self, columns: int) -> tuple[Format, Format] | None:
        """Returns how the operands are quantized; None: they are multiplied as they are.

        Args:
          columns: which operand, 0 or 1, the result's columns are of.
        """
        lhs, rhs = map(self.recipe.format, self.roles)
        if lhs is None or rhs is None:
            return None
        found = [lhs, rhs]
        if "weights" not in self.roles and isinstance(self.recipe, BlockScaling):
            found[columns] = replace(found[columns], rows=self.recipe.gradient_columns)
        return found[0], found[1]

    @property
    def promoted(self) -> bool:
        """Whether the recipe asks for sums in float32 where scales do not already."""
        return "cotangent" in self.roles and not isinstance(self.recipe, Int8Forward)
