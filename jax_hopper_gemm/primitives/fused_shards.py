"""A device's shard of a product with an epilogue, ragged or not.

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

from ..fusion import evaluate, reduced_by
from ..fusion.jaxprs import abstract, traced
from ..gemm.epilogue_graph import EpilogueGraph
from ..gemm.groups import Groups, is_varlen_k
from ..sharding.choose_shards import Factors
from ..sharding.shard import ShardContext
from .accumulators import accumulators_of
from .call_words import FusedProduct
from .ragged_dot_sharded import ENTRIES, Part, RaggedShard
from .segments import segment_broadcast, segment_mask


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
