"""How math threads read 8- and 4-bit numbers from a stage of B, and widen them to 16 bits.

wgmma takes 64 columns of B ("a block") as its M side from registers. Register i of a thread holds
two neighbours along K of one column:

    i       column      K, from the first of 16
    0, 1    h = 0, 1    2 * quad_lane + (0, 1)
    2, 3    h = 0, 1    the same + 8

Which columns of a block a thread's two are is for `Held` to say, as accumulators are turned
afterwards (`kernels.mainloop.rs`): so no number moves between threads.

    stored (N, K)   a thread loads two neighbours along K at a time: 16 or 8 bits
    stored (K, N)   ldmatrix with a transpose brings 16 bits of N, 2 or 4 columns, of two neighbours
                    along K in the halves of a register. Four columns are those of two blocks
                    ("joined") where a warpgroup has an even number of them, else two warps load
                    the same and share them

Either way `spread` moves the two numbers that belong together to the lower bytes of a register's
halves, and `Widening` makes 16-bit floats of them. All of it is exact.

Like `wgmma_fragment` this is arithmetic that the device traces and that also runs on NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from struct import pack
from typing import Any

from .wgmma_fragment import Position

BLOCK = 64  # columns of B
MMA_K = 16  # elements of K of one wgmma
LDMATRIX_K = 32  # those that one ldmatrix brings: four matrices of 8
CHUNK = 16  # bytes that a swizzle moves as one, and that a lane of ldmatrix names


def swizzled(offset: Any, width: int) -> Any:
    """Returns where a byte lies in a tile whose rows of `width` bytes TMA swizzled."""
    return offset ^ (((offset >> 7) & (width // CHUNK - 1)) << 4)


@dataclass(frozen=True)
class Held:
    """Which columns a thread holds of a span of `joined` blocks, and where it loads them."""

    bits: int
    along_k: bool
    joined: int = 1

    @classmethod
    def of(cls, bits: int, blocks: int, *, along_k: bool) -> Held:
        """Returns what is held where a warpgroup has so many blocks of a B."""
        return cls(bits, along_k, 2 if bits == 4 and not along_k and blocks % 2 == 0 else 1)

    @property
    def neighbours(self) -> int:
        """Columns of a thread that lie side by side."""
        return 1 if self.along_k else 2 * self.joined

    def column(self, position: Position, block: int, h: int) -> Any:
        """Returns a thread's h-th column of a span's block, counted from the span's first."""
        if self.along_k:
            return BLOCK * block + 16 * position.warp + position.quad + 8 * h
        if self.bits == 32:
            pair = 2 * (position.quad & 1) + h
            return 32 * (position.quad >> 2) + 8 * (position.quad & 2) + 4 * position.warp + pair
        columns = (16 // self.bits) * position.quad + self._shift(position, block, h) // self.bits
        return self.slab(position) + columns

    def chunk(self, position: Position, writers: int) -> Any:
        """Returns which 32 columns of a span hold a thread's, where so many warps have these."""
        return position.quad >> 2 if self.bits == 32 else position.warp // writers

    def slab(self, position: Position) -> Any:
        """Returns the first of the columns whose bits one lane of ldmatrix names: 16 bytes.

        Of 4-bit numbers these are 32 columns.
        """
        if self.bits == 8:
            return 16 * position.warp
        return 32 * (position.warp if self.joined == 2 else position.warp >> 1)

    def _shift(self, position: Position, block: int, h: int) -> Any:
        """Returns the bits before a thread's h-th column in its 16 bits along N."""
        if self.bits == 8:
            return 8 * h
        return 8 * (block if self.joined == 2 else position.warp & 1) + 4 * h

    def place(self, h: int) -> int:
        """Returns the bit at which `spread` puts the numbers of a thread's h-th column."""
        return 0 if self.along_k else self.bits * h % 8

    def spread(self, word: Any, position: Position, block: int, h: int) -> Any:
        """Returns the two numbers of a thread's h-th column in the lower bytes of two halves.

        They begin at `place`. `word` is what the thread loaded; other bits may hold anything.
        """
        if self.bits == 32:  # one number a register
            return word
        if self.along_k:
            return word | (word << (16 - self.bits))
        return word >> (self._shift(position, block, h) - self.place(h))


def offset_along_k(position: Position, column: Any, h: int, k: int, width: int, lines: int) -> Any:
    """As `offsets` below, of what is stored (N, K): `k` are bytes of a row, a constant."""
    box = k // width * (lines * width)
    return box + swizzled((column + 8 * h + position.quad) * width + k % width, width)


def offset_along_n(lane: Any, column: Any, width: int, rows: int) -> Any:
    """Returns where ldmatrix finds a lane's row of K; `column` counts bytes along N.

    Those of `LDMATRIX_K` rows further on lie so many times `width` bytes behind.
    """
    return column // width * (rows * width) + swizzled(lane * width + column % width, width)


@dataclass(frozen=True)
class Widening:
    """Integers of some bits -> 16-bit floats: two at a time, by two instructions.

    A number without its sign, put into the lower byte of a half where all above are constants, is
    a float that grows by equal steps. One fused multiply-add makes `unit` times the number of it.

        float16     behind an exponent at which the last of ten digits counts ones
        bfloat16    by itself: a subnormal, or of the least exponent, counts 2**-133. The largest
                    factor is 2**127, so numbers are counted in 2**-6
    """

    bits: int
    half: str

    @property
    def unit(self) -> float:
        """What a one becomes. Sums are divided by it in the end."""
        return 2.0**-6 if self.half == "bfloat16" else 1.0

    def widen(
        self,
        pairs: Any,
        place: int,
        pick: Callable[[Any, int, int], Any],
        fma: Callable[[Any, int, int], Any],
    ) -> Any:
        """Returns two numbers that begin at a bit of the halves of a register, as floats there.

        Args:
          pick: (x, mask, flip) -> (x & mask) ^ flip.
          fma: x * y + z of two floats each.
        """
        sign = 1 << (self.bits - 1)
        above, step = (0, 2.0**-133) if self.half == "bfloat16" else (0x6400, 1.0)
        flip = above | sign << place  # number + sign >= 0
        factor = self.unit / (step * 2**place)
        least = (1024 * factor if above else 0.0) + self.unit * sign
        masked = pick(pairs, _both((2 * sign - 1) << place), _both(flip))
        return fma(masked, _both(self._bits_of(factor)), _both(self._bits_of(-least)))

    def _bits_of(self, value: float) -> int:
        """Returns a number as the dtype has it; those used are exact there."""
        if self.half == "float16":
            return int.from_bytes(pack("<e", value), "little")
        return int.from_bytes(pack("<f", value), "little") >> 16


def _both(half: int) -> int:
    return half << 16 | half
