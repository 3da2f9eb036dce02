"""The JAX primitives `hopper_fused`, a product with an epilogue, and `hopper_gate_up`.

`hopper_fused` carries the function as a jaxpr. Elsewhere than on a Hopper GPU it is what it says:
the function of the product. Its derivative is again made of products and functions of arrays:
`hopper_dot` for the product's tangent and `epilogue_tangent` for the function's, whose transpose
finds its way into the product that comes before it (see `fused_grad`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import ad

from .. import sharding
from ..fusion.jaxprs import (
    ClosedJaxpr,
    abstract,
    as_differentiated,
    is_inexact,
    jvp_by,
    mapped,
    pruned,
    traced,
    transpose_by,
    varying_together,
)
from ..fusion.memo import memoised
from ..fusion.residuals import Tangent, tangent
from ..gemm.dtypes import residual_of
from ..gemm.groups import DGRAD, is_varlen_k
from ..gemm.product import Product
from .accumulators import accumulators_of, batched_product, multiply
from .auto_axes import stated_sharding
from .define import Rule, Rules, accumulator_dtype, define_primitive
from .dot import as_cotangent, entering
from .fused_dot_sharded import NAME, RAGGED, fused_of_shards
from .fused_grad import Recompute, epilogue_tangent_p
from .fused_lowering import fused_lowering, request_of
from .segments import segment_broadcast_p, segment_mask, segment_mask_p


def _split(args: Sequence[Any], num_b: int) -> tuple[Any, Sequence[Any], Sequence[Any]]:
    return args[0], args[1 : 1 + num_b], args[1 + num_b :]


def reference_fused(
    *args: Any, jaxpr: ClosedJaxpr, product: Product, num_b: int, by_xla: bool = True, **_: Any
) -> list[Any]:
    """The results as XLA computes them; if not `by_xla`, but for the products.

    Args:
      *args: the left operand, the right ones, the function's operands; of these, sizes come
        first where the product is a ragged one.
      jaxpr: the function, of the accumulators and its operands.
      others: as in `fused_dot`; only kernels heed `in_place`.
    """
    lhs, right_operands, operands = _split(args, num_b)
    sizes = operands[: product.num_sizes_operands]
    accumulators = accumulators_of(product, lhs, right_operands, *sizes, by_xla=by_xla)
    return jaxpr_as_fun(jaxpr)(*accumulators, *operands)


# Derivatives.


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    jaxpr, product, num_b = params["jaxpr"], params["product"], params["num_b"]
    lhs, right_operands, operands = _split(primals, num_b)
    dtype, moving_dtype = _tangent_dtypes(product, (lhs, *right_operands))
    moving = product.with_options(preferred_element_type=moving_dtype, save_preactivation=True)
    moved, plane_axis = {}, None
    if is_inexact(jaxpr.in_avals[0]):  # else a sum of rounded products, without a tangent
        moved, plane_axis = _product_tangents(primals, tangents, num_b, moving)
    count = len(jaxpr.in_avals) - len(operands)
    of_operands = {i: x for i, x in enumerate(tangents[1 + num_b :]) if type(x) is not ad.Zero}
    wrt = list(range(count)) if plane_axis is not None else list(moved)
    wrt += [count + i for i in of_operands]

    recomputed = not product.options.save_preactivation
    derivative = tangent(jaxpr, wrt, count, dtype, recomputed, moving_dtype)
    params |= {"jaxpr": as_differentiated(jaxpr, wrt)}
    needed = [x for x, need in zip(operands, derivative.operands, strict=True) if need]
    recompute = None
    if not derivative.accumulators:
        outputs, residuals = hopper_fused_p.bind(*primals, **params), needed
    elif recomputed:
        again = product.with_options(
            preferred_element_type=derivative.residuals.out_avals[0].dtype, save_preactivation=True
        )
        used = tuple(i in derivative.accumulators for i in range(count))
        recompute = Recompute(again, num_b, used)
        outputs = hopper_fused_p.bind(*primals, **params)
        residuals = [*primals[: recompute.num_operands], *needed]
    else:
        outputs, kept = _with_residuals(primals, derivative, params)
        residuals = [*kept, *needed]
    found: list[Any] = []
    if any(derivative.moving):
        found = epilogue_tangent_p.bind(
            *residuals, *moved.values(), *of_operands.values(), jaxpr=derivative.jaxpr,
            residuals=len(residuals), plane_axis=plane_axis, recompute=recompute,
            products=len(moved),
        )  # fmt: skip
    tangents_out = iter(found)
    return outputs, [
        next(tangents_out) if moves else ad.Zero(jax.typeof(x).to_tangent_aval())
        for x, moves in zip(outputs, derivative.moving, strict=True)
    ]


def _tangent_dtypes(product: Product, factors: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the dtypes of residuals that are rounded, and of tangents of accumulators."""
    dtypes, dtype = {x.dtype for x in factors}, product.options.preferred_element_type
    if len(dtypes) == 1 and is_inexact(factors[0]):
        dtype = jnp.dtype(residual_of(dtypes.pop().name))
    moving = product.options.cotangent_dtype or dtype
    # A product's dtype is no narrower than its operands.
    return dtype, dtype if any(moving.itemsize < x.dtype.itemsize for x in factors) else moving


