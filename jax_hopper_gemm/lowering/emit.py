"""Emission of launches: the FFI call that a product becomes on a GPU, and what XLA does after it.

A launch of a bare product says in attributes of its operation which one it is, so that what reads
its result can take the product's place, with an epilogue (see `call.product_at`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.core import ShapedArray
from jax.extend.mlir import ir
from jax.interpreters import mlir

from ..fusion.jaxprs import ClosedJaxpr, traced
from ..fusion.memo import memoised
from ..gemm.dtypes import DTYPES
from ..gemm.epilogue_graph import Result
from ..gemm.grid import result_shapes
from ..gemm.groups import gate_up_letter
from ..gemm.kernel_params import KernelSpec
from ..gemm.problem import GemmProblem
from ..gemm.spec import TMA_ALIGNMENT, GemmSpec
from ..launch import ffi_library
from ..launch.ffi_target import TARGET, launcher_violation
from ..launch.plan import LaunchPlan
from . import fallback
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
from .devices import devices_of, lowers_shard, with_partitions
from .register import lower_jaxpr
from .route import Request, Route, scale_letters, scale_shape


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
    inputs, aliases = _factors(ctx, call, route), {}
    outputs = list(ctx.avals_out)
    if route.fusion:
        outputs = _written(call.request, route)
        operands = _epilogue_operands(ctx, call, route)
        overwritten = _overwritten(call, route, outputs)
        aliases = {len(inputs) + place: number for place, number in overwritten.items()}
        inputs += operands
    scales = _group_scales if call.request.k_group else _scales
    values, avals = zip(*inputs, *_integers(call), *scales(ctx, call, route), strict=True)
    workspaces = [ShapedArray((w.nbytes,), np.uint8) for w in route.plan.workspaces]
    results = jax.ffi.ffi_lowering(TARGET, operand_output_aliases=aliases)(
        ctx.replace(avals_in=avals, avals_out=[*outputs, *workspaces]),
        *values,
        **product_attributes(route.gemm.problem, route.spec, route.plan),
    )
    results = list[Any](results)[: len(outputs)]
    if route.fusion is None:
        if call.request.blocks or call.request.k_group or route.gemm.padded:
            return mark_options(call, results)
        problem = route.gemm.problem
        _mark_product(results[0].owner, call.request, problem, swap_ab=route.gemm.swap_ab)
        return mark_options(call, results)
    assert call.request.function
    varying = [_varying_like(call.request.function.in_avals[0], x) for x in outputs]
    avals = [*varying, *call.avals]
    finish = _finishing(call.request.function, call.request, route, avals)
    return list(lower_jaxpr(ctx.replace(avals_in=avals), finish, *results, *call.operands))


# What the launch reads.


def _factors(
    ctx: mlir.LoweringRuleContext, call: Call, route: Route
) -> list[tuple[Any, ShapedArray]]:
    """Returns the arrays that are multiplied, in the kernel's order."""
    request, groups = call.request, call.request.groups
    shapes = [(request.lhs_shape, request.lhs_dtype)]
    shapes += [(request.rhs_shape, request.rhs_dtype)] * request.num_b
    if groups and (operand := groups.gathered):
        (_, *row), dtype = shapes["ab".index(operand)]
        shapes["ab".index(operand)] = ((groups.source_rows, *row), dtype)
    if operand := request.indexed:
        shape, dtype = shapes["ab".index(operand)]
        shapes["ab".index(operand)] = ((request.stack, *shape), dtype)
    assert route.gemm
    inputs = [_stored(ctx, v, *s) for v, s in zip(call.values, shapes, strict=True)]
    inputs = [
        _with_whole_line(ctx, *x) if min(i, 1) in route.gemm.padded else x
        for i, x in enumerate(inputs)
    ]
    return inputs[::-1] if route.gemm.swap_ab else inputs


