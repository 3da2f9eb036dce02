"""The derivative of an epilogue: two primitives, each the other's transpose.

`epilogue_tangent` is linear: from tangents of the accumulators and the operands to tangents of the
results. `epilogue` is its transpose, "a JAX function of arrays". When that is lowered for CUDA and
one of its inputs comes straight from a product of ours, it becomes the epilogue of that product,
which computes it from its accumulators; the bare product is left without a use and XLA removes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import ad, mlir

from ..fusion.jaxprs import (
    ClosedJaxpr,
    abstract,
    jvp_by,
    mapped,
    pruned,
    transposed,
    with_accumulator,
)
from ..fusion.memo import memoised
from ..gemm.product import Product
from ..launch.ffi_target import launcher_violation
from ..lowering.call import Call, is_launch, product_at
from ..lowering.emit import emit_launch
from ..lowering.register import Lowering, lower_fun_once
from ..lowering.route import Route
from ..sharding import custom_call
from .accumulators import accumulators_of, batched_product, unstacked
from .define import Rules, define_primitive
from .fused_dot_sharded import emit_fused, route_partitioned
from .segments import without_masks


@dataclass(frozen=True)
class Recompute:
    """Residuals that are computed anew: in place of accumulators a derivative keeps operands."""

    product: Product  # how these are multiplied
    num_b: int  # right operands; the left one, these, and sizes are the first residuals
    used: tuple[bool, ...]  # which accumulators the derivative needs

    @property
    def num_operands(self) -> int:
        return 1 + self.num_b + self.product.num_sizes_operands

    def residuals(self, kept: Sequence[Any]) -> list[Any]:
        """Returns the derivative's residuals from those kept for it."""
        lhs, *others = kept[: self.num_operands]
        right_operands, sizes = others[: self.num_b], others[self.num_b :]
        accumulators = accumulators_of(self.product, lhs, right_operands, *sizes)
        needed = [x for x, used in zip(accumulators, self.used, strict=True) if used]
        return [*needed, *kept[self.num_operands :]]


class _Derivative(NamedTuple):
    """Parameters of `epilogue_tangent`, whose operands are residuals, then tangents."""

    jaxpr: ClosedJaxpr  # by `jaxprs.tangent`
    residuals: int  # how many of the operands are
    plane_axis: int | None  # that of gate and up in the first tangent, where it holds both
    recompute: Recompute | None  # how the first of its residuals come from the first operands
    products: int  # how many of the tangents, the first, are those of products


def _tangent(*args: Any, **params: Any) -> list[Any]:
    d = _Derivative(**params)
    kept = list(args[: d.residuals])
    if d.recompute is not None:
        kept = d.recompute.residuals(kept)
    return jaxpr_as_fun(d.jaxpr)(*kept, *unstacked(args[d.residuals :], d.plane_axis))


def _transpose_tangent(cotangents: Any, *args: Any, **params: Any) -> list[Any]:
    jaxpr, residuals, plane_axis, recompute, products = _Derivative(**params)
    kept, linear = list(args[:residuals]), args[residuals:]
    inner = len(jaxpr.in_avals) - len(linear) - (plane_axis is not None)  # residuals of `jaxpr`
    moving = [type(ct) is not ad.Zero for ct in cotangents]
    kept_inputs = [True] * inner + [False] * (len(jaxpr.in_avals) - inner)
    reached = list(pruned(jaxpr, moving, kept_inputs)[1])
    asked = [ad.is_undefined_primal(x) for x in linear]
    if plane_axis is not None:
        reached[inner : inner + 2] = [any(reached[inner : inner + 2])] * 2
        asked = [asked[0], *asked]
    wanted = [i for i, ask in enumerate(asked) if ask and reached[inner + i]]
    found: dict[int, Any] = {}
    given = [i for i, moves in enumerate(moving) if moves]
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
        outputs = epilogue_p.bind(*kept, *(cotangents[i] for i in given), jaxpr=function)
        found = dict(zip(wanted, outputs, strict=True))
    if plane_axis is not None:
        found = {max(0, i - 1): ct for i, ct in found.items()}
    zeros = [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in linear]
    return [None] * residuals + [found.get(i, zero) for i, zero in enumerate(zeros)]


@memoised
def _stacking(closed: ClosedJaxpr, axis: int) -> ClosedJaxpr:
    def function(*args: Any) -> list[Any]:
        gate, up, *others = jaxpr_as_fun(closed)(*args)
        return [jnp.stack([gate, up], axis), *others]

    return jax.make_jaxpr(function)(*closed.in_avals)


