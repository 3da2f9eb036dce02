"""Products with an epilogue: a JAX function of the product, computed by the kernel that makes it.

`hopper_fused` carries the function as a jaxpr. Elsewhere than on a Hopper GPU it is what it says:
the function of the product. Its derivative is again made of products and functions of arrays:
`hopper_dot` for the product's tangent and `epilogue_tangent` for the function's, whose transpose
finds its way into the product that comes before it (see `fused_tangent`).

The product may be a ragged one: then an array of sizes, which cuts the rows into spans, is the
first operand of the function, too. What of it varies by groups, or is 0 in rows of no group, stands
in the function as operations of `group_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, Literal

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.core import eval_jaxpr
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, xla
from jax.interpreters import partial_eval as pe

from .. import sharding
from ..fusion.jaxprs import (
    ClosedJaxpr,
    abstract,
    alike_in_shard_map,
    is_inexact,
    jvp_by,
    mapped,
    pruned,
    tangent,
    traced,
    transpose_by,
)
from ..fusion.memo import memoised
from ..gemm.groups import ROWS, ROWS_TRANSPOSED, Spans, is_contraction
from ..gemm.subscripts import split
from ..lowering.call import Call
from ..lowering.register import register_lowering
from ..lowering.route import Product
from ..lowering.traced import lower_fun_once
from .accumulators import Accumulate
from .dot import as_cotangent, cotangent_of
from .fused_dot_sharded import emit_fused, fused_of_shards, route_partitioned
from .fused_grad import Recompute, batched_product, epilogue_tangent_p
from .fused_ragged_sharded import NAME as RAGGED
from .fused_ragged_sharded import fused_of_ragged_shards
from .group_sizes import sizes_of_each
from .segments import segment_broadcast, segment_broadcast_p, segment_mask, segment_mask_p

hopper_fused_p = Primitive("hopper_fused")
hopper_dots_p = Primitive("hopper_dots")
for primitive in (hopper_fused_p, hopper_dots_p):
    primitive.multiple_results = True
    primitive.def_impl(partial(xla.apply_primitive, primitive))


def fused_dot(
    function: Callable[..., Any],
    lhs: jax.Array,
    rights: Sequence[jax.Array],
    operands: Sequence[Any],
    *,
    subscripts: str,
    precision: Any,
    product_dtype: Any,
    out_dtypes: Sequence[Any] | None,
    preactivation: Literal["save", "recompute"],
    implementation: str | None,
    in_place: int | None = None,
    out_sharding: Any = None,
    sizes: jax.Array | None = None,
    spans: Spans | None = None,
    max_sms: int | None = None,
) -> Any:
    """Returns `function(product, *operands)`, or `function(gate, up, *operands)`.

    The function sees products as float32 arrays of the result's axes; of types that float32
    cannot hold they keep their own. Arrays that it closes over are operands, too.

    With `spans` the product is a ragged one. Of a contraction the function sees the matrices of
    all W groups, (W, K, N), that of an empty one as 0, and its operands as they are. Of T rows in
    groups an operand of rank 3, (W, 1, N) or (W, 1, 1), has an entry for each group: the function
    sees (T, N) or (T, 1), each row's own. Rows of no group are 0 in the product, in such operands,
    and in results of the product's shape, whatever the function makes of them. The gradient by such
    an operand is summed in float32 over the rows of each group, of cotangents as wide as those of
    the product.

    Args:
      lhs: the left operand.
      rights: the right operand; or gate and up, of one shape; or one array that stacks them, along
        an axis of extent 2 whose letter stands nowhere else in `subscripts`.
      operands: arrays.
      subscripts: as in `contraction.as_gemm`; of a ragged product as in `Accumulate`.
      precision: parameter of `lax.dot_general_p`, already canonical.
      product_dtype: dtype of the product without a function. A result with the product's shape
        that the function leaves as it came is cast to it.
      out_dtypes: for each result the dtype it is cast to, or None; None: no such wishes.
      preactivation: whether derivatives that need the product keep it, rounded to the dtype of
        its operands, or compute it anew.
      implementation: None, "hopper" or "xla".
      in_place: the operand whose memory the first result may take, if both are alike.
      out_sharding: as in `hopper_dot`, for the product.
      sizes, spans: of a ragged product, as in `ragged.hopper_ragged_dot`.
      max_sms: as in `hopper_dot`.

    Raises:
      ValueError: `out_dtypes` has another length than the results.
    """
    operands = tuple(map(jnp.asarray, operands))
    dtype = accumulator_dtype(product_dtype)
    accumulate = Accumulate(
        subscripts, dtype, precision, out_sharding, implementation, spans, max_sms=max_sms
    )
    of_rows = spans is not None and not is_contraction(subscripts)
    if spans:
        assert sizes is not None
        lhs, *rights, sizes = alike_in_shard_map(lhs, *rights, sizes)
        by_group = tuple(of_rows and x.ndim == 3 for x in operands)
        function = partial(_by_rows, function, by_group, spans, lhs.dtype)
        pairs = zip(operands, by_group, strict=True)
        operands = (sizes, *(lax.squeeze(x, (1,)) if each else x for x, each in pairs))
        in_place = None if in_place is None else in_place + 1
    else:
        lhs, *rights = alike_in_shard_map(lhs, *rights)
    accumulators = abstract(
        partial(accumulate, by_xla=True), lhs, rights, *operands[: accumulate.sizes]
    )
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*accumulators, *operands)
    results, structure = jax.tree.flatten(shapes)
    if out_dtypes is not None and len(out_dtypes) != len(results):
        raise ValueError(
            f"preferred_element_type names {len(out_dtypes)} dtypes, and the epilogue returns "
            f"{len(results)} arrays: name one for each, None for its own"
        )
    product = accumulators[0]
    dtypes = []
    for result, wanted in zip(results, out_dtypes or [None] * len(results), strict=True):
        left = result.shape == product.shape and result.dtype == product.dtype
        dtypes.append(wanted or (product_dtype if left else result.dtype))
    count = len(accumulators) + len(operands)

    def complete(*args: Any) -> list[Any]:
        outputs = eval_jaxpr(closed.jaxpr, args[count:], *args[:count])
        found = [x.astype(to) for x, to in zip(outputs, dtypes, strict=True)]
        if spans is None or not of_rows:
            return found
        products, rows = args[: len(accumulators)], args[len(accumulators)]
        return [
            segment_mask(x, rows, spans)
            if x.shape == product.shape and not any(output is y for y in products)
            else x
            for x, output in zip(found, outputs, strict=True)
        ]

    params = {
        "jaxpr": traced(complete, *accumulators, *operands, *closed.consts),
        "rights": len(rights),
        "accumulate": accumulate,
        "preactivation": preactivation,
        "in_place": in_place,
    }
    args = (lhs, *rights, *operands, *closed.consts)
    if implementation == "xla":
        return jax.tree.unflatten(structure, _reference(*args, **params))
    return jax.tree.unflatten(structure, hopper_fused_p.bind(*args, **params))


def _by_rows(
    function: Callable[..., Any], by_group: tuple[bool, ...], spans: Spans, dtype: Any, *args: Any
) -> Any:
    """Returns `function` of products and operands, those `by_group` taken to the rows.

    Args:
      dtype: in which gradients by these are summed.
      *args: products, sizes, operands.
    """
    count = len(args) - 1 - len(by_group)
    products, sizes, operands = args[:count], args[count], args[count + 1 :]
    length = products[0].shape[0]
    operands = [
        segment_broadcast(x, sizes, spans, length, dtype) if each else x
        for x, each in zip(operands, by_group, strict=True)
    ]
    return function(*products, *operands)


def accumulator_dtype(product_dtype: Any) -> np.dtype:
    """Returns the dtype in which an epilogue sees a product of this dtype."""
    dtype = jnp.dtype(product_dtype)
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 4
    return jnp.dtype("float32") if narrow else dtype


def _split(args: Sequence[Any], rights: int) -> tuple[Any, Sequence[Any], Sequence[Any]]:
    """Returns the left operand, the right ones and the function's operands."""
    return args[0], args[1 : 1 + rights], args[1 + rights :]


