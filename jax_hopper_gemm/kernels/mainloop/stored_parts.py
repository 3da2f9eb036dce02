"""The mainloop of float32 operands that were cut into bfloat16 parts before the launch.

Each k-tile is a run of K, of one part of A and one of B: an ordinary one of bfloat16. The tensor
cores cut sums off and do not round them, so these are promoted, added up in float32:

    for each `PROMOTED_K` of K
        for each product of parts, the largest last
            for each run of K: load it; multiply and add to the sums
        add the sums to the accumulators, while the other warpgroup multiplies

The products of an interval read the same few runs one after the other, so but for the first each
finds its operands in L2.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cutlass_dsl import min as smaller

from ...gemm.bf16_parts import PROMOTED_K, RUN_K, num_parts, products
from .ss import SharedConsumer, nothing
from .tma import TmaProducer


def interval_of(spec):
    """Returns the runs of K after which sums are promoted."""
    return PROMOTED_K[spec.bf16_terms] // RUN_K


class StoredPartsProducer(TmaProducer):
    """One warp loads, for each product of parts in turn, the runs of an interval."""

    @cute.jit
    def load(self, view, ring, state, coords):
        terms = self.spec.bf16_terms
        parts, interval = num_parts(terms), interval_of(self.spec)
        slices = self.partition(view, coords)
        runs = coords.k_tiles // terms
        for first in cutlass.range(0, runs, interval, unroll=1):
            end = smaller(first + interval, runs)
            for term in cutlass.range_constexpr(terms):
                a_part, b_part = products(terms)[term]
                for run in cutlass.range(first, end, unroll=1):
                    of_a, of_b = run * parts + a_part, run * parts + b_part
                    self.load_stage(view, slices, of_a, of_b, ring, state, coords)
                    state.advance()
        return state


class StoredPartsConsumer(SharedConsumer):
    """Math warpgroups with accumulators of a tile, and as many in which an interval is summed."""

    def make_accumulators(self):
        acc, _ = super().make_accumulators()
        return acc, cute.make_rmem_tensor_like(acc)

    @cute.jit
    def multiply(self, view, ring, state, coords, on_issued: cutlass.Constexpr):
        k_tiles = coords.k_tiles
        blocks = self.spec.rows_per_warpgroup // 64
        step = interval_of(self.spec) * self.spec.bf16_terms
        view.acc.fill(0.0)
        for first in cutlass.range(0, k_tiles, step, unroll=1):
            count = smaller(k_tiles - first, step)
            state = self._accumulate(view, ring, state, count, blocks, nothing)
            self.promote(view)
        on_issued()
        return state

    def promote(self, view):
        """Adds the sums since the last time to the tile's accumulators."""
        for v in range(cute.size(view.acc)):
            view.acc[v] = view.acc[v] + view.sums[v]
