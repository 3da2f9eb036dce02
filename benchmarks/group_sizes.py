"""Sizes of groups: as routers give them, at the edges, and as nobody should pass them.

`KINDS` and `HOSTILE` hold each by its name, a function of (total, groups, seed) that returns
(groups,) int32.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Sizes = Callable[[int, int, int], np.ndarray]
INT32_MAX = 2**31 - 1


def even(total: int, groups: int, seed: int = 0) -> np.ndarray:
    """Equal sizes; the first take one more each where they do not divide `total`."""
    return _rounded(np.full(groups, 1 / groups), total)


def uneven(total: int, groups: int, seed: int = 0, concentration: float = 2.0) -> np.ndarray:
    """A sample of a symmetric Dirichlet distribution."""
    rng = np.random.default_rng(seed)
    return _rounded(rng.dirichlet(np.full(groups, concentration)), total)


def zipf(total: int, groups: int, seed: int = 0) -> np.ndarray:
    """Sizes in proportion to 1, 1/2, 1/3 ..., in random order."""
    shares = 1 / np.arange(1, groups + 1)
    return _rounded(np.random.default_rng(seed).permutation(shares / shares.sum()), total)


def half_empty(total: int, groups: int, seed: int = 0) -> np.ndarray:
    """Every other group on average is empty, the rest are `uneven`."""
    sizes = np.zeros(groups, np.int32)
    rng = np.random.default_rng(seed)
    full = np.sort(rng.choice(groups, -(-groups // 2), replace=False))
    sizes[full] = uneven(total, full.size, seed)
    return sizes


def one_row(total: int, groups: int, seed: int = 0) -> np.ndarray:
    """One row a group, whatever `total`."""
    return np.ones(groups, np.int32)


def single(total: int, groups: int, seed: int = 0) -> np.ndarray:
    """One group has all."""
    sizes = np.zeros(groups, np.int32)
    sizes[np.random.default_rng(seed).integers(groups)] = total
    return sizes


def empty(total: int, groups: int, seed: int = 0) -> np.ndarray:
    """No group has any."""
    return np.zeros(groups, np.int32)


def under(total: int, groups: int, seed: int = 0) -> np.ndarray:
    """`uneven` over 70 % of `total`: the rest belongs to none."""
    return uneven(total * 7 // 10, groups, seed)


def over(total: int, groups: int, seed: int = 0) -> np.ndarray:
    """`uneven` over 130 % of `total`: the last groups are cut off."""
    return uneven(total * 13 // 10 + 1, groups, seed)


def negative(total: int, groups: int, seed: int = 0) -> np.ndarray:
    """`uneven`, with a third of the sizes negative, down to the least int32."""
    sizes = uneven(total, groups, seed)
    sizes[::3] = np.resize([-1, -total, -INT32_MAX - 1], sizes[::3].size)
    return sizes


def huge(total: int, groups: int, seed: int = 0) -> np.ndarray:
    """Each size is larger than the axis; int32 sums of a few of them overflow."""
    rng = np.random.default_rng(seed)
    return rng.integers(total + 1, 2**30, groups, dtype=np.int64).astype(np.int32)


def largest(total: int, groups: int, seed: int = 0) -> np.ndarray:
    """The largest int32, every time."""
    return np.full(groups, INT32_MAX, np.int32)


def late_largest(total: int, groups: int, seed: int = 0) -> np.ndarray:
    """`uneven` over half of `total`, then the largest int32, then the least, in turns."""
    sizes = uneven(total // 2, groups, seed)
    late = sizes[groups // 2 :]
    late[:] = np.resize([INT32_MAX, -INT32_MAX - 1], late.size)
    return sizes


def random_bits(total: int, groups: int, seed: int = 0) -> np.ndarray:
    """Any int32 at all: what uninitialised memory may hold."""
    rng = np.random.default_rng(seed)
    return rng.integers(-INT32_MAX - 1, INT32_MAX, groups, dtype=np.int64).astype(np.int32)


KINDS: dict[str, Sizes] = {
    "even": even, "uneven": uneven, "zipf": zipf, "half_empty": half_empty, "one_row": one_row,
    "single": single, "empty": empty, "under": under, "over": over,
}  # fmt: skip
HOSTILE: dict[str, Sizes] = {
    "negative": negative, "huge": huge, "largest": largest, "late_largest": late_largest,
    "random_bits": random_bits,
}  # fmt: skip


def _rounded(shares: np.ndarray, total: int) -> np.ndarray:
    """Returns `shares` of `total` as whole numbers that add up to it: largest remainders first."""
    exact = shares * total
    sizes = np.floor(exact).astype(np.int64)
    most = np.argsort(sizes - exact, kind="stable")[: total - sizes.sum()]
    sizes[most] += 1
    return sizes.astype(np.int32)