def _reference(
    *args: Any,
    jaxpr: ClosedJaxpr,
    rights: int,
    accumulate: Accumulate,
    by_xla: bool = True,
    **params: Any,
) -> list[Any]:
    """The results as XLA computes them; if not `by_xla`, but for the products.

    Args:
      *args: the left operand, the right ones, the function's operands; of these, sizes come
        first where the product is a ragged one.
      jaxpr: the function, of the accumulators and its operands.
      rights: number of right operands.
      accumulate: how the accumulators come from them.
      **params: `preactivation` and `in_place` as in `fused_dot`, which only derivatives and
        kernels heed.
    """
    lhs, right_operands, operands = _split(args, rights)
    sizes = operands[: accumulate.sizes]
    accumulators = accumulate(lhs, right_operands, *sizes, by_xla=by_xla)
    return jaxpr_as_fun(jaxpr)(*accumulators, *operands)


def _abstract_eval(*avals: Any, jaxpr: ClosedJaxpr, **params: Any) -> list[Any]:
    return list(_avals_of(jaxpr, avals, tuple(params.items())))


@memoised
def _avals_of(jaxpr: ClosedJaxpr, avals: Any, params: Any) -> Any:
    return traced(partial(_reference, jaxpr=jaxpr, **dict(params)), *avals).out_avals