def _product_tangents(
    primals: Any, tangents: Any, num_b: int, product: Product
) -> tuple[dict[int, Any], int | None]:
    """Returns the tangents of the accumulators that move, by number, in the operands' dtype.

    Where the right operand stacks gate and up, so does the one tangent: along the axis that is
    returned, else None.
    """
    lhs, right_operands, operands = _split(primals, num_b)
    lhs_tangent, right_tangents, _ = _split(tangents, num_b)
    sizes = operands[: product.num_sizes_operands]
    moved: dict[int, Any] = {}
    if type(lhs_tangent) is not ad.Zero and num_b == 2:
        both = hopper_gate_up_p.bind(lhs_tangent, *right_operands, *sizes, product=product)
        moved |= enumerate(both)
    elif type(lhs_tangent) is not ad.Zero:
        moved[0] = multiply(product, lhs_tangent, right_operands[0], *sizes)
    for i, right_tangent in enumerate(right_tangents):
        if type(right_tangent) is not ad.Zero:
            term = multiply(product, lhs, right_tangent, *sizes)
            moved[i] = lax.add(moved[i], term) if i in moved else term
    return moved, product.gate_up_axis() if moved else None


def _with_residuals(
    primals: Any, derivative: Tangent, params: dict[str, Any]
) -> tuple[list[Any], list[Any]]:
    """Returns the outputs, and residuals as further matrices of the same kernel.

    An output that is an accumulator already serves as that.
    """
    jaxpr, avals = params["jaxpr"], derivative.residuals.out_avals
    places = [
        None if i is None else _place(jaxpr, i, aval.dtype)
        for i, aval in zip(derivative.accumulators, avals, strict=True)
    ]
    added = [place is None for place in places]
    extended = {**params, "jaxpr": _with_outputs(jaxpr, derivative.residuals, added)}
    outputs = hopper_fused_p.bind(*primals, **(extended if any(added) else params))
    further = iter(outputs[len(jaxpr.out_avals) :])
    kept = [next(further) if place is None else outputs[place] for place in places]
    return outputs[: len(jaxpr.out_avals)], kept


@memoised
def _with_outputs(jaxpr: ClosedJaxpr, residuals: ClosedJaxpr, added: Sequence[bool]) -> ClosedJaxpr:
    """Returns a function with some of another one's outputs as its last."""

    def function(*args: Any) -> list[Any]:
        further = zip(jaxpr_as_fun(residuals)(*args), added, strict=True)
        return [*jaxpr_as_fun(jaxpr)(*args), *(x for x, add in further if add)]

    return traced(function, *jaxpr.in_avals)


