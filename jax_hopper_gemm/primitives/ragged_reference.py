"""A ragged product as XLA computes it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from ..fusion.jaxprs import traced, varying_together
from ..gemm.groups import GROUP, VARLEN_K, VARLEN_K_T, VARLEN_M_KN
from ..gemm.product import Product
from .complex_products import by_parts
from .dot import as_multiplied
from .group_sizes import clipped_sizes, group_of_rows

# Taken here, so that it stays JAX's own where `ops.intercept` puts ours in its place.
# `lax.dot` does where Qwix replaces `lax.dot_general`, the other name of the same product.
_lax_ragged_dot_general = lax.ragged_dot_general


def reference_ragged_dot(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, *, product: Product
) -> jax.Array:
    """The product as XLA computes it; arguments as of `hopper_ragged_dot`.

    `jax.lax.ragged_dot` where each size is a group's; else all rows are multiplied by one matrix
    after the other. Rows of no group and weights of empty groups may hold NaNs, as for a kernel:
    JAX's own, which multiplies them by 0, would let these into every row.
    """
    options = product.options.of_dot()
    multiply = by_parts(partial(_by_lax, sizes=sizes, product=product), options["precision"])
    return multiply(lhs, rhs, preferred_element_type=options["preferred_element_type"])


def _by_lax(
    lhs: Any, rhs: Any, *, sizes: Any, product: Product, preferred_element_type: Any
) -> jax.Array:
    product = product.with_options(preferred_element_type=preferred_element_type)
    if product.subscripts == VARLEN_K_T:
        lhs, rhs, product = lhs.T, rhs.T, replace(product, subscripts=VARLEN_K)
    subscripts, groups, options = product.subscripts, product.groups, product.options.of_dot()
    assert groups
    if groups.is_plain(sizes.shape[0]) and groups.count:
        length = lhs.shape[0]
        sizes = clipped_sizes(sizes, length)
        in_group = jnp.arange(length, dtype=np.int32) < sizes.sum(dtype=np.int32)
        lhs = zero_unless(in_group, lhs)
        rhs = zero_unless(in_group if subscripts == VARLEN_K else sizes > 0, rhs)
        contracted = [[x.index(subscripts.contracted)] for x in (subscripts.lhs, subscripts.rhs)]
        group_axes = [0] if GROUP in subscripts.rhs else []
        numbers = lax.RaggedDotDimensionNumbers((contracted, ([], [])), [0], group_axes)
        out = _lax_ragged_dot_general(lhs, rhs, sizes, numbers, **options)
        return as_multiplied(out, lhs, rhs, options)
    own = group_of_rows(sizes, groups, lhs.shape[0])[:, None]
    like = traced(partial(array_like_product, product=product), lhs, rhs, sizes).out_avals[0]
    matrices = jnp.arange(groups.matrices(sizes.shape[0]), dtype=np.int32)

    if subscripts == VARLEN_K:

        def of_group(_: None, group: jax.Array) -> tuple[None, jax.Array]:
            own_lhs, own_rhs = (jnp.where(own == group, x, jnp.zeros_like(x)) for x in (lhs, rhs))
            numbers = (((0,), (0,)), ((), ()))
            return None, lax.dot(own_lhs, own_rhs, dimension_numbers=numbers, **options)

        return lax.scan(of_group, None, matrices)[1] if matrices.size else _zeros(like, rhs)

    def with_group(out: jax.Array, group: Any) -> tuple[jax.Array, None]:
        matrix, number = group
        axis = 0 if subscripts == VARLEN_M_KN else 1
        numbers = (((1,), (axis,)), ((), ()))
        own_rows = lax.dot(lhs, matrix, dimension_numbers=numbers, **options)
        return jnp.where(own == number, own_rows, out), None

    out = _zeros(like, lhs)
    return lax.scan(with_group, out, (rhs, matrices))[0] if matrices.size else out


def zero_unless(kept: jax.Array, array: jax.Array) -> jax.Array:
    """Returns an array with zeros where its first axes are not `kept`."""
    kept = lax.expand_dims(kept, range(kept.ndim, array.ndim))
    return jnp.where(kept, array, jnp.zeros((), array.dtype))


def _zeros(aval: Any, array: jax.Array) -> jax.Array:
    """Returns zeros that vary over the mesh axes that `array` varies over."""
    return varying_together(jnp.zeros(aval.shape, aval.dtype), array)[0]


def array_like_product(lhs: Any, rhs: Any, sizes: Any, *, product: Product) -> jax.Array:
    """Returns an array like the product, and as cheap to trace as can be."""
    subscripts, groups = product.subscripts, product.groups
    assert groups
    if subscripts == VARLEN_K_T:
        lhs, rhs, subscripts = lhs.T, rhs.T, VARLEN_K
    if subscripts == VARLEN_K:
        numbers, axis = (((), ()), ((0,), (0,))), 0
    else:
        numbers, axis = (((1,), (subscripts.rhs.index("k"),)), ((), ())), 1
    like = lax.dot(lhs, rhs, dimension_numbers=numbers, **product.options.of_dot())
    like = lax.reduce(like, np.zeros((), like.dtype), lax.max, (axis,))  # of any dtype
    if subscripts == VARLEN_K:
        shape = (groups.matrices(sizes.shape[0]), *like.shape)
        like = lax.broadcast_in_dim(like, shape, (1, 2))
    return like
