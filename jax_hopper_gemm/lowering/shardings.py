"""Named shardings of JAX with their axes rearranged."""

from __future__ import annotations

from typing import Any


def permuted_sharding(sharding: Any, permutation: tuple[int, ...]) -> Any:
    """Returns the sharding of the array whose axis i is axis `permutation[i]`; None stays None."""
    if sharding is None:
        return None
    partitions = padded_partitions(sharding, len(permutation))
    return with_partitions(sharding, tuple(partitions[axis] for axis in permutation))


def padded_partitions(sharding: Any, ndim: int) -> tuple[Any, ...]:
    """Returns one entry of the partition spec for each of `ndim` axes."""
    partitions = tuple(sharding.spec)
    return partitions + (None,) * (ndim - len(partitions))


def with_partitions(sharding: Any, partitions: tuple[Any, ...]) -> Any:
    """Returns the sharding with another partition spec, on the same mesh."""
    return sharding.update(spec=sharding.spec.update(partitions=partitions))
