"""The JAX primitive `hopper_scaled_dot`: a product of 8-bit arrays whose blocks have scales.

Operands have their contracted axes last, behind those of the batch, of groups and the free ones.
Scales are float32 of (b, rows / 1 or 128, K / 128), rounded up, for so many rows in all and so many
matrices b; without b where there is one matrix.

Its derivative is that of the operands times their scales, in float32: no rounding is undone and
none is added. A kernel multiplies the scales in while it adds up, and computes the function that
may follow; elsewhere XLA multiplies the operands first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import mlir

from ..fusion.graph_to_jax import along
from ..fusion.jaxprs import ClosedJaxpr
from ..gemm.product import Product
from ..gemm.spec import PROMOTION_K
from ..gemm.subscripts import Subscripts
from ..lowering.call import Call
from ..lowering.emit import lower_call
from ..lowering.register import Lowering
from ..lowering.request import Request
from .auto_axes import in_auto_axes, is_explicit, kept_sharding
from .define import Rules, define_primitive, mapped_first
from .dot import reference_dot
from .ragged_dot import hopper_ragged_dot

SCALED = Subscripts.parse("mk,nk->mn")
BATCHED = Subscripts.parse("bmk,bnk->bmn")


def scaled_dot(
    pair: Sequence[Any],
    scales: tuple[Any, Any],
    product: Product,
    operands: Sequence[Any] = (),
    jaxpr: ClosedJaxpr | None = None,
    in_place: tuple[int | None, ...] = (),
) -> list[Any]:
    """Returns the product, or what a function computes from it.

    Args:
      pair, scales: as the module says.
      operands: of the function; of a ragged product sizes come first, with or without one.
      jaxpr: the function of the float32 product and the operands.
      in_place: as in `fused_dot`.
    """
    return hopper_scaled_dot_p.bind(
        *pair, *scales, *operands, product=product, jaxpr=jaxpr, in_place=in_place
    )


def block_of(rows: int, scales: int) -> int:
    """Returns how many rows share a scale, of so many scales: 1 or 128."""
    return 1 if scales == rows else PROMOTION_K


def _matrices(shape: Sequence[int], scale: Any, contracted: int) -> tuple[int, ...]:
    """Returns the shape of an operand as its scales have it: (b, rows, K)."""
    lead = scale.shape[:-2]
    k = prod(shape[len(shape) - contracted :])
    return *lead, prod(shape[: len(shape) - contracted]) // prod(lead), k


def scale_of_each(scale: jax.Array, block: int, axis: int, extent: int) -> jax.Array:
    """Returns the scale of each of `extent` elements along an axis, of which `block` share one."""
    if is_explicit(scale):
        shape = list(scale.shape)
        shape[axis] = extent
        each = partial(scale_of_each, block=block, axis=axis, extent=extent)
        return in_auto_axes(each, kept_sharding(scale, shape), scale)
    if isinstance(extent, int):
        return lax.slice_in_dim(jnp.repeat(scale, block, axis), 0, extent, axis=axis)
    # JAX knows a symbolic extent of what is taken, not of a slice; of no scales nothing is taken.
    one_more = [(0, int(i == axis % scale.ndim)) for i in range(scale.ndim)]
    return jnp.take(jnp.pad(scale, one_more), jnp.arange(extent) // block, axis)


def beside_result(scale: jax.Array, letters: str, out: str) -> jax.Array:
    """Returns an operand's scales as they broadcast against the result of its product.

    Args:
      scale: with an axis for each of the operand's, of extent 1 where the result has none.
      letters, out: of the axes of the operand and of the result.
    """
    if scale.size == 1:
        return scale.reshape(())
    scale = lax.squeeze(scale, [i for i, a in enumerate(letters) if a not in out])
    return along(scale, "".join(a for a in letters if a in out), out)


def dequantized(values: Any, scale: Any, contracted: int = 1) -> jax.Array:
    """Returns an operand times its scales, in float32."""
    *lead, rows, k = _matrices(values.shape, scale, contracted)
    each = scale_of_each(scale, block_of(rows, scale.shape[-2]), -2, rows)
    each = scale_of_each(each, PROMOTION_K, -1, k)
    matrices = values.astype(jnp.float32).reshape(*lead, rows, k)
    return (matrices * each).reshape(values.shape)


def _reference(*args: Any, product: Product, jaxpr: ClosedJaxpr | None, **_: Any) -> list[Any]:
    (lhs, rhs, lhs_scale, rhs_scale), operands = args[:4], args[4:]
    whole = product.with_options(precision=(lax.Precision.HIGHEST,) * 2, implementation="xla")
    if jaxpr:
        whole = whole.with_options(preferred_element_type=jnp.dtype("float32"))
    count = len(product.subscripts.contracted)
    pair = dequantized(lhs, lhs_scale, count), dequantized(rhs, rhs_scale, count)
    if product.groups:
        out = hopper_ragged_dot(*pair, operands[0], whole)
    else:
        wide = whole.with_options(preferred_element_type=jnp.dtype("float32"))
        out = reference_dot(*pair, product=wide).astype(whole.options.preferred_element_type)
    return jaxpr_as_fun(jaxpr)(out, *operands) if jaxpr else [out]


def _batch(
    axis_data: Any, operands: Any, axes: Any, *, product: Product, **params: Any
) -> tuple[list[Any], list[int]]:
    """The matrices of all batches follow one another; XLA runs groups, and what has a function."""
    if product.subscripts not in (SCALED, BATCHED) or params["jaxpr"]:
        reference = partial(_reference, product=product, **params)
        results = jax.vmap(reference, axes, axis_size=axis_data.size)(*operands)
        return results, [0] * len(results)
    size = axis_data.size
    mapped = [mapped_first(size, x, axis) for x, axis in zip(operands, axes, strict=True)]
    if product.subscripts == SCALED:
        whole = replace(product, subscripts=BATCHED)
        return hopper_scaled_dot_p.bind(*mapped, product=whole, **params), [0]
    flat = [x.reshape(size * x.shape[1], *x.shape[2:]) for x in mapped]
    (result,) = hopper_scaled_dot_p.bind(*flat, product=product, **params)
    return [result.reshape(size, mapped[0].shape[1], *result.shape[1:])], [0]


def _request_of(
    avals: Any, out_avals: Any, *, product: Product, jaxpr: ClosedJaxpr | None, **_: Any
) -> Request:
    lhs, rhs, *scales = avals[:4]
    count = len(product.subscripts.contracted)
    pairs = zip((lhs, rhs), scales, strict=True)
    blocks: Any = tuple(block_of(_matrices(x.shape, y, count)[-2], y.shape[-2]) for x, y in pairs)
    sizes = avals[4] if product.groups else None
    return Request.of(product, lhs, rhs, out_avals[0], sizes, function=jaxpr, blocks=blocks)


def _lower_for_cuda(ctx: mlir.LoweringRuleContext, *values: Any, **params: Any) -> Any:
    request = _request_of(ctx.avals_in, ctx.avals_out, **params)
    follows = slice(4, None) if params["jaxpr"] else slice(0)
    call = Call(
        request, tuple(values[:2]), tuple(values[follows]), tuple(ctx.avals_in[follows]),
        params["in_place"], sizes=values[4] if request.groups else None, scales=tuple(values[2:4]),
    )  # fmt: skip
    return lower_call(ctx, call)


hopper_scaled_dot_p = define_primitive(
    "hopper_scaled_dot",
    _reference,
    multiple_results=True,
    rules=Rules(jvp="reference", batch=_batch),
    lowering=Lowering(_lower_for_cuda),
    request_of=_request_of,
)
