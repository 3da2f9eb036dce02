"""Which tile comes n-th: the order in which the output is walked.

Plain arithmetic on non-negative integers without branches, so the device runs the very lines
that the tests run on Python's integers.
"""


def tile_at(index, clusters_m, clusters_n, swizzle, along_m):
    """Returns (m, n, l) of the `index`-th cluster tile.

    The walk advances along one direction ("fast": M if `along_m` is 1, N if it is 0) over
    bands `swizzle` tiles wide, so that the tiles in flight at one moment form a block of the
    output and share operands in L2. Every other band is walked backwards: where the walk
    turns, the operands of the last tiles are still in L2.

    Args:
      index: 0 .. clusters_m * clusters_n * batches - 1.
      clusters_m, clusters_n: cluster tiles of one product along M and N.
      swizzle: width of a band, at most the extent across the walk.
      along_m: 1 or 0.
    """
    fast = clusters_n + (clusters_m - clusters_n) * along_m
    slow = clusters_m + clusters_n - fast
    batch = index // (fast * slow)
    index = index - batch * (fast * slow)
    band = index // (swizzle * fast)
    index = index - band * (swizzle * fast)
    full_bands = slow // swizzle
    is_last = band // full_bands  # the narrower band of what `swizzle` leaves over
    width = swizzle + is_last * (slow - full_bands * swizzle - swizzle)
    step = index // width
    across = band * swizzle + index - step * width
    backwards = band - band // 2 * 2
    step = step + backwards * (fast - 1 - 2 * step)
    return across + (step - across) * along_m, step + (across - step) * along_m, batch
