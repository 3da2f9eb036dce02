"""Evaluation of a graph by JAX operations, on arrays of any extents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
from jax import lax
from jax import numpy as jnp

from ..gemm.epilogue_graph import EpilogueGraph, Node, Result

Reduce = Callable[[jax.Array, Iterable[str], Literal["add", "max"]], jax.Array]

# Operations that `jax.lax` has by another name.
_NAMES = {name: f"bitwise_{name}" for name in ("and", "or", "xor", "not")}


def evaluate(
    graph: EpilogueGraph,
    arrays: Sequence[jax.Array],
    labels: Sequence[str],
    out: str,
    m: str,
    n: str,
    reduce: Reduce | None = None,
) -> list[jax.Array]:
    """Returns the finished results of a graph, the first arguments of `Fusion.finish`.

    Args:
      graph: without top-k, which raises a ValueError.
      arrays: the accumulators, float32 and with the axes `out`, then the operands.
      labels: the letters of each operand, one for each axis; a scalar has none.
      out, m, n: as in `fuse`.
      reduce: for shards, maps the reduction of one shard over letters to that over all shards.
    """
    evaluation = _Evaluation(out, m, n, reduce or (lambda x, letters, by: x))
    values = list(arrays[: graph.accumulators])
    extents = dict(zip(out, values[0].shape, strict=True))
    for x, names, operand in zip(arrays[graph.accumulators :], labels, graph.operands, strict=True):
        x = x if operand.dtype == "bool" else x.astype(jnp.float32)
        values.append(along(x, names, out))
    for node in graph.nodes:
        arguments = [values[i] for i in node.args]
        values.append(evaluation.node(node, arguments, extents))
    results: list[jax.Array] = []
    for i, result in enumerate(graph.results):
        if result.plane:
            continue
        planes = [graph.results[i + p].value for p in range(result.planes)]
        whole = [jnp.broadcast_to(values[p], tuple(extents.values())) for p in planes]
        results += evaluation.result(result, whole)
    return results


def reduced_by(result: Result, out: str, m: str, n: str) -> tuple[str, Literal["add", "max"]]:
    """Returns the letters that a sum or maximum of the graph goes over, and which it is."""
    letters = {"column_sum": m, "max": out}.get(result.kind, n)
    return letters, "add" if result.kind.endswith("sum") else "max"


def along(x: jax.Array, names: str, out: str) -> jax.Array:
    """Returns an array with the axes `names` as one that broadcasts against `out`."""
    if not names:
        return x.reshape(())
    order = [names.index(letter) for letter in out if letter in names]
    missing = [i for i, letter in enumerate(out) if letter not in names]
    return lax.expand_dims(lax.transpose(x, order), missing)


class _Evaluation:
    def __init__(self, out: str, m: str, n: str, reduce: Reduce):
        self._out, self._m, self._n, self._reduce = out, m, n, reduce

    def node(self, node: Node, arguments: list[Any], extents: dict[str, int]) -> Any:
        match node.op:
            case "constant":
                return jnp.float32(node.params[0])
            case "convert":
                return arguments[0].astype(node.params[0]).astype(jnp.float32)
            case "integer_pow":
                return lax.integer_pow(arguments[0], node.params[0])
            case "round":
                return lax.round(arguments[0], lax.RoundingMethod.TO_NEAREST_EVEN)
            case "row_sum" | "row_max":
                x = jnp.broadcast_to(arguments[0], tuple(extents.values()))
                by = "add" if node.op == "row_sum" else "max"
                return lax.expand_dims(self._over(x, self._n, by), self._axes(self._n))
        function = getattr(lax, _NAMES.get(node.op, node.op))
        return function(*jnp.broadcast_arrays(*arguments))

    def result(self, result: Result, values: list[Any]) -> list[Any]:
        x = values[0]
        match result.kind:
            case "matrix":
                planes = [value.astype(result.dtype) for value in values]
                axis = len(self._out.rstrip(self._n))
                return planes if len(planes) == 1 else [jnp.stack(planes, axis)]
            case "column_sum" | "row_sum" | "row_max" | "max":
                return [self._over(x, *reduced_by(result, self._out, self._m, self._n))]
            case "row_sumexp":
                largest = self._over(x, self._n, "max")
                base = lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, 0.0))
                shifted = jnp.exp(x - lax.expand_dims(base, self._axes(self._n)))
                return [largest, self._over(shifted, self._n, "add")]
        raise ValueError(f"{result.kind}: of whole rows, which one array must hold")

    def _axes(self, letters: str) -> list[int]:
        return [i for i, letter in enumerate(self._out) if letter in letters]

    def _over(self, x: Any, letters: str, by: Literal["add", "max"]) -> Any:
        axes = tuple(self._axes(letters))
        local = jnp.sum(x, axes) if by == "add" else jnp.max(x, axes)
        return self._reduce(local, letters, by)
