"""Products with an epilogue in a program that XLA partitions over devices.

What a kernel would compute of the function goes into the custom call, as the graph that a kernel's
spec holds: plain data, for any extents. What XLA computes after the kernel stays in the program.
What a device runs is in `fused_shards`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import mlir

from ..fusion import Fusion
from ..gemm.dtypes import residual_of
from ..gemm.groups import GROUP, is_varlen_k
from ..gemm.product import Product
from ..gemm.subscripts import Subscripts
from ..lowering.call import Call
from ..lowering.route import Roles, Route
from ..sharding.choose_shards import Factors
from ..sharding.custom_call import constrained, emit
from .call_words import FusedProduct, precision_names
from .ragged_dot_sharded import ENTRIES, SIZES

NAME, RAGGED = "hopper_fused", "hopper_fused_ragged"  # the latter of ragged products
RESULTS = {"matrix", "row_sum"}  # what shards of these make; others stay apart from the product


def route_partitioned(ctx: mlir.LoweringRuleContext, call: Call) -> Route | None:
    """Returns how a product and its function run whole; None where shards cannot run them fused."""
    route = call.route(ctx, kernel_only=call.insists)
    fusion = route.fusion
    if fusion is None or (fusion.uncovered and route.path == "xla") or call.left_to_xla(ctx):
        return None
    kinds = {result.kind for result in fusion.graph.results}
    if any(kind.startswith("top_k") for kind in kinds) or (call.request.groups and kinds - RESULTS):
        return None
    return route


def emit_fused(ctx: mlir.LoweringRuleContext, call: Call, route: Route) -> list[Any] | None:
    """Emits a product with its function, by `route_partitioned`; None where it is another way."""
    assert route.fusion and route.roles
    if precision_names(call.request.options.precision) is None:
        return None
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):  # XLA finds shardings
        values = _emit(ctx, call, route.fusion, route.roles)
    return values and constrained(ctx, values, ctx.avals_out)


def _emit(
    ctx: mlir.LoweringRuleContext, call: Call, fusion: Fusion, axes: Roles
) -> list[Any] | None:
    request, subscripts, graph = call.request, call.request.subscripts, fusion.graph
    product = Product(subscripts, request.options, groups=request.groups and request.groups.rule)
    planes = next(subscripts.fresh_letters())
    extents = request.extents | {planes: 2}
    results = [
        ("".join(along).replace("?", planes), result.dtype)
        for result, along in zip(graph.results, fusion.results, strict=True)
        for _ in range(2 if result.kind == "row_sumexp" else result.plane == 0)
    ]
    letters = Factors(
        factors=(subscripts.lhs, *[subscripts.rhs] * request.num_b), out=subscripts.out,
        results=tuple(along for along, _ in results), others=fusion.labels,
        whole=product.gate_up + planes,
    )  # fmt: skip
    arrays = [
        ShapedArray([extents[x] for x in along], np.dtype(jnp.dtype(dtype)))
        for along, dtype in results
    ]
    shapes = [[extents[x] for x in along] for along in fusion.labels]
    avals = [ShapedArray(x.shape, x.dtype) for x in call.avals]
    read = mlir.lower_fun(partial(_read, fusion, shapes), multiple_results=True)
    operands = read(ctx.replace(avals_in=avals), *call.operands)
    fused = FusedProduct(
        graph, product, axes.m, axes.n,
        tuple(fusion.operands.index(x) if x in fusion.operands else None for x in call.in_place),
    )  # fmt: skip
    name, values = NAME, [*call.values, *operands]
    if product.groups:
        name, letters = RAGGED, _with_sizes(letters, subscripts)
        values.append(call.sizes)
    residual = residual_of(request.lhs_dtype)
    emitted = emit(
        ctx, name, values, letters, fused.to_dict(), avals_out=arrays,
        sum_dtype=residual if {x.dtype for x in graph.matrices} == {residual} else "float32",
    )  # fmt: skip
    if emitted is None:
        return None
    finish = mlir.lower_fun(fusion.finish, multiple_results=True)
    return list(finish(ctx.replace(avals_in=[*arrays, *avals]), *emitted, *call.operands))


def _with_sizes(letters: Factors, subscripts: Subscripts) -> Factors:
    """Returns the letters of a product and its operands with those of sizes, the last operand.

    Each device reads what all groups have for their rows: which ones its rows are in, sizes say.
    """
    others = letters.others
    if not is_varlen_k(subscripts):
        others = tuple(names.replace(GROUP, ENTRIES) for names in others)
    return replace(
        letters, others=(*others, SIZES), whole=letters.whole + SIZES + ENTRIES, picked=GROUP
    )


def _read(fusion: Fusion, shapes: Sequence[Sequence[int]], *operands: Any) -> list[Any]:
    """Returns what the graph reads, with an axis for each letter."""
    pairs = zip(fusion.operands, fusion.graph.operands, shapes, strict=True)
    return [operands[index].astype(operand.dtype).reshape(shape) for index, operand, shape in pairs]
