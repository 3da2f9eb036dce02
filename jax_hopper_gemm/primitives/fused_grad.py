"""The derivative of an epilogue: two primitives, each the other's transpose.

`epilogue_tangent` is linear: from tangents of the accumulators and the operands to tangents of the
results. `epilogue` is its transpose, "a JAX function of arrays". When that is lowered for CUDA and
one of its inputs comes straight from a product of ours, it becomes the epilogue of that product,
which computes it from its accumulators; the bare product is left without a use and XLA removes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, xla
from jax.interpreters import partial_eval as pe

from ..fusion.jaxprs import (
    ClosedJaxpr,
    abstract,
    jvp_by,
    mapped,
    pruned,
    traced,
    transpose_by,
    transposed,
    with_accumulator,
)
from ..fusion.memo import memoised
from ..gemm.groups import is_contraction
from ..gemm.subscripts import split
from ..launch.ffi_target import launcher_violation
from ..lowering.call import Call
from ..lowering.match import is_launch, product_at
from ..lowering.register import register_lowering
from ..lowering.route import Route
from ..lowering.traced import lower_fun_once
from ..sharding.custom_call import applies
from .accumulators import Accumulate, unstacked
from .dot import partitioned_product_at, with_batch
from .fused_dot_sharded import emit_fused, route_partitioned
from .ragged_dot_sharded import partitioned_ragged_product_at
from .segments import mapped_first, mapped_shared, without_masks

epilogue_p = Primitive("epilogue")
epilogue_tangent_p = Primitive("epilogue_tangent")
for primitive in (epilogue_p, epilogue_tangent_p):
    primitive.multiple_results = True
    primitive.def_impl(partial(xla.apply_primitive, primitive))


@dataclass(frozen=True)
class Recompute:
    """Residuals that are computed anew: in place of accumulators a derivative keeps operands.

    Attributes:
      accumulate: how.
      rights: number of right operands; the left one, these, and sizes come first among the
        residuals.
      used: which accumulators the derivative needs.
    """

    accumulate: Accumulate
    rights: int
    used: tuple[bool, ...]

    def residuals(self, kept: Sequence[Any]) -> list[Any]:
        """Returns the derivative's residuals from those kept for it."""
        (lhs, *rights), rest = kept[: 1 + self.rights], kept[1 + self.rights :]
        sizes, rest = rest[: self.accumulate.sizes], rest[self.accumulate.sizes :]
        accumulators = self.accumulate(lhs, rights, *sizes)
        return [x for x, used in zip(accumulators, self.used, strict=True) if used] + list(rest)


def _tangent(
    *args: Any,
    jaxpr: ClosedJaxpr,
    residuals: int,
    plane_axis: int | None,
    recompute: Recompute | None,
    products: int,
) -> list[Any]:
    """The tangents of an epilogue's results.

    Args:
      *args: residuals, then tangents.
      jaxpr: the derivative as of `jaxprs.tangent`.
      residuals: how many of `args` are.
      plane_axis: that of gate and up in the first tangent, where it holds both.
      recompute: how the first residuals of the derivative come from the first of `args`.
      products: how many of the tangents, the first, are those of products.
    """
    kept = list(args[:residuals])
    if recompute is not None:
        kept = recompute.residuals(kept)
    return jaxpr_as_fun(jaxpr)(*kept, *unstacked(args[residuals:], plane_axis))


