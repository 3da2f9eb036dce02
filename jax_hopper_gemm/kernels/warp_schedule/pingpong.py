"""Two math warpgroups on alternate tiles: one stores while the other multiplies."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline

from ..named_barriers import WARPGROUP, BarrierId
from .cooperative import registers


@dataclass(frozen=True)
class Turn:
    """A warpgroup's turn at the tensor cores: a named barrier of 256 threads.

    Its owner waits on it, the other warpgroup arrives.
    """

    mine: Any
    other: Any

    def wait(self):
        self.mine.arrive_and_wait()

    def hand_over(self):
        self.other.arrive()


class Pingpong:
    """The tensor cores are held by one warpgroup at a time, in strict alternation.

    time ->
    math 0   [k-tiles t0][epilogue t0]  [k-tiles t2][epilogue t2]
    math 1               [k-tiles t1][epilogue t1]  [k-tiles t3]
    loader   [t0 ...][t1 ...][t2 ...]
    """

    tiles_in_turn = 2
    atom_layout_m = 1
    tile_warps = 4

    def __init__(self, spec):
        self.registers = registers(spec)

    def turn_of(self, warpgroup):
        return Turn(
            pipeline.NamedBarrier(BarrierId.MATH_TURN + warpgroup, 2 * WARPGROUP),
            pipeline.NamedBarrier(BarrierId.MATH_TURN + 1 - warpgroup, 2 * WARPGROUP),
        )

    @cute.jit
    def first_tile(self, tiles, warpgroup, state, skip: cutlass.Constexpr, turn: cutlass.Constexpr):
        tile, reader = tiles.first()
        if warpgroup == 1:
            turn.hand_over()  # the first turn is warpgroup 0's
            tile, reader, state = self.skip_partner_tile(tiles, tile, reader, state, skip)
        return tile, reader, state

    def skip_partner_tile(self, tiles, tile, reader, state, skip):
        state = skip(state, tiles.coords(tile))
        return *tiles.next(tile, reader), state
