"""Products of mapped operands, which are one product again: `vmap` of products with an epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax import numpy as jnp

from ..gemm.groups import is_varlen_k
from ..gemm.product import Product
from .dot import batched
from .segments import mapped_first, mapped_shared


def batched_product(
    axis_data: Any, operands: Sequence[Any], axes: Sequence[int | None], product: Product
) -> tuple[list[Any], Product, int | None]:
    """Returns the operands of a batched product, how it is computed, and the axis it is mapped on.

    Several right operands are given the same axes: mapped along their first, if any is mapped.

    Args:
      operands: the left one, the right ones, sizes; `axes` holds each one's mapped axis.
    """
    lhs, *right_operands = operands
    lhs_axis, *right_axes = axes
    if all(axis is None for axis in axes):
        return list(operands), product, None
    if product.groups:
        return _batched_ragged(axis_data.size, operands, axes, product)
    if len(set(right_axes)) > 1:
        right_operands = [
            jnp.broadcast_to(x, (axis_data.size, *x.shape))
            if axis is None
            else jnp.moveaxis(x, axis, 0)
            for x, axis in zip(right_operands, right_axes, strict=True)
        ]
        right_axes = [0]
    return [lhs, *right_operands], batched(product, axis_data, (lhs_axis, right_axes[0])), 0


def _batched_ragged(
    size: int, operands: Sequence[Any], axes: Sequence[int | None], product: Product
) -> tuple[list[Any], Product, int]:
    lhs, *right_operands, sizes = operands
    lhs_axis, *right_axes, sizes_axis = axes
    lhs, sizes = mapped_first(size, lhs, lhs_axis), mapped_first(size, sizes, sizes_axis)
    contraction = is_varlen_k(product.subscripts)
    if contraction or any(axis is not None for axis in right_axes):
        right_operands = [
            mapped_first(size, x, a) for x, a in zip(right_operands, right_axes, strict=True)
        ]
        right_axes = [0] * len(right_operands)
    rank, batch = len(product.subscripts.rhs), sizes.shape[1:-1]
    right_operands = [
        mapped_shared(size, x, axis, batch, x.ndim - (axis is not None) > rank)
        for x, axis in zip(right_operands, right_axes, strict=True)
    ]
    return [lhs, *right_operands, sizes], replace(product, batch=product.batch + 1), 0
