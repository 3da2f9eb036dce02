"""The order in which tiles are visited, and the arithmetic that says which tile comes n-th.

The host fills a `Raster` once per launch; the device evaluates `tile_at` for every tile. It is
the same code: plain arithmetic without branches, which runs on Python's integers too, so the
tests prove on the CPU what the GPU will do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

MAX_TILES = 2**30  # `tile_at` is exact below


@dataclass(frozen=True)
class RasterOrder:
    """The order in which tiles are visited, chosen at launch; it compiles nothing."""

    along: Literal["m", "n"] = "m"  # the direction it advances in
    swizzle: int = 8  # tiles side by side across that direction before it advances, 1 to 16


class Raster(NamedTuple):
    """Constants of one traversal of `batches` grids of tiles, all int32.

    The walk advances along one direction ("fast") over bands `width` tiles wide, so that the
    tiles in flight at one moment form a block of the output and share operands in L2. Every
    other band is walked backwards: where the walk turns, the last operands are still in L2.
    The last band may be narrower. A division by d is a multiplication by `d_magic` and a shift
    by `d_shift`; on the device that saves some 30 instructions each.
    """

    total: Any  # tiles of all batches
    fast: Any  # tiles along the walk
    along_m: Any  # 1 if the walk advances along M, 0 if along N
    batch: Any  # tiles of one batch
    batch_magic: Any
    batch_shift: Any
    band: Any  # tiles of a full band
    band_magic: Any
    band_shift: Any
    full_bands: Any  # how many are not narrower
    width: Any  # tiles across a full band
    width_magic: Any
    width_shift: Any
    tail: Any  # tiles across the narrower band
    tail_magic: Any
    tail_shift: Any


def make_raster(tiles_m: int, tiles_n: int, batches: int, *, along_m: bool, swizzle: int) -> Raster:
    """Returns the walk over `batches` grids of tiles_m x tiles_n, in bands `swizzle` wide."""
    fast, slow = (tiles_m, tiles_n) if along_m else (tiles_n, tiles_m)
    total = tiles_m * tiles_n * batches
    assert 0 < total < MAX_TILES, f"{total} tiles; the walk counts to {MAX_TILES}"
    width = min(swizzle, slow)
    full_bands, tail = divmod(slow, width)
    tail = max(tail, 1)  # without a narrower band it is never used, but must divide
    return Raster(
        total, fast, int(along_m),
        fast * slow, *magic_of(fast * slow),
        width * fast, *magic_of(width * fast),
        full_bands,
        width, *magic_of(width),
        tail, *magic_of(tail),
    )  # fmt: skip


def tile_at(raster: Raster, index: Any, widen: Callable = int, narrow: Callable = int) -> tuple:
    """Returns (m, n, batch) of the `index`-th tile, 0 .. total - 1.

    `widen` and `narrow` convert to 64 bits and back, for integers of fixed width.
    """

    def divide(n, magic, shift):
        return narrow((widen(n) * widen(magic)) >> widen(shift))

    batch = divide(index, raster.batch_magic, raster.batch_shift)
    index = index - batch * raster.batch
    band = divide(index, raster.band_magic, raster.band_shift)
    index = index - band * raster.band
    is_tail = ((raster.full_bands - 1 - band) >> 31) & 1  # the sign bit: band == full_bands
    width = raster.width + is_tail * (raster.tail - raster.width)
    magic = raster.width_magic + is_tail * (raster.tail_magic - raster.width_magic)
    shift = raster.width_shift + is_tail * (raster.tail_shift - raster.width_shift)
    step = divide(index, magic, shift)
    across = band * raster.width + index - step * width
    step = step + (band & 1) * (raster.fast - 1 - 2 * step)
    m = across + raster.along_m * (step - across)
    return m, across + step - m, batch


def magic_of(divisor: int) -> tuple[int, int]:
    """Returns (magic, shift) with n // divisor == n * magic >> shift for 0 <= n < 2**30.

    With s = ceil(log2 divisor) and magic = ceil(2**(30 + s) / divisor), magic * divisor exceeds
    2**(30 + s) by less than divisor <= 2**s, which n < 2**30 cannot amplify to a whole unit
    (Granlund and Montgomery 1994, theorem 4.2). magic fits 31 bits.
    """
    shift = 30 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift
