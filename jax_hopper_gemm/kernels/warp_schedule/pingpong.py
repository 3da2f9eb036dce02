"""Two math warpgroups on alternate tiles: one stores while the other multiplies."""

import cutlass.pipeline as pipeline

MATH_BARRIER, EPILOGUE_BARRIER, STORE_BARRIER = 1, 3, 5  # two of each, one a warpgroup
WARPGROUP = 128


class Pingpong:
    """Math and epilogue are each held by one warpgroup at a time, in strict alternation.

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
        self.registers = (24, 240) if spec.acc_registers > 192 else (40, 232)

    def setup(self, warpgroup):
        self.warpgroup = warpgroup

        def barriers(first, threads):
            mine = pipeline.NamedBarrier(first + warpgroup, threads)
            return mine, pipeline.NamedBarrier(first + 1 - warpgroup, threads)

        self.math, self.other_math = barriers(MATH_BARRIER, 2 * WARPGROUP)
        self.epilogue, self.other_epilogue = barriers(EPILOGUE_BARRIER, 2 * WARPGROUP)
        self.store, _ = barriers(STORE_BARRIER, WARPGROUP)

    def tile_thread(self, math_thread):
        return math_thread % WARPGROUP

    def is_store_warp(self, math_warp):
        return math_warp % 4 == 0

    def sync_epilogue(self):
        self.store.arrive_and_wait()

    def open(self):
        """Warpgroup 1, before its first wait: gives warpgroup 0 the first turns."""
        self.other_math.arrive()
        self.other_epilogue.arrive()

    def wait_for_math(self):
        self.math.arrive_and_wait()

    def pass_math(self):
        self.other_math.arrive()

    def wait_for_epilogue(self):
        self.epilogue.arrive_and_wait()

    def pass_epilogue(self):
        self.other_epilogue.arrive()
