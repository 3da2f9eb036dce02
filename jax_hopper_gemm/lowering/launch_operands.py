"""What a launch is given: the arrays of a product as its kernel reads them, and attributes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.core import ShapedArray
from jax.extend.mlir import ir
from jax.interpreters import mlir

from ..fusion import Fusion
from ..fusion.jaxprs import traced
from ..fusion.memo import memoised
from ..gemm.bf16_parts import num_parts, stored_k
from ..gemm.cutting import VECTOR, CutSpec
from ..gemm.dtypes import DTYPES, name_of
from ..gemm.kernel_params import KernelSpec
from ..gemm.problem import GemmProblem
from ..gemm.spec import TMA_ALIGNMENT, GemmSpec
from ..launch.ffi_target import TARGET
from ..launch.plan import LaunchPlan, make_cut_plan
from .barriers import behind_barrier
from .call import CUT, Call
from .canonical import scale_letters
from .devices import is_whole_program
from .register import lower_jaxpr
from .request import Request
from .route import Route


class Array(NamedTuple):
    """An array of the program that is being lowered."""

    value: Any  # of MLIR
    aval: ShapedArray

    @classmethod
    def of(cls, value: Any, dtype: Any) -> Array:
        return cls(value, ShapedArray(tuple(value.type.shape), np.dtype(dtype)))

    def changed(self, ctx: mlir.LoweringRuleContext, function: Callable[..., Any]) -> list[Array]:
        """Returns what XLA makes of the array by a function."""
        closed: Any = traced(function, self.aval)
        values = lower_jaxpr(ctx.replace(avals_in=[self.aval]), closed, self.value)
        return list(map(Array, values, closed.out_avals))


def inputs_of(ctx: mlir.LoweringRuleContext, call: Call, route: Route) -> list[Array]:
    """Returns the arrays that a launch reads, in their order."""
    follows = _epilogue_operands(ctx, call, route) if route.fusion else []
    index = None if call.index is None else behind_barrier(call.index)
    integers = [Array.of(x, "int32") for x in (call.sizes, call.rows, index) if x is not None]
    scales = _scales(ctx, call, route) if call.scales else []
    return [*_factors(ctx, call, route), *follows, *integers, *scales]


def _factors(ctx: mlir.LoweringRuleContext, call: Call, route: Route) -> list[Array]:
    """Returns the arrays that are multiplied, in the kernel's order."""
    request, (left, *rights) = call.request, call.values
    assert route.gemm
    inputs = [_stored(ctx, left, request.lhs_dtype)]
    inputs += [_stored(ctx, right, request.rhs_dtype) for right in rights]
    inputs = [
        _with_whole_line(ctx, x) if min(i, 1) in route.gemm.padded else x
        for i, x in enumerate(inputs)
    ]
    if route.spec and route.spec.reads_parts:
        letters = [request.subscripts.lhs, *[request.subscripts.rhs] * request.num_b]
        contracted, terms = request.subscripts.contracted, route.spec.bf16_terms
        for i, of in enumerate(letters):  # another kernel cuts them, along neighbouring axes
            first = min(map(of.index, contracted))
            cut = partial(cut_along, first=first, end=first + len(contracted), terms=terms)
            (inputs[i],) = inputs[i].changed(ctx, cut)
            inputs[i].value.owner.attributes[CUT] = ir.UnitAttr.get()
    return inputs[::-1] if route.gemm.swap_ab else inputs


def cut_along(x: jax.Array, first: int, end: int, terms: int) -> jax.Array:
    """Returns the bfloat16 parts of float32 for so many terms, stored as `bf16_parts` describes.

    A kernel writes them, so this is for programs on a GPU.

    Args:
      first, end: the axes that are K, which the result has as one.
    """
    outer, k, inner = x.shape[:first], prod(x.shape[first:end]), x.shape[end:]
    batch, rows, columns = (prod(outer), k, prod(inner)) if inner else (1, prod(outer), k)
    along = "rows" if inner else "columns"
    spec = CutSpec(num_parts(terms), along, aligned=bool(inner) or columns % VECTOR == 0)
    attributes = launch_attributes(
        spec, make_cut_plan(spec, batch, rows, columns), f"B={batch} R={rows} C={columns}"
    )
    parts = jax.ShapeDtypeStruct((*outer, stored_k(k, terms), *inner), jnp.bfloat16)
    return jax.ffi.ffi_call(TARGET, parts)(x, **attributes)


