"""A device's shard of a ragged product with an epilogue.

A device that has all of K runs one kernel on its rows and groups. Where it has some of the groups,
the rows of others are 0 in what it stores, and the results add up over devices. Else the products
of the shards add up, and the graph follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from ..fusion import evaluate
from ..fusion.jaxprs import traced
from ..gemm.epilogue_graph import EpilogueGraph
from ..gemm.groups import GROUP, Groups, is_varlen_k
from ..gemm.subscripts import Subscripts
from ..sharding.choose_shards import Factors
from ..sharding.shard import ShardContext
from .accumulators import accumulators_of
from .call_words import FusedProduct
from .ragged_dot_sharded import ENTRIES, SIZES, Part, RaggedShard
from .segments import segment_broadcast, segment_mask

NAME = "hopper_fused_ragged"
RESULTS = {"matrix", "row_sum"}  # what shards are made of; others stay apart from the product


def with_sizes(letters: Factors, subscripts: Subscripts) -> Factors:
    """Returns the letters of a product and its operands with those of sizes, the last operand.

    Each device reads what all groups have for their rows: which ones its rows are in, sizes say.
    """
    others = letters.others
    if not is_varlen_k(subscripts):
        others = tuple(names.replace(GROUP, ENTRIES) for names in others)
    return replace(
        letters, others=(*others, SIZES), whole=letters.whole + SIZES + ENTRIES, picked=GROUP
    )


def fused_of_ragged_shards(
    bind: Callable[..., Any], context: ShardContext, *shards: jax.Array, **params: Any
) -> list[jax.Array]:
    """The program of a shard, by `params` of a `FusedProduct` that has groups.

    `bind` binds `hopper_fused_p`; `shards` are factors, operands of the graph, the sizes, whole.
    """
    fused, letters = FusedProduct.from_dict(params), context.letters
    graph, n, product = fused.graph, fused.n, fused.product
    count, rows = len(letters.factors), not is_varlen_k(product.subscripts)
    (lhs, *right_operands), operands, sizes = shards[:count], shards[count:-1], shards[-1]
    assert product.groups
    shard = RaggedShard.of(product.groups, context.part)
    length = lhs.shape[0] * shard.rows.count
    own_sizes, own_rule = shard.own_sizes(sizes, length), shard.own_rule()
    product = replace(product, groups=own_rule)
    follow = partial(_results_of, fused, letters)
    if _sums_first(graph, context, n, rows):
        dtype = np.dtype(jnp.dtype(context.sum_dtype))
        product = product.with_options(preferred_element_type=dtype)
        products = accumulators_of(product, lhs, right_operands, own_sizes)
        accumulators = [context.sum(x).astype(jnp.float32) for x in products]
        if rows:
            behind = RaggedShard(shard.rule, rows=Part(*context.part("m", summed=True)))
            own_sizes = behind.own_sizes(sizes, length)
        return follow(accumulators, operands, own_sizes, shard.rule, reduce=context.reduce)
    if rows:
        operands = [
            _entries_of(shard.groups, x) if ENTRIES in names else x
            for x, names in zip(operands, letters.others, strict=False)
        ]
    accumulators = jax.eval_shape(
        partial(accumulators_of, product, by_xla=True), lhs, right_operands, own_sizes
    )
    split = len(accumulators)

    def function(*args: Any) -> list[Any]:
        return follow(args[:split], args[split + 1 :], args[split], own_rule)

    outputs = bind(
        lhs, *right_operands, own_sizes, *operands,
        jaxpr=traced(function, *accumulators, own_sizes, *operands), product=product,
        num_b=len(right_operands),
        in_place=tuple(None if x is None else x + 1 for x in fused.in_place),
    )  # fmt: skip
    whole = [result for result in graph.results if result.plane == 0]
    return [
        context.sum(x, names) if result.kind == "matrix" else context.reduce(x, n, "add")
        for x, names, result in zip(outputs, letters.results, whole, strict=True)
    ]


def _sums_first(graph: EpilogueGraph, context: ShardContext, n: str, rows: bool) -> bool:
    """Whether the products of shards are summed over devices before the graph follows.

    Where only groups are sharded, each row is whole on one device: what is summed then are the
    results, unless these are more bytes, are no matrices, or read what lies as behind the sum.
    """
    axes, letters = context.shard.axes, context.letters
    if any(axes[letter] for letter in letters.contracted if letter != GROUP):
        return True
    if graph.needs_whole_rows and context.shard.result(n):
        return True
    if not rows or not axes[GROUP]:
        return False
    stored = sum(jnp.dtype(result.dtype).itemsize for result in graph.matrices)
    return (
        stored > graph.accumulators * jnp.dtype(context.sum_dtype).itemsize
        or any(result.kind != "matrix" for result in graph.results)
        or any(letter in context.shard.scattered for letter in "".join(letters.others))
    )


def _entries_of(groups: Part, x: jax.Array) -> jax.Array:
    """Returns the entries of the device's groups, of an array with those of all in front."""
    count = x.shape[0] // groups.count
    return lax.dynamic_slice_in_dim(x, groups.index * count, count)


def _results_of(
    fused: FusedProduct,
    letters: Factors,
    accumulators: Sequence[Any],
    operands: Sequence[Any],
    sizes: Any,
    rule: Groups,
    **options: Any,
) -> list[Any]:
    """Returns what the graph makes of accumulators; of rows in groups 0 in rows of no group."""
    graph, m = fused.graph, fused.m
    arrays, names = list(operands), list(letters.others[:-1])
    rows = not is_varlen_k(fused.product.subscripts)
    for i, own in enumerate(names):
        if rows and ENTRIES in own:
            assert own[0] == ENTRIES, own
            arrays[i] = segment_broadcast(arrays[i], sizes, rule, accumulators[0].shape[0])
            names[i] = m + own[1:]
    results = evaluate(graph, [*accumulators, *arrays], names, letters.out, m, fused.n, **options)
    whole = [result for result in graph.results if result.plane == 0]
    return [
        segment_mask(x, sizes, rule) if rows and result.kind == "matrix" else x
        for x, result in zip(results, whole, strict=True)
    ]
