"""The finish of a tile: the step between its multiplication and its epilogue. One policy a class.

Here belongs a turnstile for split-K and stream-K: where several CTAs each multiply some k-tiles of
one tile (`TileCoords.k_first`), they add their accumulators in the order of K, and the last one
stores. `LaunchPlan.workspaces` holds what they exchange.
"""


class NoFinish:
    """The protocol of a finish; here one CTA multiplies all k-tiles of a tile."""

    def __init__(self, spec):
        self.spec = spec

    def combine(self, acc, coords, warpgroup):
        """Adds to a thread's accumulators what other CTAs have of the tile.

        Returns whether this CTA stores it. True folds away; the GPU evaluates a condition.
        """
        return True


FINISHES = {"none": NoFinish}


def make_finish(spec):
    return FINISHES["none"](spec)
