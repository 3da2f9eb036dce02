"""A device's share of a ragged product with an epilogue.

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
from .fused_call import FusedProduct
from .ragged_shards import ENTRIES, SIZES, Part, RaggedShare
from .segments import segment_broadcast, segment_mask

NAME = "hopper_fused_ragged"
RESULTS = {"matrix", "row_sum"}  # what shares are made of; others stay apart from the product


def with_sizes(labels: Factors, subscripts: Subscripts) -> Factors:
    """Returns the labels of a product and its operands with those of sizes, the last operand.

    Each device reads what all groups have for their rows: which ones its rows are in, sizes say.
    """
    others = labels.others
    if not is_varlen_k(subscripts):
        others = tuple(names.replace(GROUP, ENTRIES) for names in others)
    return replace(
        labels, others=(*others, SIZES), whole=labels.whole + SIZES + ENTRIES, picked=GROUP
    )


def fused_of_ragged_shards(
    fused: Callable[..., Any], local: ShardContext, *shards: jax.Array, **params: Any
) -> list[jax.Array]:
    """The program of a share.

    Args:
      fused: `hopper_fused_p.bind`.
      *shards: factors, operands of the graph, and the sizes, whole.
      **params: of a `FusedProduct` that has groups.
    """
    product, labels = FusedProduct.from_dict(params), local.letters
    graph, m, n, in_place = product.graph, product.m, product.n, product.in_place
    count, rows = len(labels.factors), not is_varlen_k(product.subscripts)
    (lhs, *rights), operands, sizes = shards[:count], shards[count:-1], shards[-1]
    assert product.groups
    share = RaggedShare.of(product.groups, local.part)
    length = lhs.shape[0] * share.rows.count
    own_sizes, own_groups = share.local_sizes(sizes, length), share.local_rule()
    accumulate = product.accumulate(own_groups)
    follow = partial(_follow, graph, labels.others[:-1], labels.out, m, n, rows)
    if _sums_first(graph, local, n, rows):
        dtype = np.dtype(jnp.dtype(local.sum_dtype))
        products = replace(accumulate, dtype=dtype)(lhs, rights, own_sizes)
        accumulators = [local.sum(x).astype(jnp.float32) for x in products]
        if rows:
            behind = RaggedShare(share.rule, rows=Part(*local.part("m", summed=True)))
            own_sizes = behind.local_sizes(sizes, length)
        return follow(accumulators, operands, own_sizes, share.rule, reduce=local.reduce)
    if rows:
        operands = [
            _entries_of(share.groups, x) if ENTRIES in names else x
            for x, names in zip(operands, labels.others, strict=False)
        ]
    accumulators = jax.eval_shape(partial(accumulate, by_xla=True), lhs, rights, own_sizes)
    split = len(accumulators)

    def function(*args: Any) -> list[Any]:
        return follow(args[:split], args[split + 1 :], args[split], own_groups)

    outputs = fused(
        lhs, *rights, own_sizes, *operands,
        jaxpr=traced(function, *accumulators, own_sizes, *operands), rights=len(rights),
        accumulate=accumulate, preactivation="save",
        in_place=None if in_place is None else in_place + 1,
    )  # fmt: skip
    whole = [result for result in graph.results if result.plane == 0]
    return [
        local.sum(x, names) if result.kind == "matrix" else local.reduce(x, n, "add")
        for x, names, result in zip(outputs, labels.results, whole, strict=True)
    ]


def _sums_first(graph: EpilogueGraph, local: ShardContext, n: str, rows: bool) -> bool:
    """Whether the products of shards are summed over devices before the graph follows.

    Where only groups are sharded, each row is whole on one device: what is summed then are the
    results, unless these are more bytes, are no matrices, or read what lies as behind the sum.
    """
    axes, labels = local.shard.axes, local.letters
    if any(axes[letter] for letter in labels.contracted if letter != GROUP):
        return True
    if graph.needs_whole_rows and local.shard.result(n):
        return True
    if not rows or not axes[GROUP]:
        return False
    stored = sum(jnp.dtype(result.dtype).itemsize for result in graph.matrices)
    return (
        stored > graph.accumulators * jnp.dtype(local.sum_dtype).itemsize
        or any(result.kind != "matrix" for result in graph.results)
        or any(letter in local.shard.scattered for letter in "".join(labels.others))
    )


def _entries_of(groups: Part, x: jax.Array) -> jax.Array:
    """Returns the entries of the device's groups, of an array with those of all in front."""
    count = x.shape[0] // groups.count
    return lax.dynamic_slice_in_dim(x, groups.index * count, count)


def _follow(
    graph: EpilogueGraph,
    labels: Sequence[str],
    out: str,
    m: str,
    n: str,
    rows: bool,
    accumulators: Sequence[Any],
    operands: Sequence[Any],
    sizes: Any,
    groups: Groups,
    **options: Any,
) -> list[Any]:
    """Returns what the graph makes of accumulators; of `rows`, 0 in those of no group."""
    arrays, names = list(operands), list(labels)
    if not rows:
        return evaluate(graph, [*accumulators, *arrays], names, out, m, n, **options)
    length = accumulators[0].shape[0]
    for i, letters in enumerate(labels):
        if ENTRIES in letters:
            assert letters[0] == ENTRIES, letters
            arrays[i] = segment_broadcast(arrays[i], sizes, groups, length)
            names[i] = m + letters[1:]
    found = evaluate(graph, [*accumulators, *arrays], names, out, m, n, **options)
    whole = [result for result in graph.results if result.plane == 0]
    return [
        segment_mask(x, sizes, groups) if result.kind == "matrix" else x
        for x, result in zip(found, whole, strict=True)
    ]
