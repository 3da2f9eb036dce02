"""Gradients of what a program picks or looks up, without the scatters that JAX writes for them.

A loss picks one number of each row, its logits. JAX's derivative adds the cotangents to zeros by a
scatter. XLA writes all of that array, adds it to other gradients in a pass of its own, and converts
the sum in another one. As a choice by the index, element by element, the gradient is computed where
it is read.

A table of few rows, as of biases by relative positions, gets many cotangents a row. XLA adds them
by atomics, one after the other: 262,144 of 32 numbers into 32 rows took 0.8 s on an H200. They are
a product of zeros and ones by the cotangents.

Rows that are put in another order, as tokens by their experts, go back by a scatter of as many rows
or fewer. Its atomics take XLA ten times as long as memory does, and have other bits on every run.
One GPU finds the rows of each sum by a sort, and reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.extend.core import Literal

from ..fusion.jaxprs import in_place_of
from ..fusion.residuals import variables
from ..gemm.dtypes import HALVES
from ..primitives.rows import add_rows_p

MOST_ROWS = 1024  # of a table whose gradient is a product
LEAST_SHARE = 256  # of cotangents, for each row of it
LEAST_ROW, LEAST_MOVED = 64, 2**20  # elements of a row, and of all that are put back in order


def without_scatters(equations: Sequence[Any]) -> list[Any]:
    """Returns the equations; instead of scatters into zeros what computes the same faster."""
    new: list[Any] = []
    zeros = {x for equation in equations if _is_zero(equation) for x in equation.outvars}
    for equation in equations:
        adds = equation.primitive is lax.scatter_add_p
        to_zeros = adds and not zeros.isdisjoint(variables(equation.invars[:1]))
        if to_zeros and (function := _faster(equation)):
            params = {x: equation.params[x] for x in ("dimension_numbers", "mode")}
            new += in_place_of(equation, function, **params)
        else:
            new.append(equation)
    return new


def _faster(equation: Any) -> Callable[..., Any] | None:
    """Returns what computes a scatter faster: a product, a choice or `add_rows`; None: nothing."""
    zeros, indices, updates = (x.aval for x in equation.invars)
    if any(x.sharding.mesh.explicit_axes for x in (zeros, indices, updates)):
        return None
    adds_rows = _adds_rows(equation)
    if adds_rows and zeros.shape[0] <= MOST_ROWS and updates.size >= LEAST_SHARE * zeros.size > 0:
        return _product
    if _is_pick(equation):
        return _choice
    if adds_rows and indices.dtype.itemsize <= 4:
        row = zeros.size // max(zeros.shape[0], 1)
        if row >= LEAST_ROW and updates.size >= max(zeros.size, LEAST_MOVED):
            return _row_sums
    return None


def _is_zero(equation: Any) -> bool:
    if equation.primitive is not lax.broadcast_in_dim_p:
        return False
    x: Any = equation.invars[0]
    return not x.aval.ndim and isinstance(x, Literal) and not x.val


def _is_pick(equation: Any) -> bool:
    """Whether a scatter adds at most one number to each row, along an axis."""
    zeros, indices, updates = (x.aval for x in equation.invars)
    numbers = equation.params["dimension_numbers"]
    batch, axes = numbers.operand_batching_dims, numbers.scatter_dims_to_operand_dims
    counted = numbers.scatter_indices_batching_dims
    units = [extent for i, extent in enumerate(updates.shape) if i not in counted]
    return (
        not numbers.update_window_dims
        and numbers.inserted_window_dims == axes
        and sorted((*batch, *axes)) == [*range(zeros.ndim)]
        and len(axes) == 1
        and sorted(counted) == [*counted]
        and [updates.shape[i] for i in counted] == [zeros.shape[axis] for axis in batch]
        and set(units) <= {1}
        and indices.shape == (*updates.shape, 1)
    )


def _choice(zeros: Any, indices: Any, updates: Any, *, dimension_numbers: Any, mode: Any) -> Any:
    """Chooses the update where the index is that of the element."""
    numbers, shape = dimension_numbers, zeros.shape
    (axis,), batch = numbers.scatter_dims_to_operand_dims, numbers.operand_batching_dims
    rows = [shape[x] for x in batch]
    indices = _counting(indices, mode, shape[axis])
    indices, updates = (
        lax.broadcast_in_dim(lax.reshape(x, rows), shape, batch) for x in (indices, updates)
    )
    along = lax.broadcasted_iota(indices.dtype, shape, axis)
    return lax.select(along == indices, updates, lax.full_like(updates, 0))


def _adds_rows(equation: Any) -> bool:
    """Whether a scatter adds rows of 16-bit floats, each to the one that an index says."""
    zeros, indices, updates = (x.aval for x in equation.invars)
    numbers, axes = equation.params["dimension_numbers"], range(updates.ndim)
    rows = updates.shape[: indices.ndim - 1]
    return (
        zeros.dtype.name in HALVES
        and numbers.inserted_window_dims == numbers.scatter_dims_to_operand_dims == (0,)
        and not numbers.operand_batching_dims
        and numbers.update_window_dims == tuple(axes[len(rows) :])
        and indices.shape == (*rows, 1)
        and updates.shape[len(rows) :] == zeros.shape[1:]
        and all(isinstance(extent, int) for extent in (*updates.shape, *zeros.shape))
    )


def _product(zeros: Any, indices: Any, updates: Any, *, mode: Any, **_: Any) -> Any:
    """Multiplies the updates by ones at their indices and zeros."""
    extent = zeros.shape[0]
    indices = _counting(indices, mode, extent)
    axes = tuple(range(indices.ndim - 1))
    along = lax.broadcasted_iota(indices.dtype, (*indices.shape[:-1], extent), len(axes))
    ones = lax.convert_element_type(along == indices, updates.dtype)
    numbers = ((axes, axes), ((), ()))
    return lax.dot_general(ones, updates, numbers, preferred_element_type=updates.dtype)


def _row_sums(zeros: Any, indices: Any, updates: Any, *, mode: Any, **_: Any) -> Any:
    length = zeros.shape[0]
    indices = _counting(indices, mode, length)
    rows = lax.convert_element_type(lax.reshape(indices, (indices.size,)), "int32")
    x = lax.reshape(updates, (rows.size, zeros.size // length))
    total = add_rows_p.bind(x, rows, length=length, scattered=True)
    return lax.reshape(total, zeros.shape)


def _counting(indices: Any, mode: Any, extent: int) -> Any:
    """Returns indices, those of other elements clipped if the mode says so, as wide numbers."""
    if indices.dtype.itemsize < 4:  # so that they count all elements of a row
        indices = lax.convert_element_type(indices, "int32")
    if mode != lax.GatherScatterMode.CLIP:
        return indices
    return lax.clamp(indices.dtype.type(0), indices, indices.dtype.type(extent - 1))
