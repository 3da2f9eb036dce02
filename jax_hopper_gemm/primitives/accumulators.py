"""Accumulators of a product with an epilogue, computed outside of its kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import lax

from ..gemm.product import Product
from ..lowering.shardings import padded_partitions, with_partitions
from .dot import hopper_dot, reference_dot
from .ragged_dot import hopper_ragged_dot


def multiply(product: Product, lhs: Any, right: Any, *sizes: Any, by_xla: bool = False) -> Any:
    """Returns one product: with gate and up stacked, an array of both.

    Args:
      product: its `preferred_element_type` is the dtype of the accumulators.
      sizes: of a ragged product.
      by_xla: no kernel takes part.
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
    whole = whole.with_options(preactivation="save")
    return reference_dot(lhs, right, product=whole) if by_xla else hopper_dot(lhs, right, whole)


def _multiply_ragged(product: Product, lhs: Any, right: Any, sizes: Any, *, by_xla: bool) -> Any:
    shared = right.ndim == len(product.subscripts.rhs)
    flat = replace(product, subscripts=product.subscripts.without(product.gate_up), batch=0)
    flat = flat.with_options(preactivation="save")
    if by_xla:
        flat = flat.with_options(implementation="xla")
    if product.gate_up:  # their columns side by side
        right = right.reshape(*right.shape[:-2], -1)
    multiplied = partial(hopper_ragged_dot, product=flat)
    for _ in range(product.batch):
        multiplied = jax.vmap(multiplied, (0, None if shared else 0, 0))
    result = multiplied(lhs, right, sizes)
    return result.reshape(*result.shape[:-1], 2, -1) if product.gate_up else result


def accumulators_of(
    product: Product, lhs: Any, right_operands: Sequence[Any], *sizes: Any, by_xla: bool = False
) -> list[Any]:
    """Returns the accumulators, an array each; arguments as of `multiply`.

    Args:
      right_operands: the right operand; or gate and up, which one array may hold.
    """
    arrays = [multiply(product, lhs, right, *sizes, by_xla=by_xla) for right in right_operands]
    return unstacked(arrays, product.gate_up_axis())


def unstacked(arrays: Sequence[Any], axis: int | None) -> list[Any]:
    """Returns `arrays` with gate and up of the first, along `axis`, apart."""
    if axis is None:
        return list(arrays)
    planes = [lax.index_in_dim(arrays[0], i, axis, keepdims=False) for i in range(2)]
    return [*planes, *arrays[1:]]
