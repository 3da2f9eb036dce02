"""The operand warps: they send the operands of their tiles to the math warpgroups' rings."""

import cutlass
import cutlass.cute as cute


class OperandWarp:
    """The order in which a tile's subtiles are loaded: that in which `FusedEpilogue` reads them."""

    def __init__(self, spec, ring, row_blocks):
        self.ring = ring
        self.row_blocks = row_blocks
        self.subtiles_n = spec.d_tile_n // spec.epi_tile_n
        self.steps_of_rows = spec.graph.passes * self.subtiles_n
        self.steps = row_blocks.count * self.steps_of_rows

    @cute.jit
    def load_tile(self, cta, warpgroup, loaded, coords):
        """Sends a tile's operands to a math warpgroup.

        Args:
          cta: the `CtaView`.
          loaded: subtiles sent to that warpgroup before.
          coords: the tile's coordinates.

        Returns:
          `loaded`, advanced.
        """
        tile = self.ring.load_view(cta, coords)
        steps = self.steps
        if not self.row_blocks.any_of(coords, warpgroup):
            steps = 0
        for step in cutlass.range(steps, unroll=1):
            block_m = self.row_blocks.block_m(step // self.steps_of_rows, warpgroup)
            tile.load(warpgroup, loaded + step, block_m, step % self.subtiles_n)
        return loaded + steps

    @cute.jit
    def load_tile_of_both(self, cta, loaded, coords, turn):
        """Sends a tile's operands to the math warpgroups that work on it.

        Args:
          cta: the `CtaView`.
          loaded: for each of two, subtiles sent to it before.
          coords: the tile's coordinates.
          turn: which of the two, where they alternate.

        Returns:
          `loaded`, advanced.
        """
        if cutlass.const_expr(self.row_blocks.shares_tile):
            tile = self.ring.load_view(cta, coords)
            both = self.row_blocks.any_of(coords, 1)
            for step in cutlass.range(self.steps, unroll=1):
                i_m, i_n = step // self.steps_of_rows, step % self.subtiles_n
                tile.load(0, loaded[0] + step, self.row_blocks.block_m(i_m, 0), i_n)
                if both:
                    tile.load(1, loaded[1] + step, self.row_blocks.block_m(i_m, 1), i_n)
            loaded = [loaded[0] + self.steps, loaded[1] + (self.steps if both else 0)]
        elif turn == 0:
            loaded = [self.load_tile(cta, 0, loaded[0], coords), loaded[1]]
        else:
            loaded = [loaded[0], self.load_tile(cta, 1, loaded[1], coords)]
        return loaded