def _transpose_tangent(
    cotangents: Any,
    *args: Any,
    jaxpr: ClosedJaxpr,
    residuals: int,
    plane_axis: int | None,
    recompute: Recompute | None,
    products: int,
) -> list[Any]:
    kept, linear = list(args[:residuals]), args[residuals:]
    inner = len(jaxpr.in_avals) - len(linear) - (plane_axis is not None)  # residuals of `jaxpr`
    given = [i for i, ct in enumerate(cotangents) if type(ct) is not ad.Zero]
    outputs = [i in given for i in range(len(cotangents))]
    reached = pruned(jaxpr, outputs, [True] * inner + [False] * (len(jaxpr.in_avals) - inner))[1]
    asked = [ad.is_undefined_primal(x) for x in linear]
    if plane_axis is not None:
        reached[inner : inner + 2] = [any(reached[inner : inner + 2])] * 2
        asked = [asked[0], *asked]
    wanted = [i for i, ask in enumerate(asked) if ask and reached[inner + i]]
    found: dict[int, Any] = {}
    if given and wanted:
        if recompute is not None:
            kept = recompute.residuals(kept)
        function, used = transposed(jaxpr, inner, given, wanted)
        count = products + (plane_axis is not None)
        free = [i < count for i in wanted]
        function, needed = without_masks(function, free, [False] * sum(used) + [True] * len(given))
        still = iter(needed)
        used = [use and next(still) for use in used]
        if plane_axis is not None and wanted[0] == 0:
            function, wanted = _stacking(function, plane_axis), [0, *wanted[2:]]
        kept = [x for x, use in zip(kept, used, strict=True) if use]
        found = dict(
            zip(
                wanted,
                epilogue_p.bind(*kept, *(cotangents[i] for i in given), jaxpr=function),
                strict=True,
            )
        )
    if plane_axis is not None:
        found = {max(0, i - 1): ct for i, ct in found.items()}
    zeros = [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in linear]
    return [None] * residuals + [found.get(i, zero) for i, zero in enumerate(zeros)]


@memoised
def _stacking(closed: ClosedJaxpr, axis: int) -> ClosedJaxpr:
    """Returns the function with its first two outputs stacked."""

    def function(*args: Any) -> list[Any]:
        gate, up, *others = jaxpr_as_fun(closed)(*args)
        return [jnp.stack([gate, up], axis), *others]

    return jax.make_jaxpr(function)(*closed.in_avals)


def _batch_tangent(
    axis_data: Any,
    args: Any,
    axes: Any,
    *,
    jaxpr: ClosedJaxpr,
    residuals: int,
    plane_axis: int | None,
    recompute: Recompute | None,
    products: int,
) -> tuple[list[Any], list[int | None]]:
    if all(axis is None for axis in axes):
        outputs = epilogue_tangent_p.bind(
            *args,
            jaxpr=jaxpr,
            residuals=residuals,
            plane_axis=plane_axis,
            recompute=recompute,
            products=products,
        )
        return outputs, [None] * len(outputs)
    args, axes = list(args), list(axes)
    inner, inner_axes = args[:residuals], axes[:residuals]
    if recompute is not None:
        args, axes, recompute, product_axis = batched_recompute(axis_data, args, axes, recompute)
        inner = abstract(recompute.residuals, args[:residuals])
        count = sum(recompute.used)
        first = 1 + recompute.rights + recompute.accumulate.sizes
        inner_axes = [product_axis] * count + axes[first:residuals]
    linear, linear_axes = args[residuals:], axes[residuals:]
    if plane_axis is not None:
        axis = linear_axes[0]
        if axis is not None:
            linear[0], linear_axes[0] = jnp.moveaxis(linear[0], axis, 0), 0
            plane_axis += 1
        planes = abstract(partial(unstacked, axis=plane_axis), linear[:1])
        inner_linear, inner_linear_axes = [*planes, *linear[1:]], [linear_axes[0], *linear_axes]
    else:
        inner_linear, inner_linear_axes = linear, linear_axes
    function = mapped(
        jaxpr, [*inner_axes, *inner_linear_axes], axis_data.size, [*inner, *inner_linear]
    )
    outputs = epilogue_tangent_p.bind(
        *args[:residuals], *linear, jaxpr=function, residuals=residuals, plane_axis=plane_axis,
        recompute=recompute, products=products,
    )  # fmt: skip
    return outputs, [0] * len(outputs)


def batched_recompute(
    axis_data: Any, args: list[Any], axes: list[Any], recompute: Recompute
) -> tuple[list[Any], list[Any], Recompute, int | None]:
    """Returns residuals and their axes, with the products that they stand for batched.

    The last item is the axis of the accumulators: 0, or None where no product is mapped.
    """
    count = 1 + recompute.rights + recompute.accumulate.sizes
    operands, accumulate, product_axis = batched_product(
        axis_data, args[:count], axes[:count], recompute.accumulate
    )
    args = [*operands, *args[count:]]
    return args, axes, replace(recompute, accumulate=accumulate), product_axis


