"""The layout of wgmma's accumulator, and the orders in which lanes combine their values of it.

A subtile has 64 rows and some multiple of 8 columns. The 128 threads of a warpgroup hold it as
wgmma leaves it: a warp has 16 rows, a quad (4 lanes side by side) two of them, 8 apart, and every
8 lanes of equal `thread % 4` hold the same columns. A thread's values are numbered by `v`.

Like `raster.py` this is arithmetic that the device traces and that also runs on NumPy arrays, one
element a thread: the tests run on the CPU what the GPU will run. Instructions are arguments:

    shuffle(x, distance)    x of the lane whose number differs by xor
    select(p, x, y)         x where p, else y

All orders are fixed: a sum has the same bits on every run. Shifts and masks are used where nothing
is negative: a signed division takes the device some ten instructions.

Source: PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# Xor distances between the lanes that hold a row; a column (in one warp); all of a warp.
ROW_LANES = (1, 2)
COLUMN_LANES = (4, 8, 16)
WARP_LANES = ROW_LANES + COLUMN_LANES

LEAST_KEY = -(2**31)  # of `order_key`
NO_COLUMN = 2**20  # comes after all others
WORD = 32  # bits of a word of columns


class Position(NamedTuple):
    """A thread of a warpgroup: its warp of 4, the quad of 8 in that, and the lane of 4 in that."""

    warp: Any
    quad: Any
    quad_lane: Any


def position_of(thread: Any) -> Position:
    """Returns the position of a thread, 0 to 127 in its warpgroup."""
    lane = thread & 31
    return Position(thread >> 5, lane >> 2, lane & 3)


class DividedPosition(NamedTuple):
    """The position of a thread, by divisions where each part is used.

    NOTE: `position_of` is cheaper. But a kernel's bytes depend on which of the two it uses, and on
    where, and by its bytes a kernel is known to have passed on a GPU.
    """

    thread: Any
    warp = property(lambda self: self.thread // 32)
    quad = property(lambda self: self.thread % 32 // 4)
    quad_lane = property(lambda self: self.thread % 4)


def first_row(position: Any, start: Any = 0) -> Any:
    """Returns the first of the two rows of a thread, counted from `start`."""
    return start + 16 * position.warp + position.quad


def nth_row(first: Any, i: int) -> Any:
    """Returns the i-th of a thread's two rows, of which `first` is the first."""
    return first + 8 * i


def first_column(position: Any, start: Any = 0) -> Any:
    """Returns the first of the columns of a thread, counted from `start`."""
    return start + 2 * position.quad_lane


def nth_column(quad_lane: Any, i: Any) -> Any:
    """Returns the i-th column of lane `quad_lane`; of lane 0, how far it is from the first."""
    return 8 * (i >> 1) + 2 * quad_lane + (i & 1)


def line_of(v: int) -> tuple[int, int]:
    """Returns which of a thread's 2 rows, and which of its columns, its v-th value lies in."""
    return v // 2 % 2, v // 4 * 2 + v % 2


def row_of(thread: Any, v: int) -> Any:
    """Returns the row, 0 to 63, of a thread's v-th value of a subtile."""
    return nth_row(first_row(position_of(thread)), line_of(v)[0])


def column_of(thread: Any, v: int) -> Any:
    """Returns the column of a thread's v-th value of a subtile."""
    return nth_column(position_of(thread).quad_lane, line_of(v)[1])


def owner_of(row: Any, column: Any) -> tuple[Any, Any]:
    """Returns (thread, v) of an element: the inverse of `row_of` and `column_of`."""
    thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
    return thread, column // 8 * 4 + row // 8 % 2 * 2 + column % 2


def over_lanes(value: Any, distances: Sequence[int], shuffle: Callable, combine: Callable) -> Any:
    """Combines the values of all lanes at these xor distances; each of them gets the result.

    With a commutative `combine` all of them get the same bits.
    """
    for distance in distances:
        value = combine(value, shuffle(value, distance))
    return value


