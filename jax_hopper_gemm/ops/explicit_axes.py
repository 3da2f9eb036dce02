"""Ragged products of arrays whose mesh axes are Explicit.

The type of such an array says how it is sharded. Within the product the axes are Auto: XLA finds
the shardings, as of any other product that it partitions, and the result is given its type again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.sharding import AxisType, PartitionSpec

from ..lowering.shardings import padded_partitions
from .ragged_axes import RaggedAxes


def is_explicit(*arrays: Any) -> bool:
    """Whether the mesh of these arrays or abstract values has Explicit axes; None is none."""
    return AxisType.Explicit in _mesh_of(arrays).axis_types


def _mesh_of(arrays: Any) -> Any:
    """Returns the mesh that is set, else that of the arrays."""
    if not (mesh := jax.sharding.get_abstract_mesh()).empty:
        return mesh
    leaves = jax.tree.leaves(arrays, is_leaf=lambda x: isinstance(x, ShapedArray))
    types = [x if isinstance(x, ShapedArray) else jax.typeof(x) for x in leaves]
    return next((x.sharding.mesh for x in types if not x.sharding.mesh.empty), mesh)


def in_auto_axes(function: Callable[..., Any], out_sharding: Any, *arrays: Any) -> Any:
    """Returns `function(*arrays)`, the results of the shardings `out_sharding`, one or a tree."""
    with jax.sharding.use_abstract_mesh(_mesh_of(arrays)):
        return jax.sharding.auto_axes(function, out_sharding=out_sharding)(*arrays)


def partitions(array: Any) -> tuple[Any, ...]:
    """Returns the mesh axes, or None, of each axis of an array or abstract value."""
    aval = array if isinstance(array, ShapedArray) else jax.typeof(array)
    return tuple(padded_partitions(aval.sharding, aval.ndim))


def sharding_of_product(
    op: str, axes: RaggedAxes, lhs: Sequence[Any], rhs: Sequence[Any], rows: Any
) -> PartitionSpec:
    """Returns the sharding of a product, which keeps that of its operands' rows and columns.

    Args:
      op: what the user called, for messages.
      lhs, rhs: of each axis of the operands its mesh axes, or None.
      rows: indices of rows of the left operand, or None.

    Raises:
      ValueError: the operands leave it open.
    """
    way_out = "Name the sharding of the result by out_sharding."
    over = _named(axes.of_sum(lhs, rhs))
    if over:
        raise ValueError(
            f"{op}: contracted axes, or the groups of weights, are sharded over the mesh axes "
            f"{sorted(set(over))}: it is open how the sum over these devices is to lie. {way_out}"
        )
    if rows is not None:
        lhs = (*partitions(rows)[:1], *lhs[1:])
    kept = axes.of_result(lhs, rhs)
    if len(used := _named(kept)) > len(set(used)):
        twice = sorted({axis for axis in used if used.count(axis) > 1})
        raise ValueError(
            f"{op}: several axes of the result would be sharded over the mesh axes {twice}, as the "
            f"operands' are. {way_out}"
        )
    return PartitionSpec(*([None] if axes.kind == "varlen_k" else []), *kept)


def shardings_of_results(
    function: Callable[..., Any], arrays: Any, product: Any, shape: tuple[int, int]
) -> Any:
    """Returns the shardings of what `function(*arrays)` returns.

    Of arrays of the product's shape it is `product`, of others with as many rows that of the rows.
    """
    (rows, *_) = (*getattr(product, "spec", product), None)

    def of(result: Any) -> Any:
        if result.shape == shape:
            return product
        if result.shape[:1] == shape[:1]:
            return PartitionSpec(rows, *[None] * (result.ndim - 1))
        return PartitionSpec()

    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), arrays)
        return jax.tree.map(of, jax.eval_shape(function, *shapes))


def _named(axes: Sequence[Any]) -> list[str]:
    """Returns all mesh axes of a partition spec's entries."""
    entries = (x if isinstance(x, tuple) else (x,) for x in axes if x is not None)
    return list(itertools.chain.from_iterable(entries))
