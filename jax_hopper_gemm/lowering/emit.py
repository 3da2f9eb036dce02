"""Emission of launches: the FFI call that a product becomes on a GPU, and what XLA does after it.

A launch of a bare product says in attributes of its operation which one it is, so that what reads
its result can take the product's place, with an epilogue (see `call.product_at`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from ..fusion.jaxprs import ClosedJaxpr, traced, without_lines
from ..fusion.memo import memoised
from ..gemm.grid import result_shapes
from ..launch import ffi_library
from ..launch.ffi_target import TARGET, launcher_violation
from . import fallback
from .barriers import before_barrier, behind_barrier
from .call import Call, mark_options, mark_product
from .devices import devices_of, with_partitions
from .finish import finished_results
from .launch_operands import inputs_of, overwriting_results, overwritten, product_attributes
from .register import lower_jaxpr
from .request import Request, own_in_place
from .route import Route


def lower_call(ctx: mlir.LoweringRuleContext, call: Call) -> list[Any] | None:
    """Emits the launch of a product, if a kernel is the answer.

    Raises:
      NotImplementedError: none runs the product, and the user insists on one or wants an error. Of
        empty operands XLA adds up nothing otherwise than a kernel: `implementation` alone insists.
      ForkedError: the process was forked from one that had kernels loaded.
    """
    results, route = launched(ctx, call)
    if results is not None:
        return results
    request = call.request
    empty = 0 in request.extents.values()
    if call.insists and not (empty and request.options.implementation is None):
        raise NotImplementedError(
            f"{request.options.insists}: no kernel runs {request}: {route.reason}"
        )
    if not (route.supported or empty):
        fallback.report_fallback(ctx, f"XLA runs {request}: {route.reason}")
    return None


def launched(ctx: mlir.LoweringRuleContext, call: Call) -> tuple[list[Any] | None, Route]:
    """Emits the launch as `lower_call`, and says how the product runs; nothing is insisted on."""
    chosen, decision = call.decided(ctx)
    route = decision.route.unless(_partition_violation(ctx) or launcher_violation())
    if route.path == "xla":
        return None, route
    ffi_library.refuse_fork()
    return emit_launch(ctx, chosen, route), route


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

    Arrays are in the order of `LaunchPlan`. Of a program's equal launches JAX copies the first one.
    """
    assert route.gemm and route.spec
    request = call.request
    values, avals = zip(*inputs_of(ctx, call, route), strict=True)
    outputs = None if route.fusion else tuple(ctx.avals_out)
    name = getattr(ctx.primitive, "name", "launch")
    launch = _launch(request, route, avals, outputs, call.avals, overwritten(call), name)
    operands = call.operands if route.fusion else ()
    context = ctx.replace(avals_in=launch.in_avals)
    results = lower_jaxpr(context, launch, *values, *operands, lines=ctx.traceback)
    results = [behind_barrier(x) for x in results]
    if route.fusion:
        return results
    if not (request.blocks or request.k_group or request.panels or route.gemm.padded):
        operation = before_barrier(results[0]).owner
        mark_product(operation, request, route.gemm.problem, swap_ab=route.gemm.swap_ab)
    return mark_options(call, results)


@memoised
def _launch(
    request: Request,
    route: Route,
    inputs: Sequence[Any],
    outputs: Sequence[Any] | None,
    avals: Sequence[Any],
    in_place: Sequence[int | None],
    name: str,
) -> ClosedJaxpr:
    """Returns a launch and what XLA does with its results as a program, without lines of source.

    Args:
      outputs: of the launch; None: those of the epilogue's graph.
      in_place: as in `Call`, without those that nothing may overwrite.
    """
    written, epilogues = list(outputs or ()), list[Any]()  # of those that are launched together
    aliases: dict[int, int] = {}
    if outputs is None:
        first, routes = 1 + len(request.rhs_shapes), route.apart or (route,)
        for of, own, (reads, makes) in zip(request.apart, routes, request.slices, strict=True):
            assert of.function and own.fusion
            arrays = _written(of, own)
            taken = own_in_place(in_place, reads, makes)
            found = overwriting_results(avals[reads], taken, own.fusion, arrays)
            aliases |= {first + place: len(written) + number for place, number in found.items()}
            first, written = first + len(own.fusion.operands), written + arrays
            epilogues.append((of, own, len(arrays), reads))
    workspaces = [ShapedArray((nbytes,), np.uint8) for nbytes in route.plan.workspaces]
    outs = (*written, *workspaces)

    def program(*arrays: Any) -> list[Any]:
        launched, operands = arrays[: len(inputs)], arrays[len(inputs) :]
        found = _named(name).bind(*launched, route=route, aliases=tuple(aliases.items()), outs=outs)
        if not epilogues:
            return found[: len(written)]
        finished: list[Any] = []
        for of, own, count, reads in epilogues:
            finished += finished_results(of, own, *found[:count], *operands[reads])
            found = found[count:]
        return finished

    return without_lines(traced(program, *inputs, *(avals if route.fusion else ())))


@cache
def _named(name: str) -> Primitive:
    """Returns the primitive of a launch that profiles show by this name."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *_, outs, **__: list(outs))
    mlir.register_lowering(primitive, _lower_launch)
    return primitive


def _lower_launch(
    ctx: mlir.LoweringRuleContext, *values: Any, route: Route, aliases: Any, outs: Any
) -> Any:
    assert route.gemm and route.spec
    attributes = product_attributes(route.gemm.problem, route.spec, route.plan)
    lower = jax.ffi.ffi_lowering(TARGET, operand_output_aliases=dict(aliases))
    return lower(ctx, *values, **attributes)


def _written(request: Request, route: Route) -> list[ShapedArray]:
    """Returns what the kernel writes, varying as the product: matrices with the result's axes."""
    assert route.gemm and route.spec and route.roles and request.function
    product: Any = request.function.in_avals[0]
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
        named = {"shape": shape, "dtype": np.dtype(jnp.dtype(dtype)), "weak_type": False}
        sharding = with_partitions(product.sharding, (None,) * len(shape))
        arrays.append(product.update(**named, sharding=sharding))
    return arrays
