"""The named barriers of a CTA: the hardware has 16, by number; here is who uses which."""

from enum import IntEnum

WARPGROUP = 128  # threads


class BarrierId(IntEnum):
    """The first number of each use. Barrier 0 is the CTA's own, `__syncthreads`."""

    WARPGROUP = 1  # 1, 2, 3: the 128 threads of math warpgroup 0, 1, 2, in its epilogue
    MATH_TURN = 5  # 5, 6: the turn of math warpgroup 0, 1 at the tensor cores; 256 threads
