"""The 32 lanes of a warp in NumPy, for `gemm.group_search`, which the GPU's scheduler warp runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ..gemm.group_search import (
    LANES,
    GroupRaster,
    GroupTile,
    first_window,
    holds,
    is_last,
    next_window,
    tile_in,
)


class NumpyLanes:
    """The operations that `gemm.group_search` asks of a warp's lanes, on ints and arrays of 32."""

    lane: Any = np.arange(LANES)
    minimum: Any = staticmethod(np.minimum)  # of a and b
    maximum: Any = staticmethod(np.maximum)
    where: Any = staticmethod(np.where)  # of a condition, a and b

    def integer(self, value: int) -> Any:
        return value

    def prefix_sum(self, value: Any) -> Any:
        """Returns the sum over this lane and those before it."""
        return np.cumsum(np.broadcast_to(value, LANES))

    def first(self, condition: Any) -> Any:
        """Returns the first lane for which `condition` holds; some lane must."""
        lanes = np.flatnonzero(np.broadcast_to(condition, LANES))
        assert lanes.size, "no lane has it"
        return int(lanes[0])

    def of(self, value: Any, lane: Any) -> Any:
        """Returns what `lane` has."""
        return np.broadcast_to(value, LANES)[lane]

    def size_reader(self, sizes: Sequence[int]) -> Any:
        """Returns the function that gives each lane the size of its group."""
        return lambda group, valid: np.asarray(sizes)[np.where(valid, group, 0)]


WARP = NumpyLanes()


def group_tiles(
    raster: GroupRaster,
    sizes: Sequence[int],
    rows: int | None,
    indices: Iterable[int],
    skip_empty: bool = False,
    lanes: NumpyLanes = WARP,
) -> Iterator[GroupTile]:
    """Yields the tiles, of ints, that a scheduler warp finds for these rising indices.

    It ends before the first index that is past the last tile, as the warp does.

    Args:
      raster: of ints.
      sizes: as many as `raster` says.
      rows, skip_empty: as in `group_search.next_window`.
    """
    on_device = GroupRaster(*map(lanes.integer, raster))
    size_at = lanes.size_reader(sizes)
    window = first_window(on_device, size_at, lanes, rows, skip_empty)
    for index in map(lanes.integer, indices):
        while not (holds(window, index, lanes) or is_last(on_device, window)):
            window = next_window(on_device, window, size_at, lanes, rows, skip_empty)
        if not holds(window, index, lanes):
            return
        yield GroupTile(*map(int, tile_in(on_device, window, index, lanes, rows)))