def _place(jaxpr: ClosedJaxpr, index: int, dtype: Any) -> int | None:
    """Returns which output is an input, converted to `dtype`; None where none is."""
    source = jaxpr.jaxpr.invars[index]
    same = {source} if source.aval.dtype == dtype else set()
    for equation in jaxpr.jaxpr.eqns:
        converts = equation.primitive is lax.convert_element_type_p and equation.invars[0] is source
        masks = equation.primitive is segment_mask_p and any(equation.invars[0] is x for x in same)
        if masks or (converts and equation.outvars[0].aval.dtype == dtype):
            same.update(equation.outvars)
    outputs = enumerate(jaxpr.jaxpr.outvars)
    return next((i for i, x in outputs if any(x is y for y in same)), None)


# vmap, unused results.


def _batch(axis_data: Any, args: Any, axes: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    num_b, num_sizes = params["num_b"], params["product"].num_sizes_operands
    count = 1 + num_b + num_sizes
    arrays, product, product_axis = batched_product(
        axis_data, args[:count], axes[:count], params["product"]
    )
    lhs, right_operands, operands = _split((*arrays, *args[count:]), num_b)
    operands, axes = list(operands), [product_axis] * num_sizes + list(axes[count:])
    if num_sizes and product_axis is not None:
        _as_rows_lie(axis_data.size, arrays, operands, axes, params)
    accumulators = abstract(
        partial(accumulators_of, product, by_xla=True), lhs, right_operands, *operands[:num_sizes]
    )
    axes = [product_axis] * len(accumulators) + axes
    function = mapped(params["jaxpr"], axes, axis_data, [*accumulators, *operands])
    outputs = hopper_fused_p.bind(
        lhs, *right_operands, *operands, jaxpr=function, product=product, num_b=num_b,
        in_place=params["in_place"],
    )  # fmt: skip
    return outputs, [0] * len(outputs)


def _as_rows_lie(
    size: int, arrays: Sequence[Any], operands: list[Any], axes: list[Any], params: dict[str, Any]
) -> None:
    """Maps what a kernel for a mapped ragged product could not read as it is: changes the lists.

    To it the rows of all matrices are one long axis, so what varies along rows varies along all of
    it. Where each matrix has groups of its own, so have operands by group, and all arrays that
    follow a contraction.
    """
    lhs, right, jaxpr = arrays[0], arrays[1], params["jaxpr"].jaxpr
    inputs = jaxpr.invars[len(jaxpr.invars) - len(operands) :]
    by_group = [e.invars[0] for e in jaxpr.eqns if e.primitive is segment_broadcast_p]
    subscripts = params["product"].subscripts
    contraction = is_varlen_k(subscripts)
    own_groups = right.ndim > len(subscripts.rhs)
    for i, (x, axis) in enumerate(zip(operands, axes, strict=True)):
        along_rows = jnp.ndim(x) > 1 and x.shape[-2] == lhs.shape[-2]
        each = own_groups and any(inputs[i] is variable for variable in by_group)
        if axis is None and (jnp.ndim(x) if contraction else along_rows or each):
            operands[i], axes[i] = jnp.broadcast_to(x, (size, *x.shape)), 0


def _without_unused(used: list[bool], equation: Any) -> tuple[list[bool], dict[str, Any]]:
    params, count = dict(equation.params), 1 + equation.params["num_b"]
    operands, sizes = len(equation.invars) - count, params["product"].num_sizes_operands
    accumulators = len(params["jaxpr"].in_avals) - operands
    kept = [True] * (accumulators + sizes) + [False] * (operands - sizes)
    params["jaxpr"], needed = pruned(params["jaxpr"], used, kept)
    needed = needed[accumulators:]
    params["in_place"] = tuple(
        None if x is None or not needed[x] else sum(needed[:x])
        for x, stays in zip(params["in_place"], used, strict=False)
        if stays
    )
    return [True] * count + needed, params


def _apart(params: dict[str, Any]) -> Rule | None:
    return partial(reference_fused, by_xla=False, **params) if params["product"].groups else None


hopper_fused_p = define_primitive(
    NAME,
    reference_fused,
    multiple_results=True,
    rules=Rules(jvp=_jvp, transpose="reference", batch=_batch, dce=_without_unused),
    lowering=fused_lowering(reference_fused),
    request_of=request_of,
    apart=_apart,
)
sharding.register(NAME, partial(fused_of_shards, hopper_fused_p.bind))
sharding.register(RAGGED, partial(fused_of_shards, hopper_fused_p.bind))


# The products of one array with gate and with up. Its transpose is their sum, which the second
# product adds to the first one's result where that lies.


def _gate_up(lhs: Any, *others: Any, product: Product) -> list[Any]:
    count = len(others) - product.num_sizes_operands
    return accumulators_of(product, lhs, others[:count], *others[count:])


def _transpose_gate_up(cotangents: Any, lhs: Any, *others: Any, product: Product) -> list[Any]:
    if not ad.is_undefined_primal(lhs):
        return transpose_by(_gate_up, cotangents, lhs, *others, product=product)
    right_operands, sizes = others[: len(cotangents)], others[len(cotangents) :]
    pairs = zip(cotangents, right_operands, strict=True)
    terms = [(ct, right) for ct, right in pairs if type(ct) is not ad.Zero]
    if not terms:
        return [ad.Zero(lhs.aval), *(None for _ in others)]
    entered = [entering(lhs.aval, *term, product.options, 1) for term in terms]
    product = replace(product, options=entered[0][1])
    terms = [(ct, right) for (ct, _), (_, right) in zip(entered, terms, strict=True)]
    (cotangent, right), *more = terms
    if product.groups:
        gradient = replace(product, subscripts=DGRAD[product.subscripts])
    else:
        subscripts = product.subscripts.transpose_lhs()
        gradient = replace(product, subscripts=subscripts, out_sharding=stated_sharding(lhs.aval))
    total = as_cotangent(lhs.aval, multiply(gradient, cotangent, right, *sizes))
    for cotangent, right in more:
        total = _added(total, gradient, cotangent, right, *sizes)
    return [total, *(None for _ in others)]


def _added(x: Any, product: Product, lhs: Any, right: Any, *sizes: Any) -> Any:
    """Returns a matrix plus a product, where the matrix lies."""
    product = product.with_options(preferred_element_type=accumulator_dtype(x.dtype))
    lhs, right, *counts = varying_together(lhs, right, *sizes)

    def function(y: Any, *operands: Any) -> list[Any]:
        total = (y + operands[-1].astype(y.dtype)).astype(x.dtype)
        return [segment_mask(total, operands[0], product.groups) if product.groups else total]

    like = abstract(partial(multiply, product, by_xla=True), lhs, right, *counts)
    (total,) = hopper_fused_p.bind(
        lhs, right, *counts, x, jaxpr=traced(function, like, *counts, x), product=product,
        num_b=1, in_place=(len(counts),),
    )  # fmt: skip
    return total


def _batch_gate_up(
    axis_data: Any, args: Any, axes: Any, *, product: Product
) -> tuple[list[Any], list[Any]]:
    args, product, axis = batched_product(axis_data, args, axes, product)
    outputs = hopper_gate_up_p.bind(*args, product=product)
    return outputs, [axis] * len(outputs)


hopper_gate_up_p = define_primitive(
    "hopper_gate_up",
    _gate_up,
    multiple_results=True,
    rules=Rules(jvp=partial(jvp_by, _gate_up), transpose=_transpose_gate_up, batch=_batch_gate_up),
)
