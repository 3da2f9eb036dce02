"""Stacked gate and up weights of a gated unit, from two layers' parameters and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import meta

from ..ops.checks.wording import describe

NO_MESH_AXIS = {nnx.PARTITION_NAME: None}  # gate and up of one column lie on one device


def from_pair(gate: Any, up: Any) -> Any:
    """Returns the parameters of `GatedLinear` (or `linen.GatedDense`) from those of two layers.

    For example, from the usual three layers of a gated MLP:

        nnx.update(mlp.gate_up, from_pair(nnx.state(gate_proj), nnx.state(up_proj)))
        nnx.update(mlp.down, nnx.state(down_proj))

        params = {"gate_up": from_pair(params["gate_proj"], params["up_proj"]),
                  "down": params["down_proj"]}

    Args:
      gate, up: two pytrees of one structure: states, parameters, dictionaries of them. Kernels
        are (in, hidden), biases (hidden,). Annotations of their sharding are kept.

    Returns:
      A pytree of that structure: kernels (in, 2, hidden), biases (2, hidden), gate first.

    Raises:
      ValueError: two arrays differ in shape, or have no axis.
    """
    return jax.tree.map(_stacked, gate, up, is_leaf=_is_annotated)


def to_pair(stacked: Any) -> tuple[Any, Any]:
    """Returns the parameters of gate and of up: the inverse of `from_pair`.

    Kernels (in, 2, hidden) become two of (in, hidden), biases (2, hidden) two of (hidden,).

    Raises:
      ValueError: an array has another axis before its last one.
    """
    gate, up = (
        jax.tree.map(lambda x, i=i: _part(x, i), stacked, is_leaf=_is_annotated) for i in range(2)
    )
    return gate, up


def _is_annotated(x: Any) -> bool:
    return isinstance(x, nnx.Variable | meta.AxisMetadata)


def _stacked(gate: Any, up: Any) -> Any:
    if isinstance(gate, nnx.Variable):
        return _variable(gate, _stacked(gate[...], up[...]), lambda n: (*n[:-1], None, n[-1]))
    if isinstance(gate, meta.AxisMetadata):
        stack = gate.replace_boxed(_stacked(gate.unbox(), up.unbox()))
        return stack.add_axis(stack.unbox().ndim - 2, NO_MESH_AXIS)
    if jnp.shape(gate) != jnp.shape(up) or not jnp.ndim(gate):
        raise ValueError(
            f"from_pair: gate is {describe(gate)} and up is {describe(up)}, expected equal shapes "
            "of one axis or more"
        )
    return jnp.stack((gate, up), axis=-2)


def _part(stack: Any, index: int) -> Any:
    if isinstance(stack, nnx.Variable):
        return _variable(stack, _part(stack[...], index), lambda n: (*n[:-2], n[-1]))
    if isinstance(stack, meta.AxisMetadata):
        axis = stack.unbox().ndim - 2
        return stack.remove_axis(axis, NO_MESH_AXIS).replace_boxed(_part(stack.unbox(), index))
    if jnp.shape(stack)[-2:-1] != (2,):
        raise ValueError(
            f"to_pair: an array is {describe(stack)}, expected an axis of length 2, "
            "gate and up, before the last"
        )
    return stack[..., index, :]


def _variable(like: Any, value: jax.Array, rename: Any) -> Any:
    """Returns a variable of the same kind; `rename` maps the names of its axes in a mesh."""
    metadata = dict(like.get_metadata())
    names: Sequence[Any] | None = metadata.get("out_sharding")
    if names:
        metadata["out_sharding"] = rename(tuple(names))
    return type(like)(value, **metadata)
