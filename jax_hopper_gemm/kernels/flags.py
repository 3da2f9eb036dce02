"""Flags in global memory: one warp releases what it has written, others wait for it.

NOTE: nobody clears the flags before a launch, and XLA may have used their memory for anything. So
a released one is 64 bits that nothing else holds but by a chance of 2**-64, and the last that has
seen it frees it: what this launch leaves, a replay of its graph does not take for its own.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cutlass_dsl import select_

RELEASED = 0x6A09E667F3BCC908  # of a flag: 64 bits of the square root of 2


def release(flag):
    """Makes what this thread's warp has written visible to those who wait; one thread."""
    cute.arch.store(flag, Int64(RELEASED), sem="release", scope="gpu")


@cute.jit
def wait(flag):
    """Waits until a flag is released; called by whole warps.

    NOTE: of a loop whose end may differ between lanes, ptxas makes a wait after every wgmma.
    """
    waiting = Int32(1)
    while waiting == 1:
        value = cute.arch.load(flag, Int64, sem="acquire", scope="gpu")
        differs = select_(value == RELEASED, Int32(0), Int32(1))
        waiting = cute.arch.make_warp_uniform(differs)
    cute.arch.sync_warp()  # what lane 0 has acquired the others may read


def free(flag):
    """Takes a flag back; one thread, after all who wait have seen it."""
    cute.arch.store(flag, Int64(0))
