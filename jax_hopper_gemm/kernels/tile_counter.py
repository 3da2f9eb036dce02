"""The counter from which clusters claim tiles: a flag, the tiles claimed, the clusters done.

    scheduler warp of cluster 0          all scheduler warps
      counts = 0; release the flag         wait for the flag; claim, claim, ...
                                           count this cluster as done; the last frees the flag

NOTE: clusters wait for cluster 0, which waits for nobody. CTAs start in the order of their index,
so it is resident or done, whatever holds the other SMs. Every cluster must wait before it is done:
then nobody looks for the flag when the last one frees it.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64

from . import flags

CLAIMED, DONE = 2, 3  # int32 words; the flag is the first two


@cute.jit
def start(counter, cluster):
    """Makes the counter ready, if this is cluster 0."""
    if cluster == 0 and cute.arch.lane_idx() == 0:
        cute.arch.store(counter + CLAIMED, Int32(0))
        cute.arch.store(counter + DONE, Int32(0))
        flags.release(_flag(counter))


def wait(counter):
    """Waits until the counter is ready."""
    flags.wait(_flag(counter))


@cute.jit
def claim(counter):
    """Returns the number of claims before this one, to all lanes."""
    claimed = Int32(0)
    if cute.arch.lane_idx() == 0:
        claimed = cute.arch.atomic_add(counter + CLAIMED, Int32(1))
    return cute.arch.shuffle_sync(claimed, 0)


@cute.jit
def finish(counter, clusters):
    """Counts a cluster that claims no more; the last of `clusters` frees the flag."""
    if cute.arch.lane_idx() == 0:
        # Acquire and release: all have seen the flag before it is freed.
        done = cute.arch.atomic_add(counter + DONE, Int32(1), sem="acq_rel", scope="gpu")
        if done == clusters - 1:
            flags.free(_flag(counter))


def _flag(counter):
    return cute.recast_ptr(counter, dtype=Int64)
