"""Builder of an `EpilogueGraph`, which merges equal operations and drops those without effect.

Values are numbered as they are made. `graph` renumbers the used ones, so that functions with the
same jaxpr give equal graphs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..gemm.epilogue_graph import ARITY, EpilogueGraph, Node, Operand, Result


@dataclass(frozen=True)
class Leaf:
    """An input of the graph."""

    index: int  # number of the accumulator, or of the function's operand
    labels: str  # the letters that it varies along, in the order of its axes
    operand: Operand | None = None  # None for an accumulator


class Builder:
    """Values under construction; a value is its number here."""

    def __init__(self, num_accumulators: int, out: str):
        self.entries: list[Leaf | Node] = []  # by value
        self._numbers: dict[Leaf | Node, int] = {}
        self._letters: list[frozenset[str]] = []
        self.num_accumulators = num_accumulators
        for i in range(num_accumulators):
            self._add(Leaf(i, out), frozenset(out))

    def letters(self, value: int) -> frozenset[str]:
        """Returns the letters of D that a value varies along."""
        return self._letters[value]

    def operand(self, leaf: Leaf) -> int:
        return self._add(leaf, frozenset(leaf.labels))

    def constant(self, value: Any) -> int:
        """Returns a number or truth value, rounded to float32.

        NOTE: no node may read a truth value, which graphs cannot express: `_simplified` has a case
        for each operation that takes one.
        """
        if isinstance(value, bool | np.bool_):
            return self._node(Node("true" if value else "false", ()))
        with np.errstate(over="ignore"):
            number = float(np.float32(value))
        if math.isnan(number):  # a NaN equals nothing, not even itself: kept out of graphs
            infinity = self.constant(math.inf)
            return self._node(Node("sub", (infinity, infinity)))
        if number == 0 and math.copysign(1, number) < 0:  # equal to 0 wherever graphs are compared
            return self._node(Node("neg", (self.constant(0.0),)))
        return self._node(Node("constant", (), (number,)))

    def constant_of(self, value: int) -> float | bool | None:
        """Returns the number or truth value of a constant, None for other values."""
        match self.entries[value]:
            case Node("constant", _, (number,)):
                return number
            case Node("true"):
                return True
            case Node("false"):
                return False
        return None

    def node(self, op: str, *args: int, params: tuple[Any, ...] = ()) -> int:
        simplified = self._simplified(op, args, params)
        return self._node(Node(op, args, params)) if simplified is None else simplified

    def row_reduction(self, op: str, value: int, n: str) -> int:
        """Returns a sum or maximum over the columns, letters `n`, of each row."""
        return self._add(Node(op, (value,)), self.letters(value) - set(n))

    def graph(self, results: Sequence[Result]) -> tuple[EpilogueGraph, tuple[Leaf, ...]]:
        """Returns the graph of `results`, whose values are numbers here, and its operands.

        Operands are in the order of the function's.
        """
        used = {result.value for result in results}
        for value, entry in reversed([*enumerate(self.entries)]):  # they read earlier ones alone
            if value in used and isinstance(entry, Node):
                used.update(entry.args)
        entries = [(value, self.entries[value]) for value in sorted(used)]
        leaves = [(v, x) for v, x in entries if isinstance(x, Leaf) and x.operand]
        leaves.sort(key=lambda pair: (pair[1].index, pair[1].labels, pair[0]))
        nodes = [(v, x) for v, x in entries if isinstance(x, Node)]
        order = [*range(self.num_accumulators), *(v for v, _ in (*leaves, *nodes))]
        number = {value: i for i, value in enumerate(order)}
        graph = EpilogueGraph(
            self.num_accumulators,
            tuple(leaf.operand for _, leaf in leaves if leaf.operand),
            tuple(replace(x, args=tuple(number[a] for a in x.args)) for _, x in nodes),
            tuple(replace(r, value=number[r.value]) for r in results),
        )
        return graph, tuple(leaf for _, leaf in leaves)

    def _node(self, node: Node) -> int:
        assert node.op in ("true", "false") or len(node.args) == ARITY[node.op], node
        return self._add(node, frozenset().union(*map(self.letters, node.args)))

    def _add(self, entry: Leaf | Node, letters: frozenset[str]) -> int:
        if entry not in self._numbers:
            self._numbers[entry] = len(self.entries)
            self.entries.append(entry)
            self._letters.append(letters)
        return self._numbers[entry]

    def _simplified(self, op: str, args: tuple[int, ...], params: tuple[Any, ...]) -> int | None:
        """Returns an existing value bitwise equal to an operation's result, or None."""
        match op, args, tuple(map(self.constant_of, args)):
            case (
                ("mul" | "div", (x, _), (_, 1.0))
                | ("mul", (_, x), (1.0, _))
                | ("sub", (x, _), (_, 0.0))
                | ("select", (_, x, _), (True, *_))
                | ("select", (_, _, x), (False, *_))
                | ("and", (x, _), (_, True) | (False, _))
                | ("and", (_, x), (True, _) | (_, False))
                | ("or", (x, _), (_, False) | (True, _))
                | ("or", (_, x), (False, _) | (_, True))
            ):
                return x
            case ("max", (x, _), (_, limit)) | ("max", (_, x), (limit, _)) if limit == -math.inf:
                return x
            case ("min", (x, _), (_, limit)) | ("min", (_, x), (limit, _)) if limit == math.inf:
                return x
            case ("select", (_, x, y), _) if x == y:
                return x
            case ("xor", (x, _), (_, bool(value))) | ("xor", (_, x), (bool(value), _)):
                return self.node("not", x) if value else x
            case ("not", _, (bool(value),)):
                return self.constant(not value)
            case ("neg" | "not", (x,), _):
                entry = self.entries[x]
                if isinstance(entry, Node) and entry.op == op:
                    return entry.args[0]
            case ("convert", (x,), _) if self._representable(x, params[0]):
                return x
            case ("integer_pow", (x,), _) if params == (1,):
                return x
            case ("integer_pow", (x,), _) if params == (2,):
                return self.node("square", x)
            case ("integer_pow", _, _) if params == (0,):
                return self.constant(1.0)
        return None

    def _representable(self, value: int, dtype: str) -> bool:
        """Whether rounding a value to `dtype` surely changes nothing."""
        match self.entries[value]:
            case Node("convert", _, (own,)):
                return own == dtype
            case Node("neg" | "abs", (x,)):
                return self._representable(x, dtype)
            case Leaf(operand=Operand(dtype=own)):
                return own == dtype
        return False
