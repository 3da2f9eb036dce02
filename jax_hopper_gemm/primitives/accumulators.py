"""Accumulators of a product with an epilogue: computed outside of its kernel, and under `vmap`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
from jax import lax

from ..gemm.groups import is_varlen_k
from ..gemm.product import Product
from ..lowering.devices import padded_partitions, with_partitions
from .define import mapped_first
from .dot import batched, hopper_dot, reference_dot
from .ragged_dot import hopper_ragged_dot
from .segments import mapped_shared


def multiply(product: Product, lhs: Any, right: Any, *sizes: Any, by_xla: bool = False) -> Any:
    """Returns one product, in its `preferred_element_type`: with gate and up stacked, both.

    `sizes` are those of a ragged product; with `by_xla` no kernel takes part.
    """
    if product.groups:
        return _multiply_ragged(product, lhs, right, *sizes, by_xla=by_xla)
    subscripts, sharding = product.subscripts, product.out_sharding
    if product.gate_up:
        subscripts, axis = subscripts.with_gate_up()
        if sharding is not None:
            parts = list(padded_partitions(sharding, len(product.subscripts.out)))
            sharding = with_partitions(sharding, (*parts[:axis], None, *parts[axis:]))
    whole = replace(product, subscripts=subscripts, out_sharding=sharding)
    whole = whole.with_options(save_preactivation=True)
    return reference_dot(lhs, right, product=whole) if by_xla else hopper_dot(lhs, right, whole)


def _multiply_ragged(product: Product, lhs: Any, right: Any, sizes: Any, *, by_xla: bool) -> Any:
    shared = right.ndim == len(product.subscripts.rhs)
    flat = replace(product, subscripts=product.subscripts.without(product.gate_up), batch=0)
    flat = flat.with_options(save_preactivation=True)
    if by_xla:
        flat = flat.with_options(implementation="xla")
    if product.gate_up:  # their columns side by side, in memory rows where K lies along them
        letters = product.subscripts.rhs
        axis = right.ndim - len(letters) + letters.index(product.gate_up)
        columns = prod(right.shape[axis : axis + 2])
        right = right.reshape(*right.shape[:axis], columns, *right.shape[axis + 2 :])
    multiplied = partial(hopper_ragged_dot, product=flat)
    for _ in range(product.batch):
        multiplied = jax.vmap(multiplied, (0, None if shared else 0, 0))
    result = multiplied(lhs, right, sizes)
    if not product.gate_up:
        return result
    return result.reshape(*result.shape[:-1], 2, result.shape[-1] // 2)


def accumulators_of(
    product: Product, lhs: Any, right_operands: Sequence[Any], *sizes: Any, by_xla: bool = False
) -> list[Any]:
    """Returns the accumulators, an array each, as `multiply` does.

    `right_operands` are the right operand; or gate and up, which one array may hold.
    """
    if product.options.recipe:
        product, right_operands = apart(product, right_operands)
    arrays = [multiply(product, lhs, right, *sizes, by_xla=by_xla) for right in right_operands]
    return unstacked(arrays, product.gate_up_axis())


def apart(product: Product, right_operands: Sequence[Any]) -> tuple[Product, Sequence[Any]]:
    """Returns a product of gate and of up in two arrays, to a recipe, and these arrays."""
    if not (letter := product.gate_up):
        return product, right_operands
    (both,), letters = right_operands, product.subscripts.rhs
    axis = both.ndim - len(letters) + letters.index(letter)
    product = replace(product, subscripts=product.subscripts.without(letter))
    return product, unstacked(right_operands, axis)


def unstacked(arrays: Sequence[Any], axis: int | None) -> list[Any]:
    """Returns `arrays` with gate and up of the first, along `axis`, apart."""
    if axis is None:
        return list(arrays)
    planes = [lax.index_in_dim(arrays[0], i, axis, keepdims=False) for i in range(2)]
    return [*planes, *arrays[1:]]


def batched_product(
    axis_data: Any, operands: Sequence[Any], axes: Sequence[int | None], product: Product
) -> tuple[list[Any], Product, int | None]:
    """Returns the operands of a batched product, how it is computed, and the axis it is mapped on.

    Operands are the left one, the right ones, sizes; `axes` has the mapped axis of each. Several
    right operands are given the same axes: mapped along their first, if any is mapped.
    """
    lhs, *right_operands = operands
    lhs_axis, *right_axes = axes
    if all(axis is None for axis in axes):
        return list(operands), product, None
    if product.groups:
        return _batched_ragged(axis_data.size, operands, axes, product)
    if len(set(right_axes)) > 1:
        mapped = partial(mapped_first, axis_data.size)
        right_operands, right_axes = map(mapped, right_operands, right_axes), [0]
    return [lhs, *right_operands], batched(product, axis_data, (lhs_axis, right_axes[0])), 0


def _batched_ragged(
    size: int, operands: Sequence[Any], axes: Sequence[int | None], product: Product
) -> tuple[list[Any], Product, int]:
    lhs, *right_operands, sizes = operands
    lhs_axis, *right_axes, sizes_axis = axes
    lhs, sizes = mapped_first(size, lhs, lhs_axis), mapped_first(size, sizes, sizes_axis)
    contraction = is_varlen_k(product.subscripts)
    if contraction or any(axis is not None for axis in right_axes):
        right_operands = list(map(partial(mapped_first, size), right_operands, right_axes))
        right_axes = [0] * len(right_operands)
    rank, batch = len(product.subscripts.rhs), sizes.shape[1:-1]
    right_operands = [
        mapped_shared(size, x, axis, batch, x.ndim - (axis is not None) > rank)
        for x, axis in zip(right_operands, right_axes, strict=True)
    ]
    return [lhs, *right_operands, sizes], replace(product, batch=product.batch + 1), 0
