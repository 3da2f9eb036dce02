"""An epilogue's graph → register code, element by element, while a kernel is traced.

    elements = Elements(graph, read, row_of, column_of)
    for v in range(values of a thread):
        stored[v] = elements.value(result.value, v)

Everything is unrolled: a value that is computed twice here is computed twice on the GPU. So each is
computed once for each element, row or column, or once in all, by the axes that it varies along.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...gemm.epilogue_arithmetic import arithmetic_of
from ...gemm.epilogue_graph import EpilogueGraph
from .op_codegen import evaluate


class Elements:
    """The values of a graph at some elements of D that one thread holds.

    NOTE: an object serves code that runs under one condition: it keeps values, and one that was
    computed inside an `if` or a loop of the GPU's does not exist outside.

    Args:
      graph: the graph.
      read: read(leaf, v): Float32 or Boolean value of an accumulator, an operand or a row's
        statistic (the number of its `row_sum` or `row_max` node) at the thread's v-th element.
      row_of, column_of: the row and the column of the v-th element: any keys that are equal
        where the row, or the column, is the same.
    """

    def __init__(self, graph: EpilogueGraph, read: Callable, row_of: Callable, column_of: Callable):
        self._arithmetic = arithmetic_of(graph)
        self._read = read
        whole, each = lambda v: None, lambda v: v
        self._keys = {"scalar": whole, "row": column_of, "column": row_of, "matrix": each}
        self._values: dict[tuple[int, Any], Any] = {}

    def value(self, number: int, v: Any) -> Any:
        """Returns the value that has `number` in the graph at the v-th element."""
        number = self._arithmetic.number(number)
        if self._key(number, v) not in self._values:
            for needed in self._arithmetic.order([number]):
                if self._key(needed, v) not in self._values:
                    self._values[self._key(needed, v)] = self._computed(needed, v)
        return self._values[self._key(number, v)]

    def _computed(self, number: int, v: Any) -> Any:
        node = self._arithmetic.node(number)
        if node is None or self._arithmetic.is_leaf(number):
            return self._read(number, v)
        arguments = [self._values[self._key(argument, v)] for argument in node.args]
        return evaluate(node, self._arithmetic.forms[number], arguments)

    def _key(self, number: int, v: Any) -> tuple[int, Any]:
        return number, self._keys[self._arithmetic.varies(number)](v)
