"""Lowering of products with an epilogue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from jax.interpreters import mlir

from ..fusion.jaxprs import ClosedJaxpr, traced
from ..gemm.product import Product
from ..lowering.call import Call
from ..lowering.emit import lower_call
from ..lowering.register import Lowering, lower_fun_once
from ..lowering.request import Request
from .fused_dot_sharded import emit_fused, route_partitioned
from .group_sizes import sizes_of_each


def request_of(
    avals: Any, out_avals: Any, *, jaxpr: ClosedJaxpr, product: Product, num_b: int, **_: Any
) -> Request:
    lhs, right, groups = *avals[:2], product.groups
    sizes = avals[1 + num_b] if groups else None
    if groups and product.batch:
        own = right.ndim > len(product.subscripts.rhs)
        lhs, right, sizes = traced(partial(_flat, product), lhs, right, sizes).out_avals
        product = replace(product, groups=replace(groups, step=groups.count if own else 0))
    return Request.of(product, lhs, right, out_avals[0], sizes, num_b=num_b, function=jaxpr)


def _flat(product: Product, lhs: Any, *others: Any) -> list[Any]:
    """Returns the operands of the one product that a mapped ragged product is."""
    *right_operands, sizes = others
    batch, rank = product.batch, len(product.subscripts.rhs)
    length, size = lhs.shape[batch], prod(lhs.shape[:batch])
    sizes = sizes_of_each(sizes.reshape(size, sizes.shape[-1]), length, size)
    leading = [x.ndim - rank + 1 for x in right_operands]
    right_operands = [
        x.reshape(prod(x.shape[:n]), *x.shape[n:])
        for x, n in zip(right_operands, leading, strict=True)
    ]
    return [lhs.reshape(size * length, prod(lhs.shape[batch + 1 :])), *right_operands, sizes]


def _call_of(ctx: mlir.LoweringRuleContext, values: Sequence[Any], params: dict[str, Any]) -> Call:
    product, count = params["product"], 1 + params["num_b"]
    return Call(
        request_of(ctx.avals_in, ctx.avals_out, **params), tuple(values[:count]),
        tuple(values[count:]), tuple(ctx.avals_in[count:]), params["in_place"],
        sizes=values[count] if product.groups else None,
    )  # fmt: skip


def _flattened(ctx: mlir.LoweringRuleContext, call: Call, product: Product) -> Call:
    flat, count = partial(_flat, product), len(call.values)
    avals = ctx.avals_in[: count + 1]
    context = ctx.replace(avals_in=avals, avals_out=traced(flat, *avals).out_avals)
    lower = mlir.lower_fun(flat, multiple_results=True)
    *values, sizes = lower(context, *call.values, call.sizes)
    return replace(call, values=tuple(values), sizes=sizes)


def fused_lowering(reference: Callable[..., list[Any]]) -> Lowering:
    """Returns how `hopper_fused_p` is lowered, which stands for `reference`."""
    apart = lower_fun_once(partial(reference, by_xla=False))

    def for_cuda(ctx: mlir.LoweringRuleContext, *values: Any, **params: Any) -> Any:
        call, product = _call_of(ctx, values, params), params["product"]
        if product.batch:
            call = _flattened(ctx, call, product)
        if (launched := lower_call(ctx, call)) or not product.groups:
            return launched
        return apart(ctx, *values, **params)  # XLA's ragged product is not worth a function with it

    def partitioned(ctx: mlir.LoweringRuleContext, *values: Any, **params: Any) -> Any:
        """Emits a product with its function, or else the product and the function behind it."""
        if not params["product"].batch:  # else by its products, which are mapped
            call = _call_of(ctx, values, params).readable(ctx)
            route = route_partitioned(ctx, call)
            if route and (emitted := emit_fused(ctx, call, route)):
                return emitted
        return apart(ctx, *values, **params)

    return Lowering(for_cuda, partitioned)
