"""B of a multicast pair: two CTAs along M that share columns of B, where they have the same.

At the end of a group with an odd number of tiles they take two tiles of columns instead
(`group_search.tile_in_pair`), and each loads all of its own.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cutlass_dsl import select_

from .tma import TmaOperand


class PairedB:
    """The B's of a `paired` kernel: a `TmaOperand` whose copies follow `TileCoords.together`."""

    def __init__(self, spec):
        self.operand = TmaOperand(spec, "b")
        self.nbytes = self.operand.nbytes
        self.make_tma_atoms = self.operand.make_tma_atoms
        self.view = self.operand.view

    def partition(self, view, coords):
        """Returns this CTA's slices, and the other's: apart it loads these, too."""
        mine = self.operand.slices_of(view, coords, view.cta)
        return mine, self.operand.slices_of(view, coords, 1 - view.cta)

    def load(self, view, slices, k_tile, stage, full, coords):
        mine, others = slices
        mask = cutlass.Int16(select_(coords.together, view.mask, view.own_mask))
        self.operand.copy(view, mine, k_tile, stage, full, mask)
        self._load_others(view, others, k_tile, stage, full, coords.together)

    @cute.jit
    def _load_others(self, view, others, k_tile, stage, full, together):
        if not together:
            self.operand.copy(view, others, k_tile, stage, full, view.own_mask)