def product_of(avals: Sequence[Any], params: dict[str, Any]) -> Product:
    """Returns what a `hopper_fused_p` of these abstract values asks for."""
    lhs, right_avals, operands = _split(avals, params["rights"])
    right = right_avals[0]
    accumulate, function = params["accumulate"], params["jaxpr"]
    spans = accumulate.spans
    product = Product(
        accumulate.subscripts, lhs.shape, lhs.dtype.name, right.shape, right.dtype.name,
        function.out_avals[0].dtype.name, accumulate.precision, params["rights"], function, spans,
        max_sms=accumulate.max_sms,
    )  # fmt: skip
    if spans is None:
        return product
    if accumulate.batch:
        own = right.ndim > len(split(accumulate.subscripts)[1])
        spans = replace(spans, step=spans.count if own else 0)
        lhs, right, sizes = traced(partial(_flat, accumulate), lhs, right, operands[0]).out_avals
    else:
        sizes = operands[0]
    return replace(
        product, lhs_shape=lhs.shape, rhs_shape=right.shape, spans=spans,
        sizes=sizes.shape[0], sizes_operand=0,
    )  # fmt: skip


# Derivatives.


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    jaxpr, rights = params["jaxpr"], params["rights"]
    lhs, right_operands, operands = _split(primals, rights)
    still = [type(x) is ad.Zero for x in tangents]
    dtypes = {x.dtype for x in (lhs, *right_operands)}
    accumulate = params["accumulate"]
    dtype = dtypes.pop() if len(dtypes) == 1 and is_inexact(lhs) else accumulate.dtype
    accumulate = replace(accumulate, dtype=dtype)
    moved, plane_axis = _product_tangents(primals, tangents, rights, accumulate)
    count = len(jaxpr.in_avals) - len(operands)
    wrt = list(range(count)) if plane_axis is not None else list(moved)
    wrt += [count + i for i, x in enumerate(still[1 + rights :]) if not x]
    linear = [*moved.values(), *(x for x in tangents[1 + rights :] if type(x) is not ad.Zero)]

    saved = [dtype] * count + [x.dtype for x in operands]
    derivative, needed = tangent(jaxpr, wrt, saved)
    needed_operands = [x for x, need in zip(operands, needed[count:], strict=True) if need]
    recompute = None
    if not any(needed[:count]):
        outputs, residuals = hopper_fused_p.bind(*primals, **params), needed_operands
    elif params["preactivation"] == "recompute":
        recompute = Recompute(accumulate, rights, tuple(needed[:count]))
        outputs = hopper_fused_p.bind(*primals, **params)
        residuals = [lhs, *right_operands, *operands[: accumulate.sizes], *needed_operands]
    else:
        accumulators = [i for i in range(count) if needed[i]]
        outputs, kept = _with_accumulators(primals, accumulators, dtype, params)
        residuals = [*kept, *needed_operands]
    tangents_out = iter(
        epilogue_tangent_p.bind(
            *residuals, *linear, jaxpr=derivative, residuals=len(residuals),
            plane_axis=plane_axis, recompute=recompute, products=len(moved),
        )
    )  # fmt: skip
    return outputs, [
        next(tangents_out) if is_inexact(x) else ad.Zero(jax.typeof(x).to_tangent_aval())
        for x in outputs
    ]


