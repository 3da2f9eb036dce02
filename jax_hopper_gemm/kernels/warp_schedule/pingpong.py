"""Two math warpgroups on alternate tiles: one stores while the other multiplies."""

import cutlass.pipeline as pipeline

from .cooperative import registers

MATH_BARRIER = 5  # named barriers 5 and 6: warpgroup 0's and 1's turn at the tensor cores
WARPGROUP = 128


class Pingpong:
    """The tensor cores are held by one warpgroup at a time, in strict alternation.

        time ->
        math 0   [k-tiles t0][epilogue t0]  [k-tiles t2][epilogue t2]
        math 1               [k-tiles t1][epilogue t1]  [k-tiles t3]
        loader   [t0 ...][t1 ...][t2 ...]

    A turn is a named barrier of 256 threads: its owner waits on it, the other one arrives.
    """

    tiles_in_turn = 2
    atom_layout_m = 1
    tile_warps = 4

    def __init__(self, spec):
        self.registers = registers(spec)

    def setup(self, warpgroup):
        self.mine = pipeline.NamedBarrier(MATH_BARRIER + warpgroup, 2 * WARPGROUP)
        self.other = pipeline.NamedBarrier(MATH_BARRIER + 1 - warpgroup, 2 * WARPGROUP)

    def wait_for_math(self):
        self.mine.arrive_and_wait()

    def pass_math(self):
        self.other.arrive()