def batched_product(
    axis_data: Any, operands: Sequence[Any], axes: Sequence[int | None], accumulate: Accumulate
) -> tuple[list[Any], Accumulate, int | None]:
    """Returns the operands of a batched product, how it is computed, and the axis it is mapped on.

    Several right operands are given the same axes: mapped along their first, if any is mapped.

    Args:
      operands: the left one, the right ones, sizes; `axes` holds each one's mapped axis.
    """
    lhs, *rights = operands
    lhs_axis, *right_axes = axes
    if all(axis is None for axis in axes):
        return list(operands), accumulate, None
    if accumulate.spans:
        return _batched_ragged(axis_data.size, operands, axes, accumulate)
    if len(set(right_axes)) > 1:
        rights = [
            jnp.broadcast_to(x, (axis_data.size, *x.shape))
            if axis is None
            else jnp.moveaxis(x, axis, 0)
            for x, axis in zip(rights, right_axes, strict=True)
        ]
        right_axes = [0]
    subscripts, sharding = with_batch(
        axis_data, accumulate.subscripts, (lhs_axis, right_axes[0]), accumulate.out_sharding
    )
    return (
        [lhs, *rights],
        replace(accumulate, subscripts=subscripts, out_sharding=sharding),
        0,
    )


def _batched_ragged(
    size: int, operands: Sequence[Any], axes: Sequence[int | None], accumulate: Accumulate
) -> tuple[list[Any], Accumulate, int]:
    lhs, *rights, sizes = operands
    lhs_axis, *right_axes, sizes_axis = axes
    lhs, sizes = mapped_first(size, lhs, lhs_axis), mapped_first(size, sizes, sizes_axis)
    contraction = is_contraction(accumulate.subscripts)
    if contraction or any(axis is not None for axis in right_axes):
        rights = [mapped_first(size, x, a) for x, a in zip(rights, right_axes, strict=True)]
        right_axes = [0] * len(rights)
    rank, batch = len(split(accumulate.subscripts)[1]), sizes.shape[1:-1]
    rights = [
        mapped_shared(size, x, axis, batch, x.ndim - (axis is not None) > rank)
        for x, axis in zip(rights, right_axes, strict=True)
    ]
    return [lhs, *rights, sizes], replace(accumulate, batch=accumulate.batch + 1), 0


epilogue_tangent_p.def_abstract_eval(
    lambda *avals, jaxpr, **params: list(_tangent_avals(jaxpr, avals, tuple(params.items())))
)
ad.primitive_jvps[epilogue_tangent_p] = partial(jvp_by, _tangent)
ad.primitive_transposes[epilogue_tangent_p] = _transpose_tangent
batching.fancy_primitive_batchers[epilogue_tangent_p] = _batch_tangent
mlir.register_lowering(epilogue_tangent_p, mlir.lower_fun(_tangent, multiple_results=True))


@memoised
def _tangent_avals(jaxpr: ClosedJaxpr, avals: Any, params: Any) -> Any:
    return traced(partial(_tangent, jaxpr=jaxpr, **dict(params)), *avals).out_avals


def _epilogue(*args: Any, jaxpr: ClosedJaxpr) -> list[Any]:
    return jaxpr_as_fun(jaxpr)(*args)


def _batch_epilogue(
    axis_data: Any, args: Any, axes: Any, *, jaxpr: ClosedJaxpr
) -> tuple[list[Any], list[int | None]]:
    if all(axis is None for axis in axes):
        outputs = epilogue_p.bind(*args, jaxpr=jaxpr)
        return outputs, [None] * len(outputs)
    outputs = epilogue_p.bind(*args, jaxpr=mapped(jaxpr, axes, axis_data.size, args))
    return outputs, [0] * len(outputs)