def _with_whole_line(
    ctx: mlir.LoweringRuleContext, value: Any, aval: ShapedArray
) -> tuple[Any, ShapedArray]:
    """Returns an operand whose lines XLA pads with zeros to multiples of 16 bytes."""
    missing = -aval.shape[-1] % (TMA_ALIGNMENT // aval.dtype.itemsize)
    out = ShapedArray((*aval.shape[:-1], aval.shape[-1] + missing), aval.dtype)
    padding = [(0, 0)] * (aval.ndim - 1) + [(0, missing)]
    lower = mlir.lower_fun(lambda x: jnp.pad(x, padding), multiple_results=False)
    (padded,) = lower(ctx.replace(avals_in=[aval], avals_out=[out]), value)
    return padded, out


def _stored(
    ctx: mlir.LoweringRuleContext, value: Any, shape: tuple[int, ...], dtype: str
) -> tuple[Any, ShapedArray]:
    """Returns an operand as a kernel reads it: int4 packed in uint8, by XLA if it is not yet."""
    if (packed := DTYPES[dtype].packed) == 1:
        return value, ShapedArray(shape, dtype)
    stored = ShapedArray((*shape[:-1], shape[-1] // packed), np.dtype(np.uint8))
    if str(value.type.element_type) == DTYPES[dtype].mlir:
        lower = mlir.lower_fun(pack, multiple_results=False)
        given = ShapedArray(shape, np.dtype(jnp.int4))
        (value,) = lower(ctx.replace(avals_in=[given], avals_out=[stored]), value)
    return value, stored


def _epilogue_operands(
    ctx: mlir.LoweringRuleContext, call: Call, route: Route
) -> list[tuple[Any, ShapedArray]]:
    """Returns what the epilogue reads, in the kernel's dtypes."""
    assert route.fusion
    inputs = []
    for index, operand in zip(route.fusion.operands, route.fusion.graph.operands, strict=True):
        value, aval, dtype = call.operands[index], call.avals[index], operand.dtype
        if aval.dtype.name != dtype:
            convert = mlir.lower_fun(lambda x, to=dtype: x.astype(to), multiple_results=False)
            converted = ShapedArray(aval.shape, np.dtype(jnp.dtype(dtype)))
            (value,) = convert(ctx.replace(avals_in=[aval], avals_out=[converted]), value)
            aval = converted
        inputs.append((value, aval))
    return inputs


def _overwritten(call: Call, route: Route, results: Sequence[ShapedArray]) -> dict[int, int]:
    """Returns for operands of the epilogue the number of the result that takes their memory.

    XLA copies an operand that is read later, also what the caller of the program keeps. So nothing
    of the caller's is taken that is not donated, nor what is multiplied: tiles read it to the end.
    """
    assert route.fusion
    overwritten: dict[int, int] = {}
    pairs = zip(route.fusion.operands, route.fusion.graph.operands, strict=True)
    for place, (index, operand) in enumerate(pairs):
        value = call.operands[index]
        if index not in call.in_place or _kept(value) or any(value == x for x in call.values):
            continue
        number = call.in_place.index(index)
        if operand.kind == "matrix" and number < len(results):
            aval, result = call.avals[index], results[number]
            if (aval.shape, aval.dtype) == (result.shape, result.dtype):
                overwritten[place] = number
    return overwritten


def _kept(value: ir.Value) -> bool:
    """Whether a value is an argument of the whole program that the caller does not donate.

    A shard's program is no caller's: XLA puts it in the place of a call.
    """
    if lowers_shard() or not isinstance(value.owner, ir.Block):
        return False
    function = value.owner.owner
    names = function.attributes
    if "sym_name" not in names or ir.StringAttr(names["sym_name"]).value != "main":
        return False
    attributes = ir.ArrayAttr(names["arg_attrs"])[ir.BlockArgument(value).arg_number]
    donated = ("tf.aliasing_output", "jax.buffer_donor")
    return not any(name in ir.DictAttr(attributes) for name in donated)


def _integers(call: Call) -> list[tuple[Any, ShapedArray]]:
    """Returns sizes of groups, indices of rows, the index of a matrix: those that there are."""
    arrays = (call.sizes, call.rows, call.index)
    return [
        (x, ShapedArray(tuple(x.type.shape), np.dtype("int32"))) for x in arrays if x is not None
    ]


def _scales(
    ctx: mlir.LoweringRuleContext, call: Call, route: Route
) -> list[tuple[Any, ShapedArray]]:
    """Returns the block scales, in the kernel's order and as it reads them."""
    if not call.request.blocks:
        return []
    assert route.gemm
    p, inputs = route.gemm.problem, []
    values = call.scales[::-1] if route.gemm.swap_ab else call.scales
    for value, scales, lines in zip(values, (p.a_scales, p.b_scales), (p.m, p.n), strict=True):
        assert scales
        aval = ShapedArray(tuple(value.type.shape), np.dtype(np.float32))
        shape = (*aval.shape[:-2], *scale_shape(scales.block, lines, p.k))
        arranged = partial(_as_read, length=shape[-1])
        lower = mlir.lower_fun(arranged, multiple_results=False)
        out = ShapedArray(shape, aval.dtype)
        (value,) = lower(ctx.replace(avals_in=[aval], avals_out=[out]), value)
        inputs.append((value, out))
    return inputs


def _group_scales(
    ctx: mlir.LoweringRuleContext, call: Call, route: Route
) -> list[tuple[Any, ShapedArray]]:
    """Returns the scales along K of each right operand, (L, blocks along K, N)."""
    assert route.gemm
    request, problem = call.request, route.gemm.problem
    arranged = partial(_by_groups, request=request, problem=problem)
    inputs = []
    for value in call.scales:
        aval = ShapedArray(tuple(value.type.shape), np.dtype(np.float32))
        outs = traced(arranged, aval).out_avals
        lower = mlir.lower_fun(arranged, multiple_results=True)
        found = lower(ctx.replace(avals_in=[aval], avals_out=outs), value)
        inputs += zip(found, outs, strict=True)
    return inputs


def _by_groups(scale: jax.Array, *, request: Request, problem: GemmProblem) -> list[jax.Array]:
    """Returns scales that broadcast against the right operand as its matrices and columns lie."""
    subscripts, extents = request.subscripts, request.extents
    batch, columns = scale_letters(request, problem)
    up = gate_up_letter(subscripts) if request.groups else subscripts.gate_up
    letters = subscripts.rhs
    groups = scale.shape[letters.index(subscripts.contracted)]
    shape = [groups if x in subscripts.contracted else extents[x] for x in letters]
    order = [letters.index(x) for x in up + batch + subscripts.contracted + columns]
    each = jnp.transpose(jnp.broadcast_to(scale, shape), order)
    return list(each.reshape(2 if up else 1, -1, groups, problem.n))


def pack(values: jax.Array) -> jax.Array:
    """Returns int4 as uint8: two neighbours along the last axis each, the first in the low bits."""
    bits = lax.bitcast_convert_type(values.astype(jnp.int8), jnp.uint8) & 15
    return bits[..., ::2] | (bits[..., 1::2] << 4)


def _as_read(scale: jax.Array, length: int) -> jax.Array:
    """Returns scales by blocks of K first, then by lines, with zeros up to `length`."""
    across = jnp.swapaxes(scale, -1, -2)
    padding = [(0, 0)] * (scale.ndim - 1) + [(0, length - across.shape[-1])]
    return jnp.pad(across, padding)


# What the launch says of itself.


def product_attributes(problem: GemmProblem, spec: GemmSpec, plan: LaunchPlan) -> dict[str, Any]:
    extents = f"M={problem.m} N={problem.n} K={problem.k} L={problem.l}"
    return launch_attributes(spec, plan, extents)


@memoised
def launch_attributes(spec: KernelSpec, plan: LaunchPlan, extents: str) -> dict[str, Any]:
    """Returns the attributes of an FFI call; errors name the kernel and the extents."""
    from ..cubin import digest_of  # brings cuda-python with it

    return {
        "digest": digest_of(spec),
        "spec": spec.to_json(),
        "name": f"{spec.name} {extents}",
        "plan": np.array(plan.encode(), np.int64),
    }


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


# What the launch writes.


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


@memoised
def _finishing(
    function: ClosedJaxpr, request: Request, route: Route, avals: Sequence[Any]
) -> ClosedJaxpr:
    """Returns how XLA finishes what the kernel wrote; `function` is the request's."""
    return traced(partial(finished_results, request, route), *avals)


def finished_results(request: Request, route: Route, *arrays: jax.Array) -> list[jax.Array]:
    """Returns the function's outputs from what the kernel wrote and the function's operands."""
    assert route.fusion
    whole = [result for result in route.fusion.graph.results if result.plane == 0]
    finished: list[jax.Array] = []
    for result, array in zip(whole, arrays[: len(whole)], strict=True):
        if result.kind == "matrix":
            finished.append(array)
            continue
        in_order = request.options.batch_invariant
        parts: Sequence[jax.Array] | jax.Array = finish_partials(result, array, in_order=in_order)
        parts = parts if isinstance(parts, tuple | list) else (parts,)
        finished += [_shaped(request, route, result, part) for part in parts]
    return route.fusion.finish(*finished, *arrays[len(whole) :])


def _shaped(request: Request, route: Route, result: Result, array: Any) -> jax.Array:
    """Returns a finished reduction, (L, M, ...) or (L, N), with the axes of the result."""
    assert route.roles
    if result.kind == "max":
        return jnp.max(array)
    axes, extents = route.roles, request.extents
    letters = axes.batch + (axes.n if result.kind == "column_sum" else axes.m)
    trailing = array.shape[2:]
    array = array.reshape([extents[letter] for letter in letters] + list(trailing))
    order = [letters.index(x) for x in request.subscripts.out if x in letters]
    return lax.transpose(array, (*order, *range(len(letters), array.ndim)))


def _varying_like(aval: Any, array: ShapedArray) -> ShapedArray:
    """Returns an abstract value like `array` that varies over the mesh axes that `aval` does."""
    if aval.sharding.mesh.empty:
        return array
    whole = with_partitions(aval.sharding, (None,) * array.ndim)
    return aval.update(shape=array.shape, dtype=array.dtype, weak_type=False, sharding=whole)


def finish_partials(
    result: Result, partials: jax.Array, *, in_order: bool = False
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Returns the finished reduction.

    No atomics here either: the same program gives the same bits on every run.

    Args:
      result: a reduction or top-k of the graph.
      partials: what the kernel wrote for it, shaped as `plan.result_shapes` says.
      in_order: whether sums are added pair by pair, not in the order that XLA takes for the shape.

    Returns:
      column_sum       (L, N)
      row_sum, row_max (L, M)
      row_sumexp       two arrays (L, M): the largest value v of the row, the sum of
                       exp(v - largest); of exp(v) where the largest is infinite, so that a row of
                       -inf has 0 and one with +inf has inf. NaN if the row has one.
      max              ()
      top_k_*          (L, M, k), as it is

    Raises:
      ValueError: `result` is a matrix, or `partials` has another rank than such results have.
    """
    rank = 4 if result.kind == "row_sumexp" else 3
    if result.kind == "matrix" or partials.ndim != rank:
        raise ValueError(
            f"finish_partials: {result.kind} of shape {partials.shape}; expected a reduction with "
            f"the {rank} axes that plan.result_shapes gives it. Matrices come finished."
        )
    if result.kind in ("column_sum", "row_sum"):
        return _sum(partials, in_order)
    if result.kind == "row_max":
        return _largest(partials, 1)
    if result.kind == "max":
        return _largest(partials)
    if result.kind == "row_sumexp":
        tops, sums = partials[:, :, 0], partials[:, :, 1]  # of each tile, (L, tiles, M)
        top = _largest(tops, 1)
        base = jnp.where(jnp.isinf(top), 0.0, top)  # inf - inf would be NaN
        return top, _sum(sums * jnp.exp(tops - base[:, None]), in_order)
    return partials


def _sum(x: jax.Array, in_order: bool) -> jax.Array:
    """Returns the sum along axis 1; `in_order` of halves, element by element."""
    if not in_order:
        return jnp.sum(x, axis=1)
    while (count := x.shape[1]) > 1:
        half = count // 2
        pairs = x[:, :half] + x[:, half : 2 * half]
        x = jnp.concatenate([pairs, x[:, 2 * half :]], axis=1)
    return x[:, 0]


def _largest(x: jax.Array, axis: int | None = None) -> jax.Array:
    """Returns the largest, NaN if one is: XLA's reductions for CPUs may drop it."""
    return jnp.where(jnp.any(jnp.isnan(x), axis=axis), jnp.nan, jnp.max(x, axis=axis))
