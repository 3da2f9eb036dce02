"""Emission of launches: the FFI call that a product becomes on a GPU, and what XLA does after it.

A launch of a bare product says in attributes of its operation which one it is, so that what reads
its result can take the product's place, with an epilogue (see `call.product_at`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.core import ShapedArray
from jax.extend.mlir import ir
from jax.interpreters import mlir

from ..fusion.jaxprs import ClosedJaxpr
from ..fusion.memo import memoised
from ..gemm.grid import result_shapes
from ..gemm.problem import GemmProblem
from ..launch import ffi_library
from ..launch.ffi_target import TARGET, launcher_violation
from . import fallback
from .attributes import product_attributes
from .call import (
    BATCH_INVARIANT,
    BF16_TERMS,
    GATHERED,
    INDEXED,
    MAX_SMS,
    PRODUCT,
    PROMOTED,
    SPANS,
    Call,
)
from .devices import devices_of, with_partitions
from .finish import finishing
from .launch_operands import epilogue_operands, factors, integers, overwritten_results, scales
from .register import lower_jaxpr
from .route import Request, Route


def lower_call(ctx: mlir.LoweringRuleContext, call: Call) -> list[Any] | None:
    """Emits the launch of a product, if a kernel is the answer.

    Raises:
      NotImplementedError: none runs the product, and the user insists on one or wants an error.
      ForkedError: the process was forked from one that had kernels loaded.
    """
    chosen, decision = call.decided(ctx)
    route = decision.route.unless(_partition_violation(ctx) or launcher_violation())
    if route.path == "hopper":
        ffi_library.refuse_fork()
        return emit_launch(ctx, chosen, route)
    if call.insists:
        raise NotImplementedError(
            f"{call.request.options.insists}: no kernel runs {call.request}: {route.reason}"
        )
    if not route.supported:
        fallback.report_fallback(ctx, f"XLA runs {call.request}: {route.reason}")
    return None


def _partition_violation(ctx: mlir.LoweringRuleContext) -> str | None:
    """Returns why no kernel is launched for a whole product that XLA partitions over devices."""
    devices = devices_of(ctx)
    if devices == 1:
        return None
    return (
        f"XLA partitions this program over {devices} devices and would gather a kernel's operands "
        "on each; call it inside jax.shard_map over all mesh axes"
    )


def emit_launch(ctx: mlir.LoweringRuleContext, call: Call, route: Route) -> list[Any]:
    """Emits the FFI call, everything row-major, and what XLA does with its results.

    In go A, B, up, the epilogue's operands, sizes, indices of rows or the index of a matrix; out
    come its results and the workspaces.
    """
    assert route.gemm and route.spec and route.plan
    inputs, aliases = factors(ctx, call, route), {}
    outputs = list(ctx.avals_out)
    function, finish = call.request.function, None
    if route.fusion:
        outputs, finish = _written_and_finished(function, call.request, route, call.avals)
        operands = epilogue_operands(ctx, call, route)
        overwritten = overwritten_results(call, route, outputs)
        aliases = {len(inputs) + place: number for place, number in overwritten.items()}
        inputs += operands
    values, avals = zip(*inputs, *integers(call), *scales(ctx, call, route), strict=True)
    attributes, workspaces = _launch_of(route)
    results = jax.ffi.ffi_lowering(TARGET, operand_output_aliases=aliases)(
        ctx.replace(avals_in=avals, avals_out=[*outputs, *workspaces]),
        *values,
        **attributes,
    )
    results = list[Any](results)[: len(outputs)]
    if finish is None:
        if call.request.blocks or call.request.k_group or route.gemm.padded:
            return mark_options(call, results)
        problem = route.gemm.problem
        _mark_product(results[0].owner, call.request, problem, swap_ab=route.gemm.swap_ab)
        return mark_options(call, results)
    context = ctx.replace(avals_in=finish.in_avals)
    return list(lower_jaxpr(context, finish, *results, *call.operands))


@memoised
def _launch_of(route: Route) -> tuple[dict[str, Any], list[ShapedArray]]:
    """Returns the attributes of a route's launch, and its workspaces."""
    assert route.gemm and route.spec and route.plan
    attributes = product_attributes(route.gemm.problem, route.spec, route.plan)
    return attributes, [ShapedArray((w.nbytes,), np.uint8) for w in route.plan.workspaces]


@memoised
def _written_and_finished(
    function: ClosedJaxpr, request: Request, route: Route, avals: Sequence[Any]
) -> tuple[list[ShapedArray], ClosedJaxpr]:
    """Returns the arrays that a kernel writes, and what XLA does with them and with `avals`.

    The function is the request's.
    """
    outputs = _written(request, route)
    varying = [_varying_like(function.in_avals[0], x) for x in outputs]
    return outputs, finishing(function, request, route, [*varying, *avals])


def _mark_product(operation: Any, request: Request, problem: GemmProblem, *, swap_ab: bool) -> None:
    """Says of a launch which bare product it holds, its operands in their order."""
    subscripts, groups = request.subscripts, request.groups
    words: dict[str, Any] = {PRODUCT: str(subscripts.swapped() if swap_ab else subscripts)}
    if groups:
        words[SPANS] = ",".join(map(str, astuple(groups.rule)))
        if groups.gathered:
            words[GATHERED] = groups.gathered
    if problem.promoted or problem.simt:
        words[PROMOTED] = "float32"
    if problem.bf16_terms:
        words[BF16_TERMS] = problem.bf16_terms
    if request.indexed:
        words[INDEXED] = "a" if (request.indexed == "a") != swap_ab else "b"
    for name, word in words.items():
        operation.attributes[name] = mlir.ir_attribute(word)


def mark_options(call: Call, results: Any) -> Any:
    """Returns what a bare product gave; says of it which options derivatives need."""
    if (limit := call.request.options.max_sms) is not None:
        operation: Any = list(results)[0].owner
        operation.attributes[MAX_SMS] = mlir.ir_attribute(limit)
    if call.request.options.batch_invariant:
        list[Any](results)[0].owner.attributes[BATCH_INVARIANT] = ir.UnitAttr.get()
    return results


def _written(request: Request, route: Route) -> list[ShapedArray]:
    """Returns the arrays that the kernel writes: matrices with the axes of the result."""
    assert route.gemm and route.spec and route.roles
    extents, out = request.extents, request.subscripts.out
    columns = len(out.rstrip(route.roles.n))
    arrays = []
    whole = [r for r in route.gemm.problem.graph.results if r.plane == 0]
    written = result_shapes(route.gemm.problem, route.spec)
    for result, (shape, dtype) in zip(whole, written, strict=True):
        if result.kind == "matrix":
            sizes = [extents[letter] for letter in out]
            planes = [result.planes] if result.planes > 1 else []
            shape = (*sizes[:columns], *planes, *sizes[columns:])
        arrays.append(ShapedArray(shape, np.dtype(jnp.dtype(dtype))))
    return arrays


def _varying_like(aval: Any, array: ShapedArray) -> ShapedArray:
    """Returns an abstract value like `array` that varies over the mesh axes that `aval` does."""
    if aval.sharding.mesh.empty:
        return array
    whole = with_partitions(aval.sharding, (None,) * array.ndim)
    return aval.update(shape=array.shape, dtype=array.dtype, weak_type=False, sharding=whole)