def _without_unused(used: list[bool], *args: Any) -> tuple[list[bool], Any]:
    equation = args[-1]  # before it, JAX 0.12 passes what matters for mutable references
    if not any(used):
        return [False] * len(equation.invars), None
    jaxpr, needed = pruned(equation.params["jaxpr"], used)
    return needed, equation.replace(
        invars=[x for x, need in zip(equation.invars, needed, strict=True) if need],
        outvars=[x for x, use in zip(equation.outvars, used, strict=True) if use],
        params={"jaxpr": jaxpr},
    )


_lower_epilogue = lower_fun_once(_epilogue)


def _lower_epilogue_for_cuda(
    ctx: mlir.LoweringRuleContext, *values: Any, jaxpr: ClosedJaxpr
) -> Any:
    """Emits the product that one of the inputs comes from, with the function as its epilogue.

    Of several, the one of whose epilogue the kernel computes most. Where XLA runs the product, it
    keeps it if it is expected to be faster with the function, too.
    """
    choices = []
    for index, value in enumerate(values):
        product = product_at(value)
        if product is None or launcher_violation():
            continue
        call = _followed(ctx, product, values, index, jaxpr)
        found = call.route(ctx, kernel_only=is_launch(value))
        if found.path == "hopper" and found.fusion is not None:
            choices.append((call, found))
    if not choices:
        return _lower_epilogue(ctx, *values, jaxpr=jaxpr)
    call, found = max(choices, key=lambda choice: _covered(choice[1]))
    return call.launch(ctx, found)


def _lower_epilogue_partitioned(
    ctx: mlir.LoweringRuleContext, *values: Any, jaxpr: ClosedJaxpr
) -> Any:
    """Emits the same where XLA partitions the program over devices."""
    if not applies(ctx):
        return None
    choices = []
    for index, value in enumerate(values):
        product = partitioned_product_at(value) or partitioned_ragged_product_at(value)
        if product is not None:
            bare, options = product
            call = _followed(ctx, bare, values, index, jaxpr)
            insist = options["implementation"] == "hopper"
            if found := route_partitioned(ctx, call, insist=insist):
                choices.append((call, found, options))
    for call, found, options in sorted(choices, key=lambda x: _covered(x[1]), reverse=True):
        if emitted := emit_fused(ctx, call, found, **options):
            return emitted
    return _lower_epilogue(ctx, *values, jaxpr=jaxpr)


def _followed(
    ctx: mlir.LoweringRuleContext, call: Call, values: Any, index: int, jaxpr: ClosedJaxpr
) -> Call:
    """Returns a product with a function of which it is an input."""
    operands = (*values[:index], *values[index + 1 :])
    product = call.product
    sizes = [i for i, x in enumerate(operands) if product.spans and x == call.sizes]
    product = replace(
        product, function=with_accumulator(jaxpr, index, np.float32),
        out_dtype=ctx.avals_out[0].dtype.name, sizes_operand=sizes[0] if sizes else None,
    )  # fmt: skip
    avals = (*ctx.avals_in[:index], *ctx.avals_in[index + 1 :])
    return replace(call, product=product, operands=operands, avals=avals)


def _covered(found: Route) -> tuple[int, int]:
    """Returns what orders routes by how much of a function the kernel computes."""
    assert found.fusion
    return -len(found.uncovered), len(found.fusion.graph.nodes)


def _epilogue_avals(*avals: Any, jaxpr: ClosedJaxpr) -> list[Any]:
    return list(_avals_of(jaxpr, avals))


@memoised
def _avals_of(jaxpr: ClosedJaxpr, avals: Any) -> Any:
    return traced(jaxpr_as_fun(jaxpr), *avals).out_avals


epilogue_p.def_abstract_eval(_epilogue_avals)
ad.primitive_jvps[epilogue_p] = partial(jvp_by, _epilogue)
ad.primitive_transposes[epilogue_p] = partial(transpose_by, _epilogue)
batching.fancy_primitive_batchers[epilogue_p] = _batch_epilogue
pe.dce_rules[epilogue_p] = _without_unused
register_lowering(
    epilogue_p,
    _epilogue_avals,
    _epilogue,
    _lower_epilogue_for_cuda,
    partitioned=_lower_epilogue_partitioned,
)
