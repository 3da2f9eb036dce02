"""The JAX primitive `hopper_scaled_dot`: a product of 8-bit matrices whose blocks have scales.

    "mk,nk->mn" or "bmk,bnk->bmn"; scales (b, rows / 1 or 128, K / 128), rounded up, float32

Its derivative is that of the operands times their scales, in float32: no rounding is undone and
none is added. A kernel multiplies the scales in while it adds up; elsewhere XLA multiplies the
operands first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.interpreters import mlir

from ..fusion.jaxprs import jvp_by
from ..gemm.product import Options, Product
from ..gemm.spec import PROMOTION_K
from ..gemm.subscripts import Subscripts
from ..lowering.call import Call
from ..lowering.emit import lower_call
from ..lowering.register import Lowering, lower_fun_once
from ..lowering.route import Request
from .define import Rules, define_primitive, mapped_first
from .dot import reference_dot

SCALED = Subscripts.parse("mk,nk->mn")
BATCHED = Subscripts.parse("bmk,bnk->bmn")


def hopper_scaled_dot(
    lhs: jax.Array, rhs: jax.Array, lhs_scale: jax.Array, rhs_scale: jax.Array, options: Options
) -> jax.Array:
    """Returns the product; `preferred_element_type` of the options is its dtype."""
    product = Product(BATCHED if lhs.ndim == 3 else SCALED, options)
    return hopper_scaled_dot_p.bind(lhs, rhs, lhs_scale, rhs_scale, product=product)


def block_of(rows: int, scales: int) -> int:
    """Returns how many rows share a scale, of so many scales: 1 or 128."""
    return 1 if scales == rows else PROMOTION_K


def dequantized(values: Any, scale: Any) -> jax.Array:
    """Returns an operand times its scales, in float32."""
    rows, k = values.shape[-2:]
    block = block_of(rows, scale.shape[-2])
    each = jnp.repeat(jnp.repeat(scale, block, -2), PROMOTION_K, -1)
    return values.astype(jnp.float32) * each[..., :rows, :k]


def _reference(lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any, *, product: Product) -> Any:
    """The product as XLA computes it."""
    whole = product.with_options(precision=(lax.Precision.HIGHEST,) * 2)
    return reference_dot(dequantized(lhs, lhs_scale), dequantized(rhs, rhs_scale), product=whole)


def _jvp(primals: Any, tangents: Any, *, product: Product) -> tuple[Any, Any]:
    _, (tangent,) = jvp_by(lambda *x: [_reference(*x, product=product)], primals, tangents)
    return hopper_scaled_dot_p.bind(*primals, product=product), tangent


def _batch(axis_data: Any, operands: Any, axes: Any, *, product: Product) -> tuple[Any, int]:
    """The matrices of all batches follow one another."""
    size = axis_data.size
    mapped = [mapped_first(size, x, axis) for x, axis in zip(operands, axes, strict=True)]
    if product.subscripts == SCALED:
        whole = replace(product, subscripts=BATCHED)
        return hopper_scaled_dot_p.bind(*mapped, product=whole), 0
    flat = [x.reshape(-1, *x.shape[2:]) for x in mapped]
    result = hopper_scaled_dot_p.bind(*flat, product=product)
    return result.reshape(size, -1, *result.shape[1:]), 0


def _request_of(avals: Sequence[Any], out_avals: Sequence[Any], *, product: Product) -> Request:
    (lhs, rhs, *scales), (out,) = avals, out_avals
    pairs = zip((lhs, rhs), scales, strict=True)
    blocks: Any = tuple(block_of(x.shape[-2], scale.shape[-2]) for x, scale in pairs)
    return Request(
        product.subscripts, lhs.shape, lhs.dtype.name, rhs.shape, rhs.dtype.name, out.dtype.name,
        product.options, blocks=blocks,
    )  # fmt: skip


_lower_to_xla = lower_fun_once(_reference)


def _lower_for_cuda(ctx: mlir.LoweringRuleContext, *values: Any, product: Product) -> Any:
    request = _request_of(ctx.avals_in, ctx.avals_out, product=product)
    call = Call(request, tuple(values[:2]), scales=tuple(values[2:]))
    return lower_call(ctx, call) or _lower_to_xla(ctx, *values, product=product)


hopper_scaled_dot_p = define_primitive(
    "hopper_scaled_dot",
    _reference,
    rules=Rules(jvp=_jvp, batch=_batch),
    lowering=Lowering(_lower_for_cuda),
    request_of=_request_of,
)
