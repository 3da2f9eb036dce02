"""Functions that XLA shards where mesh axes are Explicit.

The type of an array with Explicit mesh axes states its sharding, and JAX refuses operations whose
result's it cannot tell, as of axes that merge. Where such axes are switched to Auto, XLA finds the
shardings of what lies in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
from jax.core import ShapedArray
from jax.sharding import AxisType, PartitionSpec

from ..lowering.devices import padded_partitions


def is_explicit(*arrays: Any) -> bool:
    """Whether the mesh of these arrays or abstract values has Explicit axes; skips None."""
    return AxisType.Explicit in _mesh_of(arrays).axis_types


def _mesh_of(arrays: Any) -> Any:
    """Returns the mesh that is set, else that of the arrays."""
    if not (mesh := jax.sharding.get_abstract_mesh()).empty:
        return mesh
    leaves = jax.tree.leaves(arrays, is_leaf=lambda x: isinstance(x, ShapedArray))
    types = [x if isinstance(x, ShapedArray) else jax.typeof(x) for x in leaves]
    return next((x.sharding.mesh for x in types if not x.sharding.mesh.empty), mesh)


def in_auto_axes(function: Callable[..., Any], out_sharding: Any, *arrays: Any) -> Any:
    """Returns `function(*arrays)`: Explicit axes, if any, as Auto, results of an `out_sharding`."""
    if not is_explicit(*arrays):
        return function(*arrays)
    mesh = _mesh_of(arrays)
    axes = tuple(mesh.explicit_axes)
    # Arrays of no mesh have shardings without one, in programs of the mesh that is set, too.
    out_sharding = jax.tree.map(lambda x: getattr(x, "spec", x), out_sharding)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.sharding.auto_axes(function, axes=axes, out_sharding=out_sharding)(*arrays)


def kept_sharding(x: Any, shape: Sequence[int]) -> PartitionSpec:
    """Returns the sharding of an array or type for another shape, where its axes divide that."""
    sharding = (x if isinstance(x, ShapedArray) else jax.typeof(x)).sharding

    def kept(extent: int, axes: Any) -> Any:
        names = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
        cut = names and extent % prod(sharding.mesh.shape[name] for name in names)
        return None if cut else axes

    return PartitionSpec(*map(kept, shape, padded_partitions(sharding, len(shape))))


def stated_sharding(aval: Any) -> Any:
    """Returns the sharding that a type states; None without a mesh."""
    return None if aval.sharding.mesh.empty else aval.sharding
