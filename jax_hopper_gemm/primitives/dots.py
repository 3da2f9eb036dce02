"""The JAX primitive `hopper_dots`: products of one left operand, in one launch.

`accelerate` makes it of products that it finds, where the cost model expects a gain. Everything
else takes the products one by one: derivatives, other platforms than CUDA, programs that XLA
partitions, and lowering where no kernel runs them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax.interpreters import mlir

from ..fusion.jaxprs import jvp_by, transpose_by
from ..gemm.dtypes import name_of
from ..gemm.product import Product
from ..launch.ffi_target import launcher_violation
from ..lowering.call import Call
from ..lowering.devices import devices_of
from ..lowering.emit import lower_call
from ..lowering.register import Lowering, lower_fun_once
from ..lowering.request import Request
from .define import Rules, define_primitive
from .dot import batched, hopper_dot, reference_dot


def one_by_one(lhs: jax.Array, *rights: jax.Array, product: Product) -> list[jax.Array]:
    """Returns the products of an array with each of the others."""
    return [hopper_dot(lhs, rhs, product) for rhs in rights]


def _by_xla(lhs: jax.Array, *rights: jax.Array, product: Product) -> list[jax.Array]:
    return [reference_dot(lhs, rhs, product=product) for rhs in rights]


def _jvp(primals: Any, tangents: Any, *, product: Product) -> tuple[Any, Any]:
    _, moved = jvp_by(one_by_one, primals, tangents, product=product)
    return hopper_dots_p.bind(*primals, product=product), moved


def _batch(axis_data: Any, operands: Any, axes: Any, *, product: Product) -> tuple[Any, Any]:
    lhs, *rights = operands
    of_lhs, *of_rights = axes
    results, found = [], []
    for rhs, axis in zip(rights, of_rights, strict=True):
        mapped = (of_lhs, axis) != (None, None)
        each = batched(product, axis_data, (of_lhs, axis)) if mapped else product
        results.append(hopper_dot(lhs, rhs, each))
        found.append(0 if mapped else None)
    return results, found


def request_of_dots(avals: Sequence[Any], out_avals: Sequence[Any], *, product: Product) -> Request:
    """Returns what products of one left operand ask for, together."""
    lhs, *rights = avals
    subscripts, shape = product.subscripts, list(rights[0].shape)
    axis = subscripts.rhs.index(subscripts.columns[0])
    panels = tuple(x.shape[axis] for x in rights)
    shape[axis] = sum(panels)
    return Request(
        subscripts, lhs.shape, name_of(lhs.dtype), tuple(shape), name_of(rights[0].dtype),
        name_of(out_avals[0].dtype), product.options, panels=panels if len(panels) > 1 else (),
    )  # fmt: skip


_lower_one_by_one = lower_fun_once(one_by_one)


def _lower_for_cuda(ctx: mlir.LoweringRuleContext, *values: Any, product: Product) -> Any:
    if devices_of(ctx) == 1 and not launcher_violation():
        call = Call(request_of_dots(ctx.avals_in, ctx.avals_out, product=product), values)
        _, decision = call.decided(ctx)
        if decision.route.path == "hopper":
            return lower_call(ctx, call)
    return _lower_one_by_one(ctx, *values, product=product)


hopper_dots_p = define_primitive(
    "hopper_dots",
    _by_xla,
    multiple_results=True,
    rules=Rules(
        jvp=_jvp, transpose=partial(transpose_by, one_by_one), batch=_batch,
        dce=lambda used, equation: ([True, *used], equation.params),
    ),
    lowering=Lowering(_lower_for_cuda),
    request_of=request_of_dots,
)  # fmt: skip