def _batch_tangent(
    axis_data: Any, args: Any, axes: Any, **params: Any
) -> tuple[list[Any], list[int]]:
    jaxpr, residuals, plane_axis, recompute, products = _Derivative(**params)
    args, axes = list(args), list(axes)
    inner, inner_axes = args[:residuals], axes[:residuals]
    if recompute is not None:
        count = recompute.num_operands
        args[:count], product, product_axis = batched_product(
            axis_data, args[:count], axes[:count], recompute.product
        )
        recompute = replace(recompute, product=product)
        inner = abstract(recompute.residuals, args[:residuals])
        inner_axes = [product_axis] * sum(recompute.used)
        inner_axes += axes[count:residuals]
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
    function = mapped(jaxpr, [*inner_axes, *inner_linear_axes], axis_data, [*inner, *inner_linear])
    outputs = epilogue_tangent_p.bind(
        *args[:residuals], *linear, jaxpr=function, residuals=residuals, plane_axis=plane_axis,
        recompute=recompute, products=products,
    )  # fmt: skip
    return outputs, [0] * len(outputs)


epilogue_tangent_p = define_primitive(
    "epilogue_tangent",
    _tangent,
    multiple_results=True,
    rules=Rules(jvp=partial(jvp_by, _tangent), transpose=_transpose_tangent, batch=_batch_tangent),
)


def _epilogue(*args: Any, jaxpr: ClosedJaxpr) -> list[Any]:
    return jaxpr_as_fun(jaxpr)(*args)


def _batch_epilogue(
    axis_data: Any, args: Any, axes: Any, *, jaxpr: ClosedJaxpr
) -> tuple[list[Any], list[int]]:
    outputs = epilogue_p.bind(*args, jaxpr=mapped(jaxpr, axes, axis_data, args))
    return outputs, [0] * len(outputs)


def _without_unused(used: list[bool], equation: Any) -> tuple[list[bool], dict[str, Any]]:
    jaxpr, needed = pruned(equation.params["jaxpr"], used)
    return needed, {"jaxpr": jaxpr}


_lower_epilogue = lower_fun_once(_epilogue)


def _lower_epilogue_for_cuda(
    ctx: mlir.LoweringRuleContext, *values: Any, jaxpr: ClosedJaxpr
) -> Any:
    """Emits the product that one of the inputs comes from, with the function as its epilogue.

    Of several, the one of whose epilogue the kernel computes most. Where XLA runs the product, it
    keeps it if it is expected to be faster with the function, too.
    """

    def route_of(call: Call, value: Any) -> Route | None:
        if launcher_violation():
            return None
        route = call.route(ctx, kernel_only=is_launch(value))
        return route if route.path == "hopper" and route.fusion else None

    for call, route in _choices(ctx, values, jaxpr, product_at, route_of):
        return emit_launch(ctx, call, route)
    return None


def _lower_epilogue_partitioned(
    ctx: mlir.LoweringRuleContext, *values: Any, jaxpr: ClosedJaxpr
) -> Any:
    """Emits the same where XLA partitions the program over devices."""
    found = _choices(
        ctx, values, jaxpr, custom_call.product_at, lambda call, _: route_partitioned(ctx, call)
    )
    for call, route in found:
        if emitted := emit_fused(ctx, call, route):
            return emitted
    return _lower_epilogue(ctx, *values, jaxpr=jaxpr)


def _choices(
    ctx: mlir.LoweringRuleContext,
    values: Sequence[Any],
    jaxpr: ClosedJaxpr,
    product_at: Callable[[Any], Call | None],
    route_of: Callable[[Call, Any], Route | None],
) -> list[tuple[Call, Route]]:
    """Returns products of which the function can be the epilogue: first where most is computed."""
    choices = []
    for index, value in enumerate(values):
        if (bare := product_at(value)) is not None:
            call = _followed(ctx, bare, values, index, jaxpr)
            if (route := route_of(call, value)) and route.fusion:
                covered = -len(route.uncovered), len(route.fusion.graph.nodes)
                choices.append((covered, call, route))
    return [x[1:] for x in sorted(choices, key=lambda x: x[0], reverse=True)]


def _followed(
    ctx: mlir.LoweringRuleContext, call: Call, values: Any, index: int, jaxpr: ClosedJaxpr
) -> Call:
    """Returns a product with a function of which it is an input."""
    operands = (*values[:index], *values[index + 1 :])
    request = call.request
    sizes = [i for i, x in enumerate(operands) if request.groups and x == call.sizes]
    request = replace(
        request, function=with_accumulator(jaxpr, index, np.float32),
        out_dtype=ctx.avals_out[0].dtype.name, sizes_operand=sizes[0] if sizes else None,
    )  # fmt: skip
    avals = (*ctx.avals_in[:index], *ctx.avals_in[index + 1 :])
    return replace(call, request=request, operands=operands, avals=avals)


epilogue_p = define_primitive(
    "epilogue",
    _epilogue,
    multiple_results=True,
    rules=Rules(
        jvp=partial(jvp_by, _epilogue),
        transpose="reference",
        batch=_batch_epilogue,
        dce=_without_unused,
    ),
    lowering=Lowering(_lower_epilogue_for_cuda, _lower_epilogue_partitioned),
)
