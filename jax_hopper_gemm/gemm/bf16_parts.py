"""Products of float32 numbers as sums of products of bfloat16 parts.

A float32 number is the sum of parts, each the rest rounded to bfloat16, to nearest even: two hold
16 or more of its 24 digits, three all of them. Of the products of two numbers' parts the largest
are summed:

    terms  products (part of A, part of B)                   left out, relative to |a b|
    3      (0, 0) (0, 1) (1, 0)                              3.02 * 2**-16: (1, 1), third parts
    6      as above and (1, 1) (0, 2) (2, 0)                 2.02 * 2**-24: (1, 2), (2, 1), (2, 2)
    9      all                                               nothing

An infinity, or a number that rounds to one in bfloat16, has a NaN in its second part.

Either a kernel cuts its operands up (`Cutter`), or another one did beforehand (`cutting`), and it
reads parts from memory. There K, filled up with zeros, lies in runs of `RUN_K`, and for each run
the parts one behind the other, the largest first: as long as `stored_k`. A stage has one part of A
and one of B. Until they are promoted, sums get the products of the smaller parts first: so the
tensor cores cut them off, beside the largest products, as often as if there were these alone.

The functions of a thread say where its elements of a stage lie in shared memory, in the patterns
that TMA and wgmma read and write. The device traces them; on the CPU tests run them on integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TILE_K = 32  # elements of K in a stage: 128 bytes
STEPS = 2  # wgmmas along K of a stage
STEP_K = TILE_K // STEPS
ROW = 32  # float32 in a row of TMA's pattern, eight of which repeat
VECTOR = 4  # float32 of 16 bytes, which the pattern exchanges
RUN_K = 64  # elements of K of a part in memory: 128 bytes, those of a stage
BLOCK_N = 64  # columns of B that a thread's offsets are for; next ones lie 64 * TILE_K behind

# By the number of terms, the name of the `jax.lax.DotAlgorithmPreset`.
PRESETS = {3: "BF16_BF16_F32_X3", 6: "BF16_BF16_F32_X6", 9: "BF16_BF16_F32_X9"}
# Elements of K after which the sums of the tensor cores, which are cut off and not rounded, are
# added up in float32.
PROMOTED_K = {3: 256, 6: 128, 9: 128}
# The largest share of |a b| that the terms leave out. Of x the second part is at most 2**-8, the
# third 2**-16.
LEFT_OUT = {3: 3.02 * 2.0**-16, 6: 2.02 * 2.0**-24, 9: 0.0}


def num_parts(terms: int) -> int:
    """Returns into how many parts operands are cut."""
    return 2 if terms == 3 else 3


def stored_k(k: int, terms: int) -> int:
    """Returns the elements along K of an operand whose parts are in memory."""
    return -(-k // RUN_K) * RUN_K * num_parts(terms)


def accumulator_sets(terms: int) -> int:
    """Returns how many sets of accumulators there are where a kernel cuts operands up: promoted
    sums, sums of the largest products and, of more than 3 terms, of the others."""
    return 2 if terms == 3 else 3


def products(terms: int) -> list[tuple[int, int]]:
    """Returns the part of A and the part of B of each product, the largest product last.

    Products with A's first part come behind the others.
    """
    parts = range(num_parts(terms))
    largest = {3: 1, 6: 2, 9: 4}[terms]
    pairs = ((i, j) for i in parts for j in parts if i + j <= largest)
    return sorted(pairs, reverse=True)


@dataclass(frozen=True)
class Cutter:
    """Where math threads, numbered from 0, find the elements that they cut up.

    A fragment of A stored (M, K) is read 16 bytes at a time, without bank conflicts: of a stage's K
    thread q of 4 reads 8q to 8q + 7. So the tensor cores see K in another order, `place_of`, and
    the parts of B are written in that order.
    """

    a_along_k: bool  # whether neighbours along K are adjacent in memory
    b_along_k: bool
    threads: int

    def place_of(self, k: Any) -> Any:
        """Returns where the tensor cores have an element of a stage's K."""
        if not self.a_along_k:
            return k
        pair, half, step, thread = k & 1, k >> 1 & 1, k >> 2 & 1, k >> 3
        return pair + 2 * thread + 8 * half + STEP_K * step

    def a_words(self, thread: Any, step: int) -> list[tuple[Any, int]]:
        """Returns where a thread's elements of A for a step lie: elements from the stage's start,
        and how many are adjacent. They are its row's, then those of 8 rows below."""
        row, quad = (thread >> 5) * 16 + (thread >> 2 & 7), thread & 3
        if self.a_along_k:
            chunk = 2 * quad + step ^ row & 7
            return [((row + 8 * below) * ROW + chunk * VECTOR, VECTOR) for below in range(2)]
        found = []
        for below in range(2):
            m = row + 8 * below
            for half in range(2):
                for pair in range(2):
                    k = 2 * quad + pair  # of the eight rows of a pattern
                    chunk = (m & 31) >> 2 ^ k
                    at = ((m >> 5) * TILE_K + k) * ROW + chunk * VECTOR + (m & 3)
                    found.append((at + (STEP_K * step + 8 * half) * ROW, 1))
        return found

    def b_vectors(self, thread: Any) -> list[tuple[Any, Any]]:
        """Returns (n, k) of the first elements of a thread's vectors in 64 columns of B."""
        lanes = 8 if self.b_along_k else 16
        line, vector = thread >> (3 if self.b_along_k else 4), (thread & lanes - 1) * VECTOR
        apart = self.threads // lanes
        lines = [line + first for first in range(0, BLOCK_N if self.b_along_k else TILE_K, apart)]
        return [(x, vector) if self.b_along_k else (vector, x) for x in lines]

    def b_offset(self, n: Any, k: Any) -> Any:
        """Returns where a vector lies in a stage, in elements."""
        if self.b_along_k:
            return n * ROW + (k >> 2 ^ n & 7) * VECTOR
        return ((n >> 5) * TILE_K + k) * ROW + ((n & 31) >> 2 ^ k & 7) * VECTOR

    def part_offsets(self, n: Any, k: Any) -> list[Any]:
        """Returns where a vector's elements go in a part, in elements; of two, each gets a pair."""
        if not self.b_along_k:  # rows of 64 elements
            p = self.place_of(k)
            return [p * 64 + (n >> 3 ^ p & 7) * 8 + (n & 7)]
        firsts = (k, k + 2) if self.a_along_k else (k,)
        places = [self.place_of(first) for first in firsts]
        # Rows of 32 elements, in a pattern of as many bytes.
        return [n * TILE_K + (p >> 3 ^ n >> 1 & 3) * 8 + (p & 7) for p in places]
