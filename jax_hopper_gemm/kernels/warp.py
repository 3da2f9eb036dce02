"""The 32 lanes of a warp, with the operations that `gemm/group_search.py` asks of them."""

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import max as larger
from cutlass.cutlass_dsl import min as smaller
from cutlass.cutlass_dsl import select_


class Warp:
    """On the CPU `testing/lanes.py` stands in for it."""

    @property
    def lane(self):
        return cute.arch.lane_idx()

    def integer(self, value):
        return Int32(value)

    def minimum(self, a, b):
        return smaller(Int32(a), Int32(b))

    def maximum(self, a, b):
        return larger(Int32(a), Int32(b))

    def where(self, condition, a, b):
        return select_(condition, Int32(a), Int32(b))

    def of(self, value, lane):
        """Returns what `lane` has."""
        return cute.arch.shuffle_sync(value, lane)

    def prefix_sum(self, value):
        """Returns the sum over this lane and those before it."""
        lane = self.lane
        for distance in (1, 2, 4, 8, 16):
            before = cute.arch.shuffle_sync_up(value, distance)
            value = value + select_(lane >= distance, before, Int32(0))
        return value

    def first(self, condition):
        """Returns the first lane for which `condition` holds; some lane must."""
        ballot = cute.arch.vote_ballot_sync(condition)
        return cute.arch.popc(~ballot & (ballot - 1))
