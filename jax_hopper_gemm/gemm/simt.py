"""Products of float32 numbers by the FMA units, one thread an element of D: SGEMM.

Each element is a chain of fused multiply-adds that begins with +0, in the order of K:

    d = fma(a[m, K-1], b[K-1, n], ... fma(a[m, 1], b[1, n], fma(a[m, 0], b[0, n], 0)))

So its bits depend on A's row and B's column alone, not on tile, extents or place. Source of the
form: `examples/ampere/sgemm.py` of CUTLASS, a CTA's tile of A and B copied ahead into stages of
shared memory, where a stage is stored K by K; a thread reads vectors from there while it multiplies
those that it read before. TMA copies what lies so in memory, cp.async the rest.

A stage holds A's `tile_m` rows, then B's `tile_n` columns ("lines"), each as rows of one k: element
(line, k) lies at k * `pitch` + line. The functions of a thread are traced by the device and run by
tests on integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .spec import GemmSpec

ITEMSIZE = 4
WARP_M = WARP_N = 64  # a warp's part of a tile, by 8 x 4 threads
THREAD_M, THREAD_N = 8, 16  # a thread's elements of it
VECTOR = 4  # float32 of 16 bytes
LANES_M, LANES_N = 8, 4
COPIED_K = 8  # of K that adjacent threads copy where neighbours along K are adjacent: 32 bytes
PAD = 4  # float32 behind a row of a stage that is so written, against bank conflicts
NUM_STAGES = {8: 6, 16: 4, 32: 3}  # by `tile_k`
BLOCKS = 8  # of a k-tile, a loop; a block has a multiple of two k
BARRIER_BYTES = 128  # behind a stage, of its mbarrier, where TMA fills it
TILES_M, TILES_N, TILES_K = (64, 128, 256), (64, 128), (8, 16, 32)
RESIDENT_THREADS = 256  # of an SM: each has up to 255 registers

# (row, column) of a thread's products of one k: down a column and up the next, so that each has an
# operand of the one before.
PRODUCTS = [
    (row if column % 2 == 0 else THREAD_M - 1 - row, column)
    for column in range(THREAD_N)
    for row in range(THREAD_M)
]


def num_threads(tile_m: int, tile_n: int) -> int:
    """Returns the threads of a CTA."""
    return 32 * (tile_m // WARP_M) * (tile_n // WARP_N)


def pitch(lines: int, along_k: bool) -> int:
    """Returns the elements from a row of a stage to the next."""
    return lines + (PAD if along_k else 0)


def first_row(lane: Any) -> Any:
    """Returns the first of a thread's rows in its warp's part; see `places`.

    Of 16 adjacent threads pairs read the same vectors of A, and pairs of pairs those of B, so that
    shared memory serves 16 at once.
    """
    return VECTOR * (lane >> 1 & 3 | (lane >> 4 & 1) << 2)


def first_column(lane: Any) -> Any:
    """Returns the first of a thread's columns in its warp's part."""
    return VECTOR * (lane & 1 | (lane >> 3 & 1) << 1)


def vectors(count: int, lanes: int) -> list[int]:
    """Returns where the vectors of a thread's `count` rows or columns begin, from its first."""
    return [i * lanes * VECTOR for i in range(count // VECTOR)]


@dataclass(frozen=True)
class Copies:
    """How the threads of a CTA copy the lines of one operand, a k-tile at a time, one by one."""

    along_k: bool
    lines: int  # of the tile
    tile_k: int
    threads: int

    @property
    def _across(self) -> int:
        """Threads that copy elements of one k, where these are adjacent."""
        return min(self.threads, self.lines)

    def first(self, thread: Any) -> tuple[Any, Any]:
        """Returns (line, k) of a thread's first copy."""
        if self.along_k:
            return thread // COPIED_K, thread % COPIED_K
        return thread % self._across, thread // self._across

    @property
    def line_steps(self) -> range:
        """From a thread's first line to each that it copies."""
        apart = self.threads // COPIED_K if self.along_k else self._across
        return range(0, self.lines, apart)

    @property
    def k_steps(self) -> range:
        """From a thread's first k to each that it copies of each line."""
        return range(0, self.tile_k, COPIED_K if self.along_k else self.threads // self._across)

    @property
    def steps(self) -> int:
        """Steps in which a thread copies its elements of a k-tile."""
        return len(self.line_steps if self.along_k else self.k_steps)

    def places(self, step: Any) -> list[tuple[Any, Any]]:
        """Returns (lines, k) from a thread's first copy to those of a step: of one line where
        neighbours along K are adjacent, else of one k."""
        if self.along_k:
            return [(step * self.line_steps.step, k) for k in self.k_steps]
        return [(line, step * self.k_steps.step) for line in self.line_steps]


def copies(spec: GemmSpec, of_b: bool) -> Copies:
    """Returns how threads copy A or B, unless TMA does."""
    lines, major = (spec.tile_n, spec.b_major) if of_b else (spec.tile_m, spec.a_major)
    return Copies(major == "k", lines, spec.tile_k, spec.threads)


def block_k(spec: GemmSpec) -> int:
    """Returns how many of K a block has."""
    return max(2, spec.tile_k // BLOCKS)


def by_tma(spec: GemmSpec, of_b: bool) -> bool:
    """Returns whether TMA copies A or B: lines are adjacent, as in a stage, and whole vectors."""
    major = spec.b_major if of_b else spec.a_major
    return spec.simt_width == VECTOR and major != "k"


def stage_bytes(spec: GemmSpec) -> int:
    """Returns the bytes of a stage."""
    row = pitch(spec.tile_m, spec.a_major == "k") + pitch(spec.tile_n, spec.b_major == "k")
    barrier = BARRIER_BYTES if by_tma(spec, False) or by_tma(spec, True) else 0
    return row * spec.tile_k * ITEMSIZE + barrier