def _product_tangents(
    primals: Any, tangents: Any, rights: int, accumulate: Accumulate
) -> tuple[dict[int, Any], int | None]:
    """Returns the tangents of the accumulators that move, by number, in the operands' dtype.

    Where the right operand stacks gate and up, so does the one tangent: along the axis that is
    returned, else None.
    """
    lhs, right_operands, operands = _split(primals, rights)
    lhs_tangent, right_tangents, _ = _split(tangents, rights)
    sizes = operands[: accumulate.sizes]
    found: dict[int, Any] = {}
    if type(lhs_tangent) is not ad.Zero:
        if rights == 2:
            found |= enumerate(
                hopper_dots_p.bind(lhs_tangent, *right_operands, *sizes, accumulate=accumulate)
            )
        else:
            found[0] = accumulate.together(lhs_tangent, right_operands[0], *sizes)
    for i, right_tangent in enumerate(right_tangents):
        if type(right_tangent) is not ad.Zero:
            product = accumulate.together(lhs, right_tangent, *sizes)
            found[i] = lax.add(found[i], product) if i in found else product
    return found, accumulate.plane_axis() if found else None


def _with_accumulators(
    primals: Any, accumulators: list[int], dtype: Any, params: dict[str, Any]
) -> tuple[list[Any], list[Any]]:
    """Returns the outputs, and accumulators as further matrices of the same kernel.

    An output that is an accumulator already serves as that.
    """
    jaxpr = params["jaxpr"]
    count = len(jaxpr.out_avals)
    places = {i: place for i in accumulators if (place := _place(jaxpr, i, dtype)) is not None}
    added = [i for i in accumulators if i not in places]
    extended = {**params, "jaxpr": _with_inputs(jaxpr, added, dtype)} if added else params
    outputs = hopper_fused_p.bind(*primals, **extended)
    places |= {i: count + j for j, i in enumerate(added)}
    return outputs[:count], [outputs[places[i]] for i in accumulators]


@memoised
def _with_inputs(jaxpr: ClosedJaxpr, added: Sequence[int], dtype: Any) -> ClosedJaxpr:
    """Returns the function with these inputs, converted to `dtype`, as its last outputs."""

    def function(*args: Any) -> list[Any]:
        return [*jaxpr_as_fun(jaxpr)(*args), *(args[i].astype(dtype) for i in added)]

    return traced(function, *jaxpr.in_avals)


def _place(jaxpr: ClosedJaxpr, index: int, dtype: Any) -> int | None:
    """Returns which output is an input, converted to `dtype`; None where none is."""
    source = jaxpr.jaxpr.invars[index]
    same = {source} if source.aval.dtype == dtype else set()
    for equation in jaxpr.jaxpr.eqns:
        (x, *_), (out, *_) = equation.invars, equation.outvars
        convert = equation.primitive is lax.convert_element_type_p and x is source
        masked = equation.primitive is segment_mask_p and any(x is y for y in same)
        if (convert and out.aval.dtype == dtype) or masked:
            same.add(out)
    outputs = enumerate(jaxpr.jaxpr.outvars)
    return next((i for i, x in outputs if any(x is y for y in same)), None)


