"""Arrays of small integers on a mesh of eight devices of the CPU, by the letters of their axes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.program_inspection import integers

EXTENTS = {"b": 8, "m": 64, "n": 16, "k": 32, "g": 8, "c": 2}


def mesh(axis_type: AxisType = AxisType.Auto, shape: tuple[int, int] = (2, 4)) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, ("x", "y"), axis_types=(axis_type, axis_type))


def placed(values: Any, *spec: Any) -> jax.Array:
    return jax.device_put(np.asarray(values), NamedSharding(mesh(), P(*spec)))


def array(letters: str, where: dict[str, Any], seed: int = 0, dtype: Any = "float32") -> jax.Array:
    """Returns an array; `where` holds the mesh axes of some of its letters."""
    values = integers(tuple(EXTENTS[x] for x in letters), dtype, seed=seed)
    return placed(values, *(where.get(x) for x in letters))


def name_of(where: Any) -> str | None:
    """Names a case by how its letters are sharded; None of what is no sharding."""
    if not isinstance(where, dict):
        return None
    return "-".join(f"{letter}{''.join(axes)}" for letter, axes in where.items())
