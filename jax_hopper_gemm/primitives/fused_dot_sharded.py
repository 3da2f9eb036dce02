"""Products with an epilogue in a program that XLA partitions over devices.

What a kernel would compute of the function goes into the custom call, as the graph that a kernel's
spec holds: plain data, for any extents. What XLA computes after the kernel stays in the program.

A device that has all of K runs one kernel, of a ragged product on its rows and groups. Where it has
some of the groups, the rows of others are 0 in what it stores, and the results add up over devices.
Else the products of the shards add up, and the graph follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
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
from ..gemm.epilogue_graph import EpilogueGraph
from ..gemm.groups import GROUP, Groups, is_varlen_k
from ..gemm.product import Product
from ..gemm.subscripts import Subscripts
from ..lowering.call import Call
from ..lowering.route import Roles, Route
from ..sharding.choose_shards import Factors
from ..sharding.custom_call import constrained, emit
from ..sharding.shard import ShardContext
from .accumulators import accumulators_of
from .call_words import FusedProduct, precision_names
from .ragged_dot_sharded import ENTRIES, SIZES, Part, RaggedShard
from .segments import segment_broadcast, segment_mask

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


# On a device.


def fused_of_shards(
    bind: Callable[..., Any], context: ShardContext, *shards: jax.Array, **params: Any
) -> list[jax.Array]:
    """The program of a shard, by `params` of a `FusedProduct`; `bind` binds `hopper_fused_p`.

    `shards` are factors, operands of the graph, and of a ragged product the sizes, whole.
    """
    fused, letters = FusedProduct.from_dict(params), context.letters
    graph, product, count = fused.graph, fused.product, len(letters.factors)
    (lhs, *right_operands), operands = shards[:count], list(shards[count:])
    rule, rows = product.groups, product.groups and not is_varlen_k(product.subscripts)
    shard = RaggedShard.of(rule, context.part) if rule else RaggedShard(Groups.plain(0))
    sizes, length = [operands.pop()] if rule else [], lhs.shape[0] * shard.rows.count
    own = [shard.own_sizes(x, length) for x in sizes]  # that cut the device's rows
    product = replace(product, groups=rule and shard.own_rule())
    cut = any(context.shard.axes[x] for x in letters.contracted if x not in letters.picked)
    if cut or _sums_first(fused, context, bool(rows)):
        if cut or rule:
            dtype = np.dtype(jnp.dtype(context.sum_dtype))
            product = product.with_options(preferred_element_type=dtype)
        products = accumulators_of(product, lhs, right_operands, *own)
        products = [context.sum(x) for x in products]
        if not rule and _is_sum(graph, str(product.options.preferred_element_type)):
            # As plain as this, XLA adds up shards of both before it.
            return [products[0] + operands[0]]
        if rows:
            behind = RaggedShard(shard.rule, rows=Part(*context.part("m", summed=True)))
            own = [behind.own_sizes(x, length) for x in sizes]
        accumulators = [x.astype(jnp.float32) for x in products]
        return _followed(fused, letters, rule, accumulators, own, operands, reduce=context.reduce)
    if rows:
        pairs = zip(operands, letters.others, strict=False)
        operands = [shard.groups.of(x) if ENTRIES in names else x for x, names in pairs]
    like = partial(accumulators_of, product, by_xla=True)
    accumulators = abstract(like, lhs, right_operands, *own)
    ends = len(accumulators), len(accumulators) + len(own)

    def function(*args: Any) -> list[Any]:
        parts = args[: ends[0]], args[slice(*ends)], args[ends[1] :]
        return _followed(fused, letters, product.groups, *parts)

    outputs = bind(
        lhs, *right_operands, *own, *operands,
        jaxpr=traced(function, *accumulators, *own, *operands), product=product,
        num_b=len(right_operands),
        in_place=tuple(None if x is None else x + len(own) for x in fused.in_place),
    )  # fmt: skip
    return _over_devices(context, fused, outputs)


def _sums_first(fused: FusedProduct, context: ShardContext, rows: bool) -> bool:
    """Whether products of shards are summed before the graph follows, though none lacks some of K.

    Where only groups are sharded, each row is whole on one device: what is summed then are the
    results, unless these are more bytes, are no matrices, or read what lies as behind the sum.
    """
    graph, shard, letters = fused.graph, context.shard, context.letters
    if graph.needs_whole_rows and any(map(shard.result, fused.n)):
        return True
    if not rows or not shard.axes[letters.picked]:
        return False
    stored = sum(jnp.dtype(result.dtype).itemsize for result in graph.matrices)
    return (
        stored > graph.accumulators * jnp.dtype(context.sum_dtype).itemsize
        or any(result.kind != "matrix" for result in graph.results)
        or any(letter in shard.scattered for letter in "".join(letters.others))
    )


def _is_sum(graph: EpilogueGraph, dtype: str) -> bool:
    """Whether a graph adds one matrix to the product, all of this dtype."""
    plain = [(x.kind, x.dtype) for x in (*graph.operands, *graph.results)]
    adds = [(node.op, sorted(node.args)) for node in graph.nodes]
    return plain == [("matrix", dtype)] * 2 and adds == [("add", [0, 1])]


def _followed(
    fused: FusedProduct,
    letters: Factors,
    rule: Groups | None,
    accumulators: Sequence[Any],
    sizes: Sequence[Any],
    operands: Sequence[Any],
    **options: Any,
) -> list[Any]:
    """Returns what the graph makes of accumulators; of rows in groups 0 in rows of no group.

    `rule` says which of the runs that `sizes` cut belong to groups; None: there are none.
    """
    graph, m = fused.graph, fused.m
    arrays, names = list(operands), list(letters.others[: len(operands)])
    rows = rule if rule and not is_varlen_k(fused.product.subscripts) else None
    for i, own in enumerate(names):
        if rows and ENTRIES in own:
            assert own[0] == ENTRIES, own
            arrays[i] = segment_broadcast(arrays[i], sizes[0], rows, accumulators[0].shape[0])
            names[i] = m + own[1:]
    results = evaluate(graph, [*accumulators, *arrays], names, letters.out, m, fused.n, **options)
    if rows is None:
        return results
    whole = [result for result in graph.results if result.plane == 0]
    return [
        segment_mask(x, sizes[0], rows) if result.kind == "matrix" else x
        for x, result in zip(results, whole, strict=True)
    ]


def _over_devices(context: ShardContext, fused: FusedProduct, outputs: Sequence[Any]) -> list[Any]:
    """Returns the results of the shards, summed and reduced over devices, too."""
    waiting, found, letters = list(outputs), [], context.letters
    for result in fused.graph.results:
        if result.plane:
            continue
        x = waiting.pop(0)
        match result.kind:
            case "matrix":
                found.append(context.sum(x, letters.results[len(found)]))
            case "column_sum" | "row_sum" | "row_max" | "max":
                reduced = reduced_by(result, letters.out, fused.m, fused.n)
                found.append(context.reduce(x, *reduced))
            case "row_sumexp":
                largest = context.reduce(x, fused.n, "max")
                base, own = (jnp.where(jnp.isfinite(y), y, 0.0) for y in (largest, x))
                total = waiting.pop(0)
                total = jnp.where(total == 0, 0.0, total * jnp.exp(own - base))
                found += [largest, context.reduce(total, fused.n, "add")]
    return found
