"""The devices of a program that XLA partitions, and how arrays lie on them.

XLA tells how arrays are sharded without the names of the mesh. Here a mesh is axes of prime size,
and a sharding says for each dimension along which of these it is cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from jaxlib import xla_client

Axes = tuple[int, ...]  # of the mesh in prime factors, the first varies slowest


@dataclass(frozen=True)
class Mesh:
    """The devices of a program, as axes of prime size: every sharding is in terms of these."""

    sizes: tuple[int, ...]

    @staticmethod
    def of(shardings: Iterable[Any]) -> Mesh:
        """Returns the mesh in whose axes most of these shardings are; they do not name it."""
        tiled = list(filter(is_plain, shardings))
        if not tiled:
            return Mesh(())
        orders = itertools.permutations(_primes(tiled[0].num_devices()))
        meshes = [Mesh(sizes) for sizes in sorted(set(orders))]
        return max(meshes, key=lambda mesh: sum(any(mesh.axes_of(sharding)) for sharding in tiled))

    def count(self, axes: Iterable[int]) -> int:
        return prod(self.sizes[axis] for axis in axes)

    def groups(self, axes: Axes) -> tuple[tuple[int, ...], ...]:
        """Returns the devices that differ along `axes` alone, in the order of these."""
        rest = [axis for axis in range(len(self.sizes)) if axis not in axes]
        devices = np.arange(prod(self.sizes)).reshape(self.sizes).transpose(*rest, *axes)
        return tuple(map(tuple, devices.reshape(-1, self.count(axes)).tolist()))

    def index(self, device: Any, axes: Axes) -> Any:
        """Returns the place of a device, a number or an array, among those of its group."""
        found = 0
        for axis in axes:
            stride = prod(self.sizes[axis + 1 :])
            found = found * self.sizes[axis] + device // stride % self.sizes[axis]
        return found

    def is_along_one(self, along: Sequence[Axes]) -> bool:
        """Whether at most one dimension is sharded, and if so, over all devices in their order."""
        cut = [axes for axes in along if axes]
        return not cut or cut == [tuple(range(len(self.sizes)))]

    def axes_of(self, sharding: Any) -> list[Axes]:
        """Returns along which axes each dimension of a tiled sharding is sharded.

        A sharding in other terms (an odd order of devices) reads as that of a whole array: XLA
        then makes it whole.
        """
        tiles = sharding.tile_assignment_dimensions()
        devices = np.array(sharding.tile_assignment_devices())
        place = np.empty((len(tiles), devices.size), np.int64)
        place[:, devices] = np.indices(tiles).reshape(len(tiles), -1)
        dimensions = place[: len(tiles) - sharding.replicate_on_last_tile_dim()]
        found = [self._axes_along(coordinates) for coordinates in dimensions]
        return [() if None in found else axes or () for axes in found]

    def _axes_along(self, coordinates: np.ndarray) -> Axes | None:
        units = np.ravel_multi_index(np.eye(len(self.sizes), dtype=int), self.sizes)
        strides = coordinates[units]
        # (axes, devices): where each device lies along each axis.
        digits = np.indices(self.sizes).reshape(len(self.sizes), -1)
        if coordinates[0] or (strides @ digits != coordinates).any():
            return None
        axes = tuple(sorted(np.flatnonzero(strides).tolist(), key=lambda axis: -strides[axis]))
        expected = [self.count(axes[i + 1 :]) for i in range(len(axes))]
        return axes if strides[list(axes)].tolist() == expected else None

    def sharding(self, along: Sequence[Axes]) -> Any:
        """Returns XLA's sharding of an array whose dimensions are sharded `along` these axes."""
        used = list(itertools.chain.from_iterable(along))
        if not used:
            return xla_client.HloSharding.replicate()
        rest = [axis for axis in range(len(self.sizes)) if axis not in used]
        return xla_client.HloSharding.iota_tile(
            [*map(self.count, along), *([self.count(rest)] if rest else [])],
            reshape_dims=list(self.sizes),
            transpose_perm=[*used, *rest],
            subgroup_types=[xla_client.OpSharding.Type.REPLICATED] if rest else [],
        )


def is_plain(sharding: Any) -> bool:
    """Whether a sharding cuts an array into tiles, and leaves nothing else to devices."""
    kinds = set(sharding.subgroup_types()) if sharding.is_tiled() else {None}
    return kinds <= {xla_client.OpSharding.Type.REPLICATED}


def _primes(extent: int) -> list[int]:
    if extent == 1:
        return []
    least = next(divisor for divisor in range(2, extent + 1) if extent % divisor == 0)
    return [least, *_primes(extent // least)]
