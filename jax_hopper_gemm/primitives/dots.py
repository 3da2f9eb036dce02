"""The JAX primitive `hopper_dots`: products of one left operand, in one launch.

All may have an epilogue, which then is a function of the product and of operands of its own.
`accelerate` makes it of products that it finds, where the cost model expects a gain. Everything
else takes the products one by one: derivatives, other platforms than CUDA, programs that XLA
partitions, and lowering where no kernel runs them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.interpreters import batching, mlir

from ..fusion.jaxprs import ClosedJaxpr, jvp_by, pruned, transpose_by
from ..gemm.product import Product
from ..lowering.call import Call
from ..lowering.emit import launched
from ..lowering.register import Lowering, lower_fun_once
from ..lowering.request import Request, own_in_place, slices_of
from .define import Rules, define_primitive
from .dot import batched, hopper_dot, reference_dot
from .fused_primitive import hopper_fused_p, reference_fused


def one_by_one(*args: jax.Array, **params: Any) -> list[jax.Array]:
    """Returns the results of each product, in order.

    Args:
      *args: the left operand, the right ones, operands of all epilogues.
      functions: the epilogues, or ().
      in_place: of each result the operand whose memory it may take, as `Call` has it, or ().
    """
    return _each(hopper_dot, hopper_fused_p.bind, *args, **params)


def _each(
    bare: Callable[..., Any],
    fused: Callable[..., Any],
    *args: Any,
    product: Product,
    functions: Sequence[ClosedJaxpr],
    in_place: Sequence[int | None],
) -> list[Any]:
    lhs, *others = args
    if not functions:
        return [bare(lhs, rhs, product=product) for rhs in others]
    count, results = len(functions), list[Any]()
    for rhs, function, (reads, makes) in zip(
        others[:count], functions, slices_of(functions), strict=True
    ):
        taken = own_in_place(in_place, reads, makes)
        results += fused(
            lhs, rhs, *others[count:][reads], jaxpr=function, product=product, num_b=1,
            in_place=taken if any(x is not None for x in taken) else (),
        )  # fmt: skip
    return results


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    results, moved = jvp_by(one_by_one, primals, tangents, **params)
    return results if params["functions"] else hopper_dots_p.bind(*primals, **params), moved


def _batch(axis_data: Any, operands: Any, axes: Any, **params: Any) -> tuple[Any, Any]:
    def bare(lhs: Any, rhs: Any, product: Product) -> tuple[Any, Any]:
        of_both = lhs[1], rhs[1]
        if of_both == (None, None):
            return hopper_dot(lhs[0], rhs[0], product), None
        return hopper_dot(lhs[0], rhs[0], batched(product, axis_data, of_both)), 0

    def fused(*args: Any, **params: Any) -> list[tuple[Any, Any]]:
        batch = batching.fancy_primitive_batchers[hopper_fused_p]
        return list(zip(*batch(axis_data, *zip(*args, strict=True), **params), strict=True))

    found = _each(bare, fused, *zip(operands, axes, strict=True), **params)
    results, mapped = zip(*found, strict=True)
    return list(results), list(mapped)


def request_of_dots(
    avals: Any, out_avals: Any, *, product: Product, functions: Sequence[ClosedJaxpr], **_: Any
) -> Request:
    lhs, *rights = avals
    rights = rights[: len(functions)] if functions else rights
    shape, axis = [*rights[0].shape], product.subscripts.rhs.index(product.subscripts.columns[0])
    panels = tuple(x.shape[axis] for x in rights)
    shape[axis] = sum(panels)
    request = Request.of(product, lhs, rights[0].update(shape=tuple(shape)), out_avals[0])
    if len(panels) == 1:
        return replace(request, function=next(iter(functions), None))
    return replace(request, panels=panels, functions=tuple(functions))


def _without_unused(used: list[bool], equation: Any) -> tuple[list[bool], dict[str, Any]]:
    """Leaves out products of which no result is used."""
    params, kept = dict(equation.params), list[bool]()
    if not params["functions"]:
        return [True, *used], params
    functions, rights = [], []
    for function, (reads, makes) in zip(
        params["functions"], slices_of(params["functions"]), strict=True
    ):
        needed = [False] * (reads.stop - reads.start)
        if stays := any(used[makes]):
            function, (_, *needed) = pruned(function, used[makes], [True, *needed])
            functions.append(function)
        rights.append(stays)
        kept += needed
    numbers = {x: number for number, x in enumerate(i for i, stays in enumerate(kept) if stays)}
    places = zip(params["in_place"], used, strict=False)
    params["in_place"] = tuple(numbers.get(x) for x, stays in places if stays)
    params["functions"] = tuple(functions)
    return [True, *rights, *kept], params


_lower_one_by_one = lower_fun_once(one_by_one)


def _lower_for_cuda(ctx: mlir.LoweringRuleContext, *values: Any, **params: Any) -> Any:
    request = request_of_dots(ctx.avals_in, ctx.avals_out, **params)
    count = 1 + len(request.rhs_shapes)
    call = Call(
        request, values[:count], values[count:], tuple(ctx.avals_in[count:]), params["in_place"]
    )
    together, _ = launched(ctx, call)
    return together or _lower_one_by_one(ctx, *values, **params)


hopper_dots_p = define_primitive(
    "hopper_dots",
    partial(_each, reference_dot, reference_fused),
    multiple_results=True,
    rules=Rules(
        jvp=_jvp, transpose=partial(transpose_by, one_by_one), batch=_batch,
        dce=_without_unused,
    ),
    lowering=Lowering(_lower_for_cuda),
    request_of=request_of_dots,
)  # fmt: skip
