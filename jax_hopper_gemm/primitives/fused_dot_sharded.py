"""Products with an epilogue in a program that XLA partitions over devices.

What a kernel would compute of the function goes into the custom call, as the graph that a kernel's
spec holds: plain data, for any extents. What XLA computes after the kernel stays in the program. A
device whose share has all of K runs one kernel; else the products of the shards are summed over
devices, and the graph follows.
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

from ..fusion import Fusion, evaluate
from ..fusion.jaxprs import abstract, traced
from ..gemm.epilogue_graph import EpilogueGraph, Result
from ..gemm.groups import gate_up_letter
from ..launch.ffi_target import launcher_violation
from ..lowering.call import Call
from ..lowering.devices import platforms_of
from ..lowering.route import Roles, Route
from ..sharding.choose_shards import Factors
from ..sharding.custom_call import constrained, emit, precision_names
from ..sharding.shard import ShardContext
from .fused_call import FusedProduct
from .fused_ragged_sharded import NAME as RAGGED
from .fused_ragged_sharded import RESULTS, with_sizes

NAME = "hopper_fused"


def route_partitioned(ctx: mlir.LoweringRuleContext, call: Call, *, insist: bool) -> Route | None:
    """Returns how a product and its function run whole; None where shares cannot run them fused."""
    found = call.route(ctx, kernel_only=insist)
    fusion = found.fusion
    if fusion is None or (fusion.uncovered and found.path == "xla"):
        return None
    if platforms_of(ctx) == ("cuda",) and (not found.supported or launcher_violation()):
        return None
    kinds = {result.kind for result in fusion.graph.results}
    if any(kind.startswith("top_k") for kind in kinds) or (call.product.groups and kinds - RESULTS):
        return None
    return found


def emit_fused(
    ctx: mlir.LoweringRuleContext,
    call: Call,
    found: Route,
    *,
    precision: Any,
    implementation: str | None,
) -> list[Any] | None:
    """Emits a product with its function; None where it must be another way.

    Args:
      call: the product, and what the function reads.
      found: of `route_partitioned`.
    """
    fusion, axes = found.fusion, found.roles
    names = precision_names(precision)
    assert fusion and axes
    if names is None:
        return None
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):  # XLA finds shardings
        values = _emit(ctx, call, fusion, axes, names, implementation)
    return values and constrained(ctx, values, ctx.avals_out)


def _emit(
    ctx: mlir.LoweringRuleContext,
    call: Call,
    fusion: Fusion,
    axes: Roles,
    precision: list[str],
    implementation: str | None,
) -> list[Any] | None:
    product, subscripts, graph = call.product, call.product.subscripts, fusion.graph
    planes = next(subscripts.fresh_letters())
    gate_up = gate_up_letter(subscripts) if product.groups else subscripts.gate_up
    extents = product.extents | {planes: 2}
    results = [
        ("".join(along).replace("?", planes), result.dtype)
        for result, along in zip(graph.results, fusion.results, strict=True)
        for _ in range(2 if result.kind == "row_sumexp" else result.plane == 0)
    ]
    labels = Factors(
        factors=(subscripts.lhs, *[subscripts.rhs] * product.rights), out=subscripts.out,
        results=tuple(along for along, _ in results), others=fusion.labels,
        whole=gate_up + planes,
    )  # fmt: skip
    arrays = [
        ShapedArray([extents[x] for x in along], np.dtype(jnp.dtype(dtype)))
        for along, dtype in results
    ]
    shapes = [[extents[x] for x in along] for along in fusion.labels]
    avals = [ShapedArray(x.shape, x.dtype) for x in call.avals]
    read = mlir.lower_fun(partial(_read, fusion, shapes), multiple_results=True)
    operands = read(ctx.replace(avals_in=avals), *call.operands)
    in_place = call.in_place if call.in_place in fusion.operands else None
    fused = FusedProduct(
        graph, subscripts, axes.m, axes.n, precision, implementation, product.max_sms,
        None if in_place is None else fusion.operands.index(in_place),
        product.groups and product.groups.rule,
    )  # fmt: skip
    name, values = NAME, [*call.values, *operands]
    if product.groups:
        name, labels = RAGGED, with_sizes(labels, subscripts)
        values.append(call.sizes)
    emitted = emit(
        ctx, name, values, labels, fused.to_dict(), avals_out=arrays,
        sum_dtype=_sum_dtype(graph, product.lhs_dtype),
    )  # fmt: skip
    if emitted is None:
        return None
    finish = mlir.lower_fun(fusion.finish, multiple_results=True)
    return list(finish(ctx.replace(avals_in=[*arrays, *avals]), *emitted, *call.operands))


def _read(fusion: Fusion, shapes: Sequence[Sequence[int]], *operands: Any) -> list[Any]:
    """Returns what the graph reads, with an axis for each letter."""
    pairs = zip(fusion.operands, fusion.graph.operands, shapes, strict=True)
    return [operands[index].astype(operand.dtype).reshape(shape) for index, operand, shape in pairs]


def _sum_dtype(graph: EpilogueGraph, factors: str) -> str:
    """Returns the dtype of partial products: that of the factors if all is stored as they are."""
    stored = {result.dtype for result in graph.matrices}
    return factors if stored == {factors} else "float32"


# On a device.


def fused_of_shards(
    fused: Callable[..., Any], local: ShardContext, *shards: jax.Array, **params: Any
) -> list[jax.Array]:
    """The program of a share.

    Args:
      fused: `hopper_fused_p.bind`.
      **params: of a `FusedProduct`.
    """
    product = FusedProduct.from_dict(params)
    graph, m, n, accumulate = product.graph, product.m, product.n, product.accumulate()
    labels, count = local.letters, len(local.letters.factors)
    (lhs, *rights), operands = shards[:count], shards[count:]
    follow = partial(evaluate, graph, labels=labels.others, out=labels.out, m=m, n=n)
    cut = any(local.shard.axes[letter] for letter in labels.contracted)
    across = any(local.shard.result(letter) for letter in n)
    if cut or (across and graph.needs_whole_rows):
        dtype = np.dtype(jnp.dtype(local.sum_dtype)) if cut else accumulate.dtype
        products = [local.sum(x) for x in replace(accumulate, dtype=dtype)(lhs, rights)]
        if _is_sum(graph, str(dtype)):  # as plain as this, XLA adds up shards of both before it
            return [products[0] + operands[0]]  # sums over devices
        accumulators = [x.astype(jnp.float32) for x in products]
        return follow([*accumulators, *operands], reduce=local.reduce)
    accumulators = abstract(partial(accumulate, by_xla=True), lhs, rights)
    function = traced(lambda *args: follow(args), *accumulators, *operands)
    outputs = fused(
        lhs, *rights, *operands, jaxpr=function, rights=len(rights), accumulate=accumulate,
        preactivation="save", in_place=product.in_place,
    )  # fmt: skip
    return _over_devices(local, graph.results, outputs, m, n)


def _is_sum(graph: EpilogueGraph, dtype: str) -> bool:
    """Whether a graph adds one matrix to the product, all of this dtype."""
    plain = [(x.kind, x.dtype) for x in (*graph.operands, *graph.results)]
    adds = [(node.op, sorted(node.args)) for node in graph.nodes]
    return plain == [("matrix", dtype)] * 2 and adds == [("add", [0, 1])]


def _over_devices(
    local: ShardContext, results: Sequence[Result], outputs: Sequence[Any], m: str, n: str
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
            case "column_sum":
                found.append(local.reduce(x, m, "add"))
            case "row_sum":
                found.append(local.reduce(x, n, "add"))
            case "row_max":
                found.append(local.reduce(x, n, "max"))
            case "max":
                found.append(local.reduce(x, local.letters.out, "max"))
            case "row_sumexp":
                largest = local.reduce(x, n, "max")
                base, own = (jnp.where(jnp.isfinite(y), y, 0.0) for y in (largest, x))
                total = waiting.pop(0)
                total = jnp.where(total == 0, 0.0, total * jnp.exp(own - base))
                found += [largest, local.reduce(total, n, "add")]
    return found