# vmap, unused results.


def _batch(axis_data: Any, args: Any, axes: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    if all(axis is None for axis in axes):
        outputs = hopper_fused_p.bind(*args, **params)
        return outputs, [None] * len(outputs)
    rights, sizes = params["rights"], params["accumulate"].sizes
    count = 1 + rights + sizes
    products, accumulate, product_axis = batched_product(
        axis_data, args[:count], axes[:count], params["accumulate"]
    )
    lhs, right_operands, operands = _split((*products, *args[count:]), rights)
    operands, axes = list(operands), [product_axis] * sizes + list(axes[count:])
    if sizes and product_axis is not None:
        _as_rows_lie(axis_data.size, products, operands, axes, params)
    accumulators = abstract(
        partial(accumulate, by_xla=True), lhs, right_operands, *operands[:sizes]
    )
    function = mapped(
        params["jaxpr"],
        [product_axis] * len(accumulators) + axes,
        axis_data.size,
        [*accumulators, *operands],
    )
    outputs = hopper_fused_p.bind(
        lhs, *right_operands, *operands,
        jaxpr=function, rights=rights, accumulate=accumulate,
        preactivation=params["preactivation"], in_place=params["in_place"],
    )  # fmt: skip
    return outputs, [0] * len(outputs)


def _as_rows_lie(
    size: int, products: Sequence[Any], operands: list[Any], axes: list[Any], params: dict[str, Any]
) -> None:
    """Maps what a kernel for a mapped ragged product could not read as it is: changes the lists.

    To it the rows of all matrices are one long axis, so what varies along rows varies along all of
    it. Where each matrix has groups of its own, so have operands by group, and all arrays that
    follow a contraction.
    """
    lhs, right, jaxpr = products[0], products[1], params["jaxpr"].jaxpr
    inputs = jaxpr.invars[len(jaxpr.invars) - len(operands) :]
    by_group = [e.invars[0] for e in jaxpr.eqns if e.primitive is segment_broadcast_p]
    subscripts = params["accumulate"].subscripts
    contraction = is_contraction(subscripts)
    own_groups = right.ndim > len(split(subscripts)[1])
    for i, (x, axis) in enumerate(zip(operands, axes, strict=True)):
        along_rows = jnp.ndim(x) > 1 and x.shape[-2] == lhs.shape[-2]
        each = own_groups and any(inputs[i] is variable for variable in by_group)
        if axis is None and (jnp.ndim(x) if contraction else along_rows or each):
            operands[i], axes[i] = jnp.broadcast_to(x, (size, *x.shape)), 0


def _without_unused(used: list[bool], *args: Any) -> tuple[list[bool], Any]:
    """Drops results that nothing reads and operands that only they need."""
    equation = args[-1]  # before it, JAX 0.12 passes what matters for mutable references
    if not any(used):
        return [False] * len(equation.invars), None
    params, count = dict(equation.params), 1 + equation.params["rights"]
    operands, sizes = len(equation.invars) - count, params["accumulate"].sizes
    accumulators = len(params["jaxpr"].in_avals) - operands
    kept = [True] * (accumulators + sizes) + [False] * (operands - sizes)
    params["jaxpr"], needed = pruned(params["jaxpr"], used, kept)
    needed = needed[accumulators:]
    if (index := params["in_place"]) is not None:
        stays = used[0] and needed[index]
        params["in_place"] = sum(needed[:index]) if stays else None
    needed = [True] * count + needed
    return needed, equation.replace(
        invars=[x for x, need in zip(equation.invars, needed, strict=True) if need],
        outvars=[x for x, use in zip(equation.outvars, used, strict=True) if use],
        params=params,
    )


_lower_to_xla = lower_fun_once(_reference)
_lower_apart = lower_fun_once(partial(_reference, by_xla=False))


def _lower_for_cuda(ctx: mlir.LoweringRuleContext, *values: Any, **params: Any) -> Any:
    accumulate, count = params["accumulate"], 1 + params["rights"]
    operands, avals = values[count:], ctx.avals_in[count:]
    products, product_avals, sizes = values[:count], ctx.avals_in[:count], None
    product = product_of(ctx.avals_in, params)
    if accumulate.spans:
        products, sizes = values[:count], operands[0]
    if accumulate.batch:
        flat = partial(_flat, accumulate)
        given = (*product_avals, avals[0])
        product_avals = traced(flat, *given).out_avals
        *products, sizes = mlir.lower_fun(flat, multiple_results=True)(
            ctx.replace(avals_in=given, avals_out=product_avals), *products, sizes
        )
    call = Call(
        product, tuple(products), tuple(operands), tuple(avals), params["in_place"], sizes=sizes
    )
    launched = call.lower(ctx, accumulate.implementation)
    if launched:
        return launched
    # XLA has no ragged product that would be worth keeping a function with.
    return (_lower_apart if accumulate.spans else _lower_to_xla)(ctx, *values, **params)


def _lower_partitioned(ctx: mlir.LoweringRuleContext, *values: Any, **params: Any) -> Any:
    """Emits a product with its function, or else the product and the function behind it."""
    accumulate, count = params["accumulate"], 1 + params["rights"]
    if not sharding.applies(ctx):
        return None
    call = Call(
        product_of(ctx.avals_in, params), values[:count], values[count:],
        tuple(ctx.avals_in[count:]), params["in_place"],
        sizes=values[count] if accumulate.spans else None,
    )  # fmt: skip
    insist = accumulate.implementation == "hopper"
    call = call.readable(ctx, kernel_only=insist)
    emitted = None
    if accumulate.batch:  # by its products, which are mapped
        pass
    elif found := route_partitioned(ctx, call, insist=insist):
        emitted = emit_fused(
            ctx, call, found, precision=accumulate.precision,
            implementation=accumulate.implementation,
        )  # fmt: skip
    return emitted or _lower_apart(ctx, *values, **params)


def _flat(accumulate: Accumulate, lhs: Any, *others: Any) -> list[Any]:
    """Returns the operands of the one product that a mapped ragged product is."""
    *rights, sizes = others
    batch, rank = accumulate.batch, len(split(accumulate.subscripts)[1])
    length, size = lhs.shape[batch], prod(lhs.shape[:batch])
    sizes = sizes_of_each(sizes.reshape(size, -1), length, size)
    rights = [x.reshape(-1, *x.shape[x.ndim - rank + 1 :]) for x in rights]
    return [lhs.reshape(size * length, -1), *rights, sizes]


hopper_fused_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[hopper_fused_p] = _jvp
ad.primitive_transposes[hopper_fused_p] = partial(transpose_by, _reference)
batching.fancy_primitive_batchers[hopper_fused_p] = _batch
pe.dce_rules[hopper_fused_p] = _without_unused
register_lowering(
    hopper_fused_p, _abstract_eval, _reference, _lower_for_cuda,
    lambda params: params["accumulate"].implementation, _lower_partitioned,
)  # fmt: skip
sharding.register(hopper_fused_p.name, partial(fused_of_shards, hopper_fused_p.bind))
sharding.register(RAGGED, partial(fused_of_ragged_shards, hopper_fused_p.bind))


# The products of one array with gate and with up. Its transpose is their sum, which the second
# product adds to the first one's result where that lies.


def _dots(lhs: Any, *others: Any, accumulate: Accumulate) -> list[Any]:
    count = len(others) - accumulate.sizes
    return accumulate(lhs, others[:count], *others[count:])


@memoised
def _avals_of_dots(avals: Any, accumulate: Accumulate) -> Any:
    return traced(partial(_dots, accumulate=accumulate), *avals).out_avals


def _transpose_dots(cotangents: Any, lhs: Any, *others: Any, accumulate: Accumulate) -> list[Any]:
    if not ad.is_undefined_primal(lhs):
        return transpose_by(_dots, cotangents, lhs, *others, accumulate=accumulate)
    rights, sizes = others[: len(cotangents)], others[len(cotangents) :]
    pairs = zip(cotangents, rights, strict=True)
    given = [(ct, right) for ct, right in pairs if type(ct) is not ad.Zero]
    if not given:
        return [ad.Zero(lhs.aval), *(None for _ in others)]
    (cotangent, right), *more = given
    if accumulate.spans:
        other = {ROWS: ROWS_TRANSPOSED, ROWS_TRANSPOSED: ROWS}[accumulate.subscripts]
        gradients = replace(accumulate, subscripts=other)
        first = as_cotangent(lhs.aval, gradients.together(cotangent, right, *sizes))
        for cotangent, right in more:
            first = _added(first, gradients, cotangent, right, *sizes)
        return [first, *(None for _ in others)]
    lhs_labels, rhs_labels, out = split(accumulate.subscripts)
    gradient = f"{out},{rhs_labels}->{lhs_labels}"
    first = cotangent_of(
        lhs.aval, cotangent, right, subscripts=gradient, precision=accumulate.precision,
        preferred_element_type=accumulate.dtype, out_sharding=None,
        implementation=accumulate.implementation, max_sms=accumulate.max_sms,
    )  # fmt: skip
    for cotangent, right in more:
        first = fused_dot(
            lambda product, c: product + c,
            cotangent, (right,), (first,), subscripts=gradient, precision=accumulate.precision,
            product_dtype=lhs.aval.dtype, out_dtypes=(lhs.aval.dtype,), preactivation="save",
            implementation=accumulate.implementation, max_sms=accumulate.max_sms, in_place=0,
            out_sharding=None if lhs.aval.sharding.mesh.empty else lhs.aval.sharding,
        )  # fmt: skip
    return [first, *(None for _ in others)]


def _added(x: Any, accumulate: Accumulate, lhs: Any, right: Any, sizes: Any) -> Any:
    """Returns a matrix plus a ragged product, where the matrix lies."""
    accumulate = replace(accumulate, dtype=accumulator_dtype(x.dtype))
    assert (spans := accumulate.spans)

    def function(product: Any, sizes: Any, x: Any) -> list[Any]:
        return [segment_mask((product + x).astype(x.dtype), sizes, spans)]

    product = abstract(partial(accumulate.together, by_xla=True), lhs, right, sizes)
    (found,) = hopper_fused_p.bind(
        lhs, right, sizes, x, jaxpr=traced(function, product, sizes, x), rights=1,
        accumulate=accumulate, preactivation="save", in_place=1,
    )  # fmt: skip
    return found


def _batch_dots(
    axis_data: Any, args: Any, axes: Any, *, accumulate: Accumulate
) -> tuple[list[Any], list[Any]]:
    args, accumulate, axis = batched_product(axis_data, args, axes, accumulate)
    outputs = hopper_dots_p.bind(*args, accumulate=accumulate)
    return outputs, [axis] * len(outputs)


hopper_dots_p.def_abstract_eval(lambda *avals, accumulate: list(_avals_of_dots(avals, accumulate)))
ad.primitive_jvps[hopper_dots_p] = partial(jvp_by, _dots)
ad.primitive_transposes[hopper_dots_p] = _transpose_dots
batching.fancy_primitive_batchers[hopper_dots_p] = _batch_dots
mlir.register_lowering(hopper_dots_p, mlir.lower_fun(_dots, multiple_results=True))
