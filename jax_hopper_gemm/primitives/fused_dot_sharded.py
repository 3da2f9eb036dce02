"""Products with an epilogue in a program that XLA partitions over devices.

What a kernel would compute of the function goes into the custom call, as the graph that a kernel's
spec holds: plain data, for any extents. What XLA computes after the kernel stays in the program. A
device whose shard has all of K runs one kernel; else the products of the shards are summed over
devices, and the graph follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import mlir

from ..fusion import Fusion, evaluate, reduced_by
from ..fusion.jaxprs import abstract, traced
from ..gemm.dtypes import residual_of
from ..gemm.epilogue_graph import EpilogueGraph, Result
from ..gemm.product import Product
from ..lowering.call import Call
from ..lowering.route import Roles, Route
from ..sharding.choose_shards import Factors
from ..sharding.custom_call import constrained, emit
from ..sharding.shard import ShardContext
from .accumulators import accumulators_of
from .call_words import FusedProduct, precision_names
from .fused_ragged_sharded import NAME as RAGGED
from .fused_ragged_sharded import RESULTS, with_sizes

NAME = "hopper_fused"


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
        name, letters = RAGGED, with_sizes(letters, subscripts)
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


def _read(fusion: Fusion, shapes: Sequence[Sequence[int]], *operands: Any) -> list[Any]:
    """Returns what the graph reads, with an axis for each letter."""
    pairs = zip(fusion.operands, fusion.graph.operands, shapes, strict=True)
    return [operands[index].astype(operand.dtype).reshape(shape) for index, operand, shape in pairs]


# On a device.


def fused_of_shards(
    bind: Callable[..., Any], context: ShardContext, *shards: jax.Array, **params: Any
) -> list[jax.Array]:
    """The program of a shard, by `params` of a `FusedProduct`; `bind` binds `hopper_fused_p`."""
    fused = FusedProduct.from_dict(params)
    graph, m, n, product = fused.graph, fused.m, fused.n, fused.product
    letters, count = context.letters, len(context.letters.factors)
    (lhs, *right_operands), operands = shards[:count], shards[count:]
    follow = partial(evaluate, graph, labels=letters.others, out=letters.out, m=m, n=n)
    cut = any(context.shard.axes[letter] for letter in letters.contracted)
    across = any(context.shard.result(letter) for letter in n)
    if cut or (across and graph.needs_whole_rows):
        if cut:
            dtype = np.dtype(jnp.dtype(context.sum_dtype))
            product = product.with_options(preferred_element_type=dtype)
        products = [context.sum(x) for x in accumulators_of(product, lhs, right_operands)]
        if _is_sum(graph, str(product.options.preferred_element_type)):
            # As plain as this, XLA adds up shards of both before it.
            return [products[0] + operands[0]]
        accumulators = [x.astype(jnp.float32) for x in products]
        return follow([*accumulators, *operands], reduce=context.reduce)
    accumulators = abstract(partial(accumulators_of, product, by_xla=True), lhs, right_operands)
    function = traced(lambda *args: follow(args), *accumulators, *operands)
    outputs = bind(
        lhs, *right_operands, *operands, jaxpr=function, product=product, num_b=len(right_operands),
        in_place=fused.in_place,
    )  # fmt: skip
    return _over_devices(context, graph.results, outputs, m, n)


def _is_sum(graph: EpilogueGraph, dtype: str) -> bool:
    """Whether a graph adds one matrix to the product, all of this dtype."""
    plain = [(x.kind, x.dtype) for x in (*graph.operands, *graph.results)]
    adds = [(node.op, sorted(node.args)) for node in graph.nodes]
    return plain == [("matrix", dtype)] * 2 and adds == [("add", [0, 1])]


def _over_devices(
    context: ShardContext, results: Sequence[Result], outputs: Sequence[Any], m: str, n: str
) -> list[Any]:
    """Returns the results of the shards, with what is reduced, reduced over devices, too."""
    waiting, found = list(outputs), []
    for result in results:
        if result.plane:
            continue
        x = waiting.pop(0)
        match result.kind:
            case "matrix":
                found.append(x)
            case "column_sum" | "row_sum" | "row_max" | "max":
                found.append(context.reduce(x, *reduced_by(result, context.letters.out, m, n)))
            case "row_sumexp":
                largest = context.reduce(x, n, "max")
                base, own = (jnp.where(jnp.isfinite(y), y, 0.0) for y in (largest, x))
                total = waiting.pop(0)
                total = jnp.where(total == 0, 0.0, total * jnp.exp(own - base))
                found += [largest, context.reduce(total, n, "add")]
    return found
