"""Math warpgroups that have the same columns of a tile and take turns at its k-tiles.

So one multiplies while the other converts its operand, or promotes its sums, and a product of few
tiles and a long K waits half as long for either. One warpgroup has the even stages and one the odd:
a stage is always read by the same one, which sees each time that it is filled. Each ends a tile
with sums of its own. Both are added up, and each stores half of the columns; where CTAs share K,
half of those that each of them stores.
"""

import cutlass.pipeline as pipeline

from ..shared_memory import WARPGROUP, BarrierId
from .ring import either, skip_tile


class InTurns:
    """Mixed into a consumer, before its class. Its view has the number of its `warpgroup`."""

    step = 2  # stages from one of a warpgroup to its next

    def multiply(self, view, ring, state, coords, on_issued):
        others = (state.index ^ view.warpgroup) & 1  # of the tile's stages so many come first
        own = coords._replace(k_tiles=(coords.k_tiles + 1 - others) >> 1)
        first = either(others == 1, self.after(state, 1), state)
        super().multiply(view, ring, first, own, on_issued)
        if self.spec.exchanges_in_ring:  # which the other one may still read
            self.barrier().arrive_and_wait()
        return skip_tile(self.spec, state, coords)

    def barrier(self):
        """Returns that of both warpgroups' threads."""
        return pipeline.NamedBarrier(BarrierId.MATH, self.step * WARPGROUP)
