"""The arithmetic of an `EpilogueGraph`: what a kernel evaluates for it, and in which form.

Two things happen to a graph before it becomes code. It is rewritten where another form of the
same function is both cheaper and nearer to it. And each operation gets a *form*, by what depends
on it: "accurate" where a float32 result does, "fast" where only 16-bit results do, "approx"
where nothing but factors of bfloat16 results lie between. The tests' `support/epilogue_errors.py`
bounds the error of each form.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterable
from typing import Literal

from .dtypes import DTYPES
from .epilogue_graph import ROW_REDUCTIONS, EpilogueGraph, Node, OperandKind

Form = Literal["accurate", "fast", "approx"]

NORMAL = 2.0**-126  # the smallest number that keeps all digits: under it a result may become 0
SIN_COS_LIMIT = 2.0**40  # beyond it sin and cos are numbers in [-1, 1] without meaning

BFLOAT16, FLOAT32 = DTYPES["bfloat16"].digits, DTYPES["float32"].digits
# Operations that have these forms.
FAST = frozenset({"exp", "exp2", "expm1", "log1p", "tanh", "logistic", "erfc"})
APPROX = frozenset({"tanh"})
# What keeps a relative error as it is, from the arguments that hold numbers.
_FACTORS = frozenset({"mul", "div", "neg", "abs", "max", "min", "select", "convert"})
_EXACT_UNTIL_SUMMED = frozenset({"matrix", "row_max", "max", "top_k_values", "top_k_indices"})


class Arithmetic:
    """What a kernel evaluates for a graph.

    Values keep the numbers that they have in the graph; those that rewriting adds have larger
    ones. `row_sum` and `row_max` are nodes here as there, but whoever evaluates reads them like
    operands. `forms` holds the form of each node that a result depends on.
    """

    def __init__(self, graph: EpilogueGraph):
        self.graph = graph
        self._nodes: dict[int, Node] = {}
        self._numbers: dict[tuple, int] = {}
        self._same = list(range(graph.num_values))  # what a graph's value is evaluated as
        for value, node in enumerate(graph.nodes, graph.first_node):
            args = tuple(self._same[argument] for argument in node.args)
            self._same[value] = self._simplified(node.op, args, node.params, value)
        self._split_logistics()
        results = [self.number(result.value) for result in graph.results]
        self.forms = self._choose_forms(self.order(results, through_rows=True))
        self._kinds: dict[int, OperandKind] = {}

    def number(self, value: int) -> int:
        """Returns the number of the value that a value of the graph is evaluated as."""
        return self._same[value] if value < len(self._same) else value

    def node(self, value: int) -> Node | None:
        """Returns what computes a value; None for an accumulator or operand."""
        return self._nodes.get(value)

    def is_leaf(self, value: int) -> bool:
        """Whether a value is read: an accumulator, an operand, a statistic of a row."""
        node = self._nodes.get(value)
        return node is None or node.op in ROW_REDUCTIONS

    def order(self, values: Iterable[int], through_rows: bool = False) -> list[int]:
        """Returns what must be evaluated for `values`, numbers as `number` gives them, arguments
        first; `through_rows`: also what statistics of rows are taken of."""
        ordered: dict[int, None] = {}
        stack = [(value, False) for value in values]
        while stack:
            value, ready = stack.pop()
            if value in ordered:
                continue
            node = self._nodes.get(value)
            inner = node is not None and (through_rows or not self.is_leaf(value))
            if ready or not inner:
                ordered[value] = None
            else:
                assert node is not None
                stack.append((value, True))
                stack += [(argument, False) for argument in node.args]
        return list(ordered)

    def varies(self, value: int) -> OperandKind:
        """Returns along which axes of D a value varies, as the kind of an operand that does."""
        if value not in self._kinds:
            for inner in self.order([value]):
                self._kinds[inner] = self._varies(inner)
        return self._kinds[value]

    def _varies(self, value: int) -> OperandKind:
        node = self._nodes.get(value)
        if node is None:
            operand = self.graph.operand(value)
            return operand.kind if operand else "matrix"
        if node.op in ROW_REDUCTIONS:
            return "column"
        kinds: set[OperandKind] = {self._kinds[argument] for argument in node.args}
        kinds.discard("scalar")
        if not kinds:
            return "scalar"
        return kinds.pop() if len(kinds) == 1 else "matrix"

    # Rewriting: a node of the graph becomes another of the same value.

    def _simplified(self, op: str, args: tuple[int, ...], params: tuple, value: int) -> int:
        if op == "mul":
            for factor, other in (args, args[::-1]):
                constant = self._constant(factor)
                if constant is None:
                    continue
                if (scaled := self._rescaled(constant, other)) is not None:
                    return scaled
        elif op in ("add", "sub") and (product := self._one_and_tanh(op, *args)) is not None:
            return product
        elif op == "div" and (divisor := self._constant(args[1])) is not None:
            reciprocal = 1 / divisor if divisor else math.inf
            if NORMAL <= abs(reciprocal) <= 1 / NORMAL:
                params = (_float32(reciprocal),)
        elif op == "pow" and (exponent := self._constant(args[1])) is not None:
            if exponent.is_integer() and abs(exponent) <= 64:
                return self._intern("integer_pow", args[:1], (int(exponent),), value)
        return self._intern(op, args, params, value)

    def _intern(
        self, op: str, args: tuple[int, ...], params: tuple = (), value: int | None = None
    ) -> int:
        """Returns the number of a node; the same for an equal one."""
        key = (op, args, repr(params))  # 0.0 and -0.0 are equal, their texts are not
        if key not in self._numbers:
            if value is None:
                value = len(self._same)
                self._same.append(value)
            self._numbers[key] = value
            self._nodes[value] = Node(op, args, params)
        return self._numbers[key]

    def _constant(self, value: int) -> float | None:
        node = self._nodes.get(value)
        return float(node.params[0]) if node and node.op == "constant" else None

    def _rescaled(self, constant: float, value: int) -> int | None:
        """Returns constant * value where value has a constant factor and the two make one.

        Their product must be exact, so that no rounding is added.
        """
        node = self._nodes.get(value)
        if node is None or node.op != "mul":
            return None
        for factor, other in (node.args, node.args[::-1]):
            if (inner := self._constant(factor)) is not None:
                product = constant * inner
                if product == 1:
                    return other
                if _float32(product) == product and NORMAL <= abs(product) < math.inf:
                    return self._intern("mul", (self._intern("constant", (), (product,)), other))
        return None

    def _times(self, constant: float, value: int) -> int:
        scaled = self._rescaled(constant, value)
        if scaled is not None:
            return scaled
        return self._intern("mul", (self._intern("constant", (), (constant,)), value))

    def _one_and_tanh(self, op: str, x: int, y: int) -> int | None:
        """Returns x + y or x - y where it is a multiple of 1 + tanh(u) or 1 - tanh(u).

        They are 2 logistic(2u) and 2 logistic(-2u), which do not cancel.
        """
        for a, b in ((x, y), (y, x)) if op == "add" else ((x, y),):
            if self._constant(a) == 1:
                if (u := self._tanh_argument(b)) is not None:
                    return self._twice_logistic(op, u)
                if op == "sub" and (u := self._squared_tanh_argument(b)) is not None:
                    both = self._twice_logistic("add", u), self._twice_logistic("sub", u)
                    return self._intern("mul", both)
            node = self._nodes.get(b)
            if node and node.op == "mul" and a in node.args:  # a + a * tanh(u)
                other = node.args[1] if node.args[0] == a else node.args[0]
                if (u := self._tanh_argument(other)) is not None:
                    return self._intern("mul", (a, self._twice_logistic(op, u)))
        return None

    def _twice_logistic(self, op: str, u: int) -> int:
        argument = self._times(2.0, u)
        if op == "sub":
            argument = self._intern("neg", (argument,))
        return self._times(2.0, self._intern("logistic", (argument,)))

    def _tanh_argument(self, value: int) -> int | None:
        node = self._nodes.get(value)
        return node.args[0] if node and node.op == "tanh" else None

    def _squared_tanh_argument(self, value: int) -> int | None:
        node = self._nodes.get(value)
        squared = node and (
            node.op == "square"
            or (node.op == "integer_pow" and node.params == (2,))
            or (node.op == "mul" and node.args[0] == node.args[1])
        )
        return self._tanh_argument(node.args[0]) if node and squared else None

    def _split_logistics(self) -> None:
        """Marks logistic(y) and logistic(-y), where both occur, to share one exponential."""
        for value, node in list(self._nodes.items()):
            argument = self._nodes.get(node.args[0]) if node.op == "logistic" else None
            if argument and argument.op == "neg":
                other = self._numbers.get(("logistic", argument.args, "()"))
                if other is not None:
                    for both in (value, other):
                        self._nodes[both] = Node("logistic", self._nodes[both].args, ("shared",))

    # Forms: from the results back to what they depend on.

    def _choose_forms(self, order: list[int]) -> dict[int, Form]:
        precision = dict.fromkeys(order, 0)  # digits that results keep
        factor = dict.fromkeys(order, True)  # whether it reaches results as a factor alone
        stored = {self.number(result.value) for result in self.graph.matrices}
        for result in self.graph.results:
            value = self.number(result.value)
            # Of what is stored too, a reduction need not be more exact than the stored numbers.
            if result.kind == "matrix" or value not in stored:
                precision[value] = max(precision[value], DTYPES[result.dtype].digits or FLOAT32)
            factor[value] &= result.kind in _EXACT_UNTIL_SUMMED
        for value in reversed(order):
            node = self._nodes.get(value)
            for i, argument in enumerate(node.args if node else ()):
                assert node is not None
                limit = DTYPES[node.params[0]].digits if node.op == "convert" else FLOAT32
                needed = min(precision[value], limit)
                precision[argument] = max(precision[argument], needed)
                keeps = node.op in _FACTORS and not (node.op == "select" and i == 0)
                factor[argument] &= factor[value] and keeps
        return {
            value: self._form(self._nodes[value].op, precision[value], factor[value])
            for value in order
            if value in self._nodes
        }

    @staticmethod
    def _form(op: str, precision: int, factor: bool) -> Form:
        if precision == BFLOAT16 and factor and op in APPROX:
            return "approx"
        return "fast" if precision < FLOAT32 and op in FAST else "accurate"


@functools.cache
def arithmetic_of(graph: EpilogueGraph) -> Arithmetic:
    """Returns what a kernel evaluates for `graph`."""
    return Arithmetic(graph)


def _float32(x: float) -> float:
    """Returns x rounded to float32; infinite where it is too large."""
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)
