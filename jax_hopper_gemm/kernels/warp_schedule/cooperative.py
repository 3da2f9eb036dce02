"""All math warpgroups work on one tile: each owns 64-row slices of it."""


def registers(spec):
    """Returns the registers a thread of the loading and of the math warpgroups asks for."""
    if spec.gathered:
        return 56, 224
    if spec.math_warpgroups == 3:
        return 32, 160
    return (24, 240) if spec.acc_registers > 192 else (40, 232)


class Cooperative:
    """The protocol of a warp schedule; a cooperative one never waits for a turn.

    The warpgroups share the ring's stages but not their epilogues. The one that the tensor
    cores serve first also stores first and starts the next tile first, and so pulls ahead by
    up to the depth of the ring: one multiplies at full rate while the other stores.

        time ->
        math 0   [k-tiles of t0][epilogue t0][k-tiles of t1    ][epilogue t1]
        math 1     [k-tiles of t0  ][epilogue t0][k-tiles of t1    ][epilogue t1]
        loader   [t0 ...][t1: stages fill while t0 is stored][...]

    Attributes:
      atom_layout_m: warpgroups side by side along a tile's rows.
      tiles_in_turn: math warpgroups that alternate tiles.
      tile_warps: math warps that work on one tile.
      registers: see there.
    """

    tiles_in_turn = 1

    def __init__(self, spec):
        self.atom_layout_m = spec.math_warpgroups
        self.tile_warps = 4 * spec.math_warpgroups
        self.registers = registers(spec)

    def setup(self, warpgroup):
        """Called by the math warps; `warpgroup` counts the math warpgroups from 0."""

    def wait_for_math(self):
        """Waits until this warpgroup may issue a tile's wgmma."""

    def pass_math(self):
        """Lets the next warpgroup issue."""