def add_columns(
    sums: Sequence[Any], lane: Any, shuffle: Callable, select: Callable, plus: Callable
) -> list[Any]:
    """Adds up columns over the lanes that hold them; each lane keeps some, see `kept_columns`.

    In each step a lane sends the half that it gives up and keeps the other, so 8 columns take
    4 + 2 + 1 shuffles where adding up each by itself takes 24. The order in which the elements of
    a column are added is that of `over_lanes`, however many columns there are: a power of two.
    """
    kept = list(sums)
    for distance in COLUMN_LANES:
        if len(kept) == 1:
            kept = [plus(kept[0], shuffle(kept[0], distance))]
            continue
        half = len(kept) // 2
        upper = (lane & distance) != 0
        pairs = list(zip(kept[:half], kept[half:], strict=True))
        sent = [select(upper, low, high) for low, high in pairs]
        kept = [select(upper, high, low) for low, high in pairs]
        kept = [plus(x, shuffle(y, distance)) for x, y in zip(kept, sent, strict=True)]
    return kept


def kept_columns(lane: Any, columns: int) -> list[Any]:
    """Returns which of its `columns` columns a lane holds the sums of after `add_columns`.

    With fewer than 8, several lanes hold the same ones, with the same bits.
    """
    first: Any = 0 * lane
    for distance in COLUMN_LANES:
        if columns > 1:
            columns //= 2
            first = first + columns * ((lane >> (distance.bit_length() - 1)) & 1)
    return [first + i for i in range(columns)]


def order_key(bits: Any) -> Any:
    """Returns an int32 that orders as the float32 of these bits does; its own inverse.

    IEEE 754's total order, which is that of `jax.lax.top_k`: -0.0 before 0.0, NaN after infinity,
    NaN with the sign set before everything.
    """
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def before(key: Any, column: Any, other_key: Any, other_column: Any) -> Any:
    """Whether (key, column) comes before the other among the largest: ties go to the left."""
    return (key > other_key) | ((key == other_key) & (column < other_column))


def largest(keys: Sequence[Any], taken: Sequence[Any], select: Callable) -> tuple[Any, Any]:
    """Returns key and index of a lane's largest key that is not taken, the first of equal ones.

    `taken` are bits, `WORD` a word; (`LEAST_KEY`, `NO_COLUMN`) if all are set.
    """
    length = -(-len(keys) // 4)  # of four parts that do not wait for each other
    first: Any = None
    for start in range(0, len(keys), length):
        best, at = 0 * keys[0] + LEAST_KEY, 0 * keys[0] + NO_COLUMN
        for i in reversed(range(start, min(start + length, len(keys)))):
            free = (taken[i // WORD] & _bit(i)) == 0
            take = free & (keys[i] >= best)
            best, at = select(take, keys[i], best), select(take, 0 * at + i, at)
        if first is None:
            first = best, at
        else:
            take = before(best, at, *first)
            first = select(take, best, first[0]), select(take, at, first[1])
    return first


def largest_of_row(key: Any, column: Any, shuffle: Callable, select: Callable) -> tuple[Any, Any]:
    """Returns the first of the (key, column) of a quad's lanes, to each of them."""
    for distance in ROW_LANES:
        other_key, other_column = shuffle(key, distance), shuffle(column, distance)
        take = before(other_key, other_column, key, column)
        key, column = select(take, other_key, key), select(take, other_column, column)
    return key, column


def columns_outside(quad_lane: Any, extent: Any, columns: int, select: Callable) -> list[Any]:
    """Returns the bits, `WORD` a word, of a lane's columns that lie at `extent` >= 0 or beyond."""
    beyond = extent - 2 * quad_lane
    beyond = select(beyond > 0, beyond, 0 * beyond)
    single = beyond & 7
    inside = (beyond >> 3) * 2 + select(single < 2, single, 0 * single + 2)
    words = []
    for first in range(0, columns, WORD):
        count = inside - first
        count = select(count > 0, count, 0 * count)
        ones = 0 * count - 1
        words.append(select(count < WORD, ones << (count & (WORD - 1)), 0 * count))
    return words


def take(taken: Sequence[Any], i: Any, is_mine: Any, select: Callable) -> list[Any]:
    """Returns the bits with the i-th set, where it is this lane's."""
    words = []
    for word, bits in enumerate(taken):
        here = is_mine & ((i >> 5) == word)
        one = 0 * bits + 1
        words.append(bits | select(here, one << (i & (WORD - 1)), 0 * bits))
    return words


def _bit(i: int) -> int:
    """Returns the int32 with the i-th bit of a word set."""
    bit = i % WORD
    return 1 << bit if bit < WORD - 1 else LEAST_KEY