def _with_whole_line(ctx: mlir.LoweringRuleContext, array: Array) -> Array:
    """Returns an operand whose lines XLA pads with zeros to multiples of 16 bytes."""
    missing = -array.aval.shape[-1] % (TMA_ALIGNMENT // array.aval.dtype.itemsize)
    padding = [(0, 0)] * (array.aval.ndim - 1) + [(0, missing)]
    (whole,) = array.changed(ctx, lambda x: in_words(jnp.pad(x, padding)))
    return whole


def _stored(ctx: mlir.LoweringRuleContext, value: Any, dtype: str) -> Array:
    """Returns an operand as a kernel reads it: int4 packed in uint8, by XLA if it is not yet."""
    if DTYPES[dtype].packed == 1:
        return Array.of(value, dtype)
    if str(value.type.element_type) == DTYPES[dtype].mlir:
        (stored,) = Array.of(value, jnp.int4).changed(ctx, pack)
        return stored
    return Array.of(value, np.uint8)


def _epilogue_operands(ctx: mlir.LoweringRuleContext, call: Call, route: Route) -> list[Array]:
    """Returns what epilogues read, in the kernel's dtypes."""
    inputs, arrays = [], list(map(Array, call.operands, call.avals))
    for part, (own, _) in zip(route.apart or (route,), call.request.slices, strict=True):
        assert part.fusion
        of_part = arrays[own]
        for index, operand in zip(part.fusion.operands, part.fusion.graph.operands, strict=True):
            array, dtype = of_part[index], operand.dtype
            if name_of(array.aval.dtype) != dtype:
                (array,) = array.changed(ctx, lambda x, to=dtype: x.astype(to))
            inputs.append(array)
    return inputs


def overwritten(call: Call) -> tuple[int | None, ...]:
    """Returns the `in_place` of a call without operands that must stay as they are.

    XLA copies an operand that is read later, also what the caller of the program keeps. So nothing
    of the caller's is taken that is not donated, nor what is multiplied: tiles read it to the end.
    """

    def stays(value: ir.Value) -> bool:
        return _kept(value) or any(value == x for x in call.values)

    return tuple(None if x is None or stays(call.operands[x]) else x for x in call.in_place)


def overwriting_results(
    avals: Sequence[Any], in_place: Sequence[int | None], fusion: Fusion, results: Sequence[Any]
) -> dict[int, int]:
    """Returns for operands of the epilogue the number of the result that takes their memory.

    Args:
      avals: of the function's operands.
      in_place: for the function's first results, which of these it takes.
      results: abstract values of those that the kernel writes.
    """
    overwritten: dict[int, int] = {}
    pairs = zip(fusion.operands, fusion.graph.operands, strict=True)
    for place, (index, operand) in enumerate(pairs):
        if index not in in_place:
            continue
        number = in_place.index(index)
        if operand.kind == "matrix" and number < len(results):
            aval, result = avals[index], results[number]
            if (aval.shape, aval.dtype) == (result.shape, result.dtype):
                overwritten[place] = number
    return overwritten


def _kept(value: ir.Value) -> bool:
    """Whether a value is an argument of the whole program that the caller does not donate."""
    if not isinstance(value.owner, ir.Block) or not is_whole_program(value.owner.owner):
        return False
    arguments = ir.ArrayAttr(value.owner.owner.attributes["arg_attrs"])
    attributes = arguments[ir.BlockArgument(value).arg_number]
    donated = ("tf.aliasing_output", "jax.buffer_donor")
    return not any(name in ir.DictAttr(attributes) for name in donated)


def _scales(ctx: mlir.LoweringRuleContext, call: Call, route: Route) -> list[Array]:
    """Returns scales as a kernel reads them: those of groups along K, or of blocks in its order."""
    assert route.gemm
    request, p, values = call.request, route.gemm.problem, call.scales
    if request.k_group:
        arranged = [partial(_by_groups, request=request, problem=p)] * len(values)
    else:
        values = values[::-1] if route.gemm.swap_ab else values
        arranged = [partial(_as_read, length=x.k_stride) for x in (p.a_scales, p.b_scales) if x]
    pairs = zip(values, arranged, strict=True)
    return [each for x, by in pairs for each in Array.of(x, np.float32).changed(ctx, by)]


def _by_groups(scale: jax.Array, *, request: Request, problem: GemmProblem) -> list[jax.Array]:
    """Returns scales that broadcast against the right operand as (L, blocks along K, N) each."""
    subscripts, extents = request.subscripts, request.extents
    batch, columns = scale_letters(request, problem)
    up, letters = request.gate_up, subscripts.rhs
    groups = scale.shape[letters.index(subscripts.contracted)]
    shape = [groups if x in subscripts.contracted else extents[x] for x in letters]
    order = [letters.index(x) for x in up + batch + subscripts.contracted + columns]
    each = jnp.transpose(jnp.broadcast_to(scale, shape), order)
    return list(each.reshape(2 if up else 1, -1, groups, problem.n))


def pack(values: jax.Array) -> jax.Array:
    """Returns int4 as uint8: two neighbours along the last axis each, the first in the low bits."""
    pairs = values.reshape(*values.shape[:-1], values.shape[-1] // 2, 2)
    return lax.bitcast_convert_type(pairs, jnp.uint8)


def in_words(x: jax.Array) -> jax.Array:
    """Returns the same array; that of 16 bits as XLA's kernels for GPUs write it soonest.

    They write a number after another, or such words of two in 0.3 to 0.9 of the time.
    """
    if x.dtype.itemsize != 2 or x.shape[-1] % 2:
        return x
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    pairs = bits.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    words = lax.index_in_dim(pairs, 0, -1, False) | (lax.index_in_dim(pairs, 1, -1, False) << 16)
    return lax.bitcast_convert_type(words, x.dtype).reshape(x.shape)


def _as_read(scale: jax.Array, length: int) -> jax.Array:
    """Returns scales by blocks of K first, then by lines, with zeros up to `length`."""
    across = jnp.swapaxes(scale, -1, -2)
    padding = [(0, 0)] * (scale.ndim - 1) + [(0, length - across.shape[-1])]
    return jnp.pad(across, padding)


# What the FFI library is told of a kernel.


def product_attributes(problem: GemmProblem, spec: GemmSpec, plan: LaunchPlan) -> dict[str, Any]:
    extents = f"M={problem.m} N={problem.n} K={problem.k} L={problem.l}"
    return launch_attributes(spec, plan, extents)


@memoised
def launch_attributes(spec: KernelSpec, plan: LaunchPlan, extents: str) -> dict[str, Any]:
    """Returns the attributes of an FFI call; errors name the kernel and the extents."""
    from ..cubin import digest_of_json  # brings cuda-python with it

    spec_json = spec.to_json()
    return {
        "digest": digest_of_json(spec_json),
        "spec": spec_json,
        "name": f"{spec.name} {extents}",
        "plan": np.array(plan.encode(), np.int64),
    }
