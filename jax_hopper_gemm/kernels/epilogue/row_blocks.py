"""The blocks of 64 rows of a tile, by the math warpgroup that has them."""

from ...gemm.spec import EPI_TILE_M


class RowBlocks:
    """Row blocks of a warpgroup. A cooperative tile's alternate between its warpgroups.

    Attributes:
      count: row blocks of a tile that a warpgroup has.
      shares_tile: whether the math warpgroups work on one tile.
    """

    def __init__(self, spec):
        self.grouped_rows = spec.grouped == "m"
        self.count = spec.rows_per_warpgroup // EPI_TILE_M
        self.shares_tile = spec.warp_schedule == "cooperative"
        self.step = spec.math_warpgroups if self.shares_tile else 1

    def any_of(self, coords, warpgroup):
        """Returns whether a warpgroup has rows of a tile that are not past the end of a group."""
        if not (self.grouped_rows and self.shares_tile):
            return True
        return coords.left > warpgroup * EPI_TILE_M

    def block_m(self, i_m, warpgroup):
        """Returns which 64 rows of a tile a warpgroup's i_m-th row block is."""
        return i_m * self.step + (warpgroup if self.shares_tile else 0)
