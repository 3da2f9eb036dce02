"""Kernels that quantize a matrix in blocks: read once, written as it lies, transposed, or both.

    x (B, R, C)  ->  values (B, R, C) with scales along C; values (B, C, R) with scales along R

A CTA takes `TILE` x `TILE` of it. Each thread has `CELL` rows of `CELL` columns, in registers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .dtypes import DTYPES
from .matrix_pass import WARPS, PassSpec
from .spec import PROMOTION_K

TILE = PROMOTION_K  # rows and columns of a CTA: elements that share a scale
CELL = 8  # rows and columns of a thread
CELLS = TILE // CELL
EXTENT_MULTIPLE = 16  # of R and C, so that lines of 8 bits begin at multiples of 16 bytes
SOURCES = ("bfloat16", "float16", "float32")
TARGETS = ("float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class QuantizeSpec(PassSpec):
    """One kernel.

    Raises:
      ValueError: there is no such kernel.
    """

    KIND = "quantize"
    dtype: str  # of the matrix
    to: str  # of the values
    block: int = 1  # lines that share a scale: 1, or 128
    straight: bool = True  # whether values are written as they lie
    transposed: bool = False  # whether they are written transposed
    picked: bool = False  # whether an array of indices picks the rows; of no row are zeros

    def __post_init__(self) -> None:
        if self.dtype not in SOURCES or self.to not in TARGETS or self.block not in (1, TILE):
            raise ValueError(f"no kernel quantizes so: {self}")
        if not (self.straight or self.transposed):
            raise ValueError(f"it writes nothing: {self}")

    @property
    def smem_bytes(self) -> int:
        """Values that are transposed; each warp's largest of columns; scales of these, inverted."""
        values = TILE * TILE if self.transposed else 0
        largest = 4 * WARPS * (TILE if self.transposed and self.block == 1 else 1)
        scales = 2 * 4 * TILE if self.transposed and self.block == 1 else 0
        return values + largest + scales

    @property
    def name(self) -> str:
        """A name a person understands in a profile."""
        ways = "_straight" * self.straight + "_transposed" * self.transposed
        return (
            f"jhg_quantize_{DTYPES[self.dtype].short}_{DTYPES[self.to].short}"
            f"_{self.block}x{TILE}{ways}{'_picked' * self.picked}"
        )

    def both_ways(self) -> QuantizeSpec:
        """Returns the kernel that writes the values transposed, too, and as they lie."""
        return replace(self, straight=True, transposed=True)
