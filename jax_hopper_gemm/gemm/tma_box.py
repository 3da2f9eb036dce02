"""What one TMA copy moves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .dtypes import DTYPES

SWIZZLE_BYTES = 128  # of the widest swizzle: a row of operands along K


@dataclass(frozen=True)
class TmaBox:
    """What one TMA copy moves: `contiguous` elements by `other`, in a `swizzle`-byte pattern.

    A box is as wide as the swizzle and as long as the tile, so a wider tile takes several. CTAs
    of a cluster that share a tile each load a part of every box and multicast it. Without a
    swizzle, 0, a box is as wide as the tile: scales, operands of SGEMM.
    """

    contiguous: int
    other: int
    swizzle: int


@lru_cache(maxsize=1024)
def make_box(
    second_is_contiguous: bool, first: int, second: int, shares: int, dtype: str
) -> TmaBox:
    """Returns the box of a tile, of which CTAs of a cluster load equal `shares`."""
    contiguous, other = (second, first) if second_is_contiguous else (first, second)
    itemsize = DTYPES[dtype].itemsize
    swizzle = next(width for width in (SWIZZLE_BYTES, 64, 32) if contiguous * itemsize % width == 0)
    return TmaBox(swizzle // itemsize, other // shares, swizzle)
