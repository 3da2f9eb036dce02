"""Steps of an epilogue whose code ptxas keeps in order.

NOTE: left alone, ptxas computes all subtiles before it stores the first: stores start late, and
registers run out. It moves nothing over a branch whose condition it cannot know. So each step lies
behind a branch that is always taken.
"""

import cutlass
import cutlass.cute as cute

MAX_BRANCHES = 16  # one within the other; each takes a dozen frames of Python's stack


def run_in_order(steps, k_tiles):
    """Calls `steps` in order, and keeps their code in it.

    `k_tiles` is an int32 of at least 0 that is not known while compiling.
    """
    together = -(-len(steps) // MAX_BRANCHES)
    run(steps[:together])
    if steps[together:]:
        _run_behind_branches(steps[together:], together, k_tiles)


def run(steps):
    """Calls `steps` in order. A plain kernel's need no branches."""
    for step in steps:
        step()


@cute.jit
def _run_behind_branches(steps: cutlass.Constexpr, together: cutlass.Constexpr, k_tiles):
    if k_tiles != -len(steps):
        run(steps[:together])
        if cutlass.const_expr(len(steps) > together):
            _run_behind_branches(steps[together:], together, k_tiles)
