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
    straight: int = 1  # lines of values that are written as they lie and share a scale: 1 or 128
    transposed: int = 0  # the same of values that are written transposed; 0: none are
    picked: bool = False  # whether an array of indices picks the rows; of no row are zeros

    def __post_init__(self) -> None:
        if self.dtype not in SOURCES or self.to not in TARGETS or {*self.ways} - {0, 1, TILE}:
            raise ValueError(f"no kernel quantizes so: {self}")
        if not (self.straight or self.transposed):
            raise ValueError(f"it writes nothing: {self}")

    @property
    def ways(self) -> tuple[int, int]:
        return self.straight, self.transposed

    @property
    def whole_tiles(self) -> bool:
        """Whether some values have one scale for each tile."""
        return TILE in self.ways

    @property
    def before_columns(self) -> int:
        """Bytes of shared memory before each warp's largest of columns: values to transpose."""
        return TILE * TILE if self.transposed else 0

    @property
    def before_tile(self) -> int:
        """Bytes before each warp's largest of all: those, and scales of columns and inverses."""
        return self.before_columns + (4 * (WARPS + 2) * TILE if self.transposed == 1 else 0)

    @property
    def smem_bytes(self) -> int:
        return self.before_tile + 4 * WARPS

    @property
    def name(self) -> str:
        """A name a person understands in a profile."""
        named = zip(("straight", "transposed"), self.ways, strict=True)
        ways = "".join(f"_{way}_{lines}x{TILE}" for way, lines in named if lines)
        return (
            f"jhg_quantize_{DTYPES[self.dtype].short}_{DTYPES[self.to].short}"
            f"{ways}{'_picked' * self.picked}"
        )

    def with_ways_of(self, other: QuantizeSpec) -> QuantizeSpec | None:
        """Returns the kernel that writes what both write; None where no kernel does."""
        if replace(self, straight=other.straight, transposed=other.transposed) != other:
            return None
        pairs = list(zip(self.ways, other.ways, strict=True))
        if any(0 < own != more > 0 for own, more in pairs):
            return None
        straight, transposed = map(max, pairs)
        return replace(self, straight=straight, transposed=transposed)
