"""All math warpgroups work on one tile: each owns 64-row slices of it."""

import cutlass.pipeline as pipeline

EPILOGUE_BARRIER = 1  # barrier 0 is the CTA's own


class Cooperative:
    """The protocol of a warp schedule; a cooperative one never waits for a turn.

        time ->
        math 0, 1   [k-tiles of t0][epilogue t0][k-tiles of t1][epilogue t1]
        loader      [t0 ...][t1: stages fill while t0 is stored][...]

    Attributes:
      atom_layout_m: warpgroups side by side along a tile's rows.
      tiles_in_turn: warpgroups (or groups of them) that alternate tiles.
      tile_warps: math warps that work on one tile.
      registers: registers a thread of the loading and of the math warpgroups asks for.
    """

    tiles_in_turn = 1

    def __init__(self, spec):
        self.atom_layout_m = spec.math_warpgroups
        self.tile_warps = 4 * spec.math_warpgroups
        if spec.math_warpgroups == 3:
            self.registers = (32, 160)
        else:
            self.registers = (24, 240) if spec.acc_registers > 192 else (40, 232)

    def setup(self, warpgroup):
        """Called by the math warps; `warpgroup` counts the math warpgroups from 0."""
        self.epilogue_barrier = pipeline.NamedBarrier(EPILOGUE_BARRIER, 32 * self.tile_warps)

    def tile_thread(self, math_thread):
        """Returns a math thread's index among those that work on its tile."""
        return math_thread

    def is_store_warp(self, math_warp):
        """Whether this math warp issues its tile's TMA stores."""
        return math_warp == 0

    def sync_epilogue(self):
        """Joins the threads that store a tile."""
        self.epilogue_barrier.arrive_and_wait()

    def open(self): ...
    def wait_for_math(self): ...
    def pass_math(self): ...
    def wait_for_epilogue(self): ...
    def pass_epilogue(self): ...
