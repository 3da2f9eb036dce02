"""Warp schedules: how the math warpgroups share tiles and take turns at the tensor cores."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline

from ..gemm.legality import PARTS_REGISTERS
from .shared_memory import WARPGROUP, BarrierId


def registers(spec):
    """Returns the registers a thread of the loading and of the math warpgroups asks for.

    NOTE: 512 threads leave 128 registers a thread at compile time, whatever `setmaxnreg` says
    later. So more than 96 accumulators do not compile with three math warpgroups, and rows are
    gathered by warps of the loading warpgroup, not by a fifth one.
    """
    if spec.gathered:
        return 56, 224
    if spec.math_warpgroups == 3:
        return 32, 160
    held = spec.acc_registers + (PARTS_REGISTERS if spec.cuts_operands else 0)
    return (24, 240) if held > 192 else (40, 232)


@dataclass(frozen=True)
class NoTurn:
    """The protocol of a turn at the tensor cores; here nobody waits."""

    def wait(self):
        """Waits until this warpgroup may issue a tile's wgmma."""

    def hand_over(self):
        """Lets the next warpgroup issue."""


class Cooperative:
    """The protocol of a warp schedule; a cooperative one never waits for a turn.

    The warpgroups share the ring's stages but not their epilogues. The one that the tensor
    cores serve first also stores first and starts the next tile first, and so pulls ahead by
    up to the depth of the ring: one multiplies at full rate while the other stores.

        time ->
        math 0   [k-tiles of t0][epilogue t0][k-tiles of t1    ][epilogue t1]
        math 1     [k-tiles of t0  ][epilogue t0][k-tiles of t1    ][epilogue t1]
        loader   [t0 ...][t1: stages fill while t0 is stored][...]
    """

    tiles_in_turn = 1  # math warpgroups that alternate tiles

    def __init__(self, spec):
        # Side by side along a tile's rows.
        self.atom_layout_m = spec.math_warpgroups // spec.warpgroups_n
        self.tile_warps = 4 * spec.math_warpgroups  # math warps that work on one tile
        self.registers = registers(spec)

    def turn_of(self, warpgroup):
        """Returns the turn of a math warpgroup; they are counted from 0."""
        return NoTurn()

    def first_tile(self, tiles, warpgroup, state, skip, turn):
        """Returns tile, reader and state of the first tile that a math warpgroup works on.

        Args:
          state: the value that a role carries from tile to tile.
          skip: (state, coords) -> state past a tile that another warpgroup works on.
          turn: that of the warpgroup; handed over if another one begins.
        """
        return *tiles.first(), state

    def skip_partner_tile(self, tiles, tile, reader, state, skip):
        """Moves past the tile that another warpgroup takes after one of this; the same."""
        return tile, reader, state


@dataclass(frozen=True)
class Turn:
    """A turn: a named barrier of 256 threads, on which its owner waits and the other arrives."""

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


WARP_SCHEDULES = {"cooperative": Cooperative, "pingpong": Pingpong}
