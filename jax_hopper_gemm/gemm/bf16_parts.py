"""Products of float32 numbers as sums of products of bfloat16 parts.

A float32 number is the sum of parts, each the rest rounded to bfloat16, to nearest even: two hold
16 or more of its 24 digits, three all of them. Of the products of two numbers' parts the largest
are summed:

    terms  products (part of A, part of B)                   left out, relative to |a b|
    3      (0, 0) (0, 1) (1, 0)                              3.02 * 2**-16: (1, 1), third parts
    6      as above and (1, 1) (0, 2) (2, 0)                 2.02 * 2**-24: (1, 2), (2, 1), (2, 2)
    9      all                                               nothing

An infinity, or a number that rounds to one in bfloat16, has a NaN in its second part.
"""

from __future__ import annotations

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


def accumulator_sets(terms: int) -> int:
    """Returns how many sets of accumulators there are: promoted sums, sums of the largest products,
    and, of more than 3 terms, sums of the others."""
    return 2 if terms == 3 else 3


def products(terms: int) -> list[tuple[int, int]]:
    """Returns the part of A and the part of B of each product, the largest product last.

    Products with A's first part come behind the others.
    """
    parts = range(num_parts(terms))
    largest = {3: 1, 6: 2, 9: 4}[terms]
    pairs = ((i, j) for i in parts for j in parts if i + j <= largest)
    return sorted(pairs, reverse=True)
