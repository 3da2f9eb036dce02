"""Picks of a number of each row, as a loss takes of its logits: their gradient without a scatter.

JAX's derivative adds the cotangents to zeros by a scatter. XLA writes all of that array, adds it to
other gradients in a pass of its own, and converts the sum in another one. As a choice by the index,
element by element, the gradient is computed where it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend.core import Literal

from ..fusion.jaxprs import spliced, traced


def with_choices(equations: Sequence[Any]) -> list[Any]:
    """Returns the equations with each scatter of one number a row into zeros as a choice."""
    makers = {x: equation for equation in equations for x in equation.outvars}
    new: list[Any] = []
    for equation in equations:
        if equation.primitive is lax.scatter_add_p and _scatters_a_pick(equation, makers):
            new += _choice(equation)
        else:
            new.append(equation)
    return new


def _scatters_a_pick(equation: Any, makers: dict[Any, Any]) -> bool:
    """Whether a scatter adds at most one number to each row, along an axis, of zeros."""
    zeros, indices, updates = equation.invars
    numbers, ndim = equation.params["dimension_numbers"], zeros.aval.ndim
    batch, axes = numbers.operand_batching_dims, numbers.scatter_dims_to_operand_dims
    counted = numbers.scatter_indices_batching_dims
    rows = [zeros.aval.shape[axis] for axis in batch]
    units = [extent for i, extent in enumerate(updates.aval.shape) if i not in counted]
    maker = makers.get(zeros)
    return (
        maker is not None
        and maker.primitive is lax.broadcast_in_dim_p
        and isinstance(maker.invars[0], Literal)
        and not maker.invars[0].val
        and not numbers.update_window_dims
        and numbers.inserted_window_dims == axes
        and sorted((*batch, *axes)) == [*range(ndim)]
        and len(axes) == 1
        and sorted(counted) == [*counted]
        and [updates.aval.shape[i] for i in counted] == rows
        and set(units) <= {1}
        and indices.aval.shape == (*updates.aval.shape, 1)
        and not any(x.aval.sharding.mesh.explicit_axes for x in equation.invars)
    )


def _choice(equation: Any) -> list[Any]:
    """Returns the equations that choose the update where the index is that of the element."""
    numbers, mode = (equation.params[x] for x in ("dimension_numbers", "mode"))
    (result,), (axis,) = equation.outvars, numbers.scatter_dims_to_operand_dims
    shape, batch = result.aval.shape, numbers.operand_batching_dims
    rows, extent = [shape[x] for x in batch], shape[axis]

    def chosen(zeros: Any, indices: Any, updates: Any) -> Any:
        if indices.dtype.itemsize < 4:  # so that it counts all elements of a row
            indices = lax.convert_element_type(indices, "int32")
        if mode == lax.GatherScatterMode.CLIP:
            indices = lax.clamp(indices.dtype.type(0), indices, indices.dtype.type(extent - 1))
        indices, updates = (
            lax.broadcast_in_dim(lax.reshape(x, rows), shape, batch) for x in (indices, updates)
        )
        along = lax.broadcasted_iota(indices.dtype, shape, axis)
        return lax.select(along == indices, updates, lax.full_like(updates, 0))

    with equation.ctx.manager:  # of its mesh
        return spliced(equation, traced(chosen, *(x.aval for x in equation.invars)))
