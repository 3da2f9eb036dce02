"""What a kernel does with its accumulators before it stores them: a graph of operations.

An `EpilogueGraph` is part of a kernel's identity: plain data, hashed with the rest of the spec.
It knows no extents and no addresses; of an operand it says how it varies over D, not where it
lies. Values are numbered: accumulators first, then operands, then nodes in order, so an
argument's number is always less than its node's. All are float32, but for the results of
comparisons and logic and for operands of dtype "bool", which are true or false.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

from .dtypes import DTYPES, EPILOGUE, RESULTS

# How an operand varies over a matrix of D: not at all, along N, along M, or along both.
OperandKind = Literal["scalar", "row", "column", "matrix"]
# matrix: one element for each of D. row_*: over the columns of each row; column_sum: over the rows
# of each column; max: over all. row_sumexp: the largest value v of a row and the sum of
# exp(v - largest). top_k_*: of a row, the k largest in order and their columns (int32).
ResultKind = Literal[
    "matrix", "row_sum", "row_max", "row_sumexp", "column_sum", "max", "top_k_values",
    "top_k_indices",
]  # fmt: skip

# Arguments of each operation. Semantics are those of the `jax.lax` function of that name.
ARITY = {
    "constant": 0,  # params: (value,)
    "neg": 1, "abs": 1, "sign": 1, "square": 1, "floor": 1, "ceil": 1, "round": 1,  # to even
    "exp": 1, "exp2": 1, "expm1": 1, "log": 1, "log1p": 1, "sqrt": 1, "rsqrt": 1,
    "tanh": 1, "logistic": 1, "erf": 1, "erfc": 1, "sin": 1, "cos": 1,
    "integer_pow": 1,  # params: (exponent,)
    "convert": 1,  # params: (dtype,): rounds to a 16-bit float and back
    "add": 2, "sub": 2, "mul": 2, "div": 2, "max": 2, "min": 2, "pow": 2,
    "eq": 2, "ne": 2, "lt": 2, "le": 2, "gt": 2, "ge": 2, "is_finite": 1,
    "and": 2, "or": 2, "xor": 2, "not": 1,
    "select": 3,  # predicate, value where true, value where false
    "row_sum": 1, "row_max": 1,  # over a whole row of D, which must fit a tile
}  # fmt: skip
PREDICATES = frozenset(
    {"eq", "ne", "lt", "le", "gt", "ge", "is_finite", "and", "or", "xor", "not"}
)  # operations that give true or false
LOGIC = frozenset({"and", "or", "xor", "not"})  # and that take it
ROW_REDUCTIONS = frozenset({"row_sum", "row_max"})
MAX_TOP_K = 32


@dataclass(frozen=True)
class Operand:
    """An array that the graph reads.

    Attributes:
      kind: how it varies over a matrix of D. A batch may have one for each matrix, of any kind.
      dtype: one of `dtypes.EPILOGUE`; scalars are float32.
    """

    kind: OperandKind
    dtype: str


@dataclass(frozen=True)
class Node:
    """One operation: its name in `ARITY`, the numbers of its arguments, static parameters."""

    op: str
    args: tuple[int, ...]
    params: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Result:
    """What leaves the kernel.

    Attributes:
      kind: see `ResultKind`.
      value: number of the value that is stored or reduced.
      dtype: of a matrix; everything else is float32, indices int32.
      k: of top_k.
      plane, planes: matrices with `planes` 2 lie in one array (M, 2, N), at index `plane`; the one
        of plane 1 follows that of plane 0 in the results.
    """

    kind: ResultKind
    value: int
    dtype: str = "float32"
    k: int = 0
    plane: int = 0
    planes: int = 1


@dataclass(frozen=True)
class EpilogueGraph:
    """Operations on each element of D.

    Attributes:
      accumulators: 1; or 2, of a product with two right operands: gate and up.
      operands, nodes, results: see there. If there are matrices among the results, the first
        result is one.
    """

    accumulators: int = 1
    operands: tuple[Operand, ...] = ()
    nodes: tuple[Node, ...] = ()
    results: tuple[Result, ...] = ()

    @property
    def first_node(self) -> int:
        """The number of the first node's value."""
        return self.accumulators + len(self.operands)

    @property
    def num_values(self) -> int:
        return self.first_node + len(self.nodes)

    def node(self, value: int) -> Node | None:
        """Returns the node that computes a value; None for an accumulator or operand."""
        return self.nodes[value - self.first_node] if value >= self.first_node else None

    def operand(self, value: int) -> Operand | None:
        """Returns the operand that a value is, if it is one."""
        index = value - self.accumulators
        return self.operands[index] if 0 <= index < len(self.operands) else None

    def is_predicate(self, value: int) -> bool:
        """Whether a value is true or false."""
        if node := self.node(value):
            return node.op in PREDICATES
        operand = self.operand(value)
        return operand is not None and operand.dtype == "bool"

    @property
    def matrices(self) -> tuple[Result, ...]:
        """The results that are stored element by element."""
        return tuple(result for result in self.results if result.kind == "matrix")

    @property
    def reductions(self) -> tuple[Result, ...]:
        """The other results."""
        return tuple(result for result in self.results if result.kind != "matrix")

    @property
    def loaded(self) -> tuple[Operand, ...]:
        """The operands that arrive in shared memory: all but scalars."""
        return tuple(operand for operand in self.operands if operand.kind != "scalar")

    @property
    def needs_whole_rows(self) -> bool:
        """Whether a row of D must fit one tile."""
        return any(node.op in ROW_REDUCTIONS for node in self.nodes) or any(
            result.kind.startswith("top_k") for result in self.results
        )

    @property
    def row_nodes(self) -> tuple[int, ...]:
        """The numbers of the values that are statistics of whole rows."""
        numbered = enumerate(self.nodes, self.first_node)
        return tuple(number for number, node in numbered if node.op in ROW_REDUCTIONS)

    @property
    def passes(self) -> int:
        """How often a kernel goes over a row: once for each such statistic, once to store."""
        return len(self.row_nodes) + 1

    @property
    def needs_extents(self) -> bool:
        """Whether the kernel must know M and N: elements outside D count in no reduction."""
        return self.needs_whole_rows or bool(self.reductions)

    @property
    def label(self) -> str:
        """A short name for profiles: the operations that stand out, and a hash of it all."""
        notable = ("softmax", "erf", "erfc", "tanh", "logistic", "exp", "log", "pow", "max", "mul")
        used = {node.op for node in self.nodes}
        shown = next((op for op in notable if op in used), "store")
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        gated = "gated_" if self.accumulators == 2 else ""
        return f"{gated}{shown}_{digest[:6]}"

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> EpilogueGraph:
        """Returns the graph that `dataclasses.asdict` and JSON made `fields` of."""
        return cls(
            fields["accumulators"],
            tuple(Operand(**operand) for operand in fields["operands"]),
            tuple(
                Node(node["op"], tuple(node["args"]), tuple(node["params"]))
                for node in fields["nodes"]
            ),
            tuple(Result(**result) for result in fields["results"]),
        )


def graph_violations(graph: EpilogueGraph) -> list[str]:
    """Returns every reason why `graph` is not well formed; empty when it is."""
    return list(_violations(graph))


def _violations(graph: EpilogueGraph) -> Iterator[str]:
    if graph.accumulators not in (1, 2):
        yield f"{graph.accumulators} accumulators, not 1 or 2"
    for i, operand in enumerate(graph.operands):
        if operand.kind not in ("scalar", "row", "column", "matrix"):
            yield f"operand {i} has kind {operand.kind!r}"
        if operand.dtype not in EPILOGUE:
            yield f"operand {i} is {operand.dtype}, not one of {', '.join(EPILOGUE)}"
        if operand.kind == "scalar" and operand.dtype != "float32":
            yield f"operand {i} is a {operand.dtype} scalar; scalars are float32"
    for i, node in enumerate(graph.nodes):
        value = graph.first_node + i
        if node.op not in ARITY:
            yield f"node {i} is {node.op!r}, which no kernel computes"
        elif len(node.args) != ARITY[node.op]:
            yield f"node {i} gives {node.op} {len(node.args)} arguments, not {ARITY[node.op]}"
        elif not all(0 <= argument < value for argument in node.args):
            yield f"node {i} ({node.op}) reads a value that comes after it"
        else:
            wanted = _predicate_arguments(node)
            given = tuple(map(graph.is_predicate, node.args))
            if wanted != given:
                yield f"node {i} ({node.op}) takes numbers for truth values or the reverse"
    if not graph.results:
        yield "no results"
    if graph.matrices and graph.results[0].kind != "matrix":
        yield "the first result is not a matrix, though there is one"
    yield from _plane_violations(graph.results)
    for i, result in enumerate(graph.results):
        if not 0 <= result.value < graph.num_values:
            yield f"result {i} is value {result.value} of {graph.num_values}"
        elif graph.is_predicate(result.value):
            yield f"result {i} is a truth value: select numbers by it"
        if result.kind == "matrix" and result.dtype not in RESULTS:
            yield f"result {i} is {result.dtype}, not one of {', '.join(RESULTS)}"
        if result.kind.startswith("top_k") and not 1 <= result.k <= MAX_TOP_K:
            yield f"result {i} has k {result.k}, not 1 to {MAX_TOP_K}"


def _plane_violations(results: tuple[Result, ...]) -> Iterator[str]:
    expected = None  # what must follow a matrix of plane 0
    for i, result in enumerate((*results, None)):
        placed = result and (result.kind, result.dtype, result.plane, result.planes)
        if expected and placed != expected:
            yield f"result {i} is not plane 1 of the array that result {i - 1} begins"
        elif not expected and result and result.plane:
            yield f"result {i} is plane {result.plane} of an array that no result begins"
        expected = None
        if result and result.planes != 1 and result.plane == 0:
            if (result.kind, result.planes) != ("matrix", 2):
                came = f"result {i} is a {result.kind} in {result.planes} planes"
                yield f"{came}; matrices have 1 or 2"
            else:
                expected = ("matrix", result.dtype, 1, 2)


def _predicate_arguments(node: Node) -> tuple[bool, ...]:
    if node.op == "select":
        return (True, False, False)
    return (node.op in LOGIC,) * len(node.args)


# What an epilogue takes of a math thread's registers, in one place: to be calibrated by compiling
# kernels at the limits and looking for spills.
IN_FLIGHT = 1  # elements that the compiler evaluates side by side
TEMPORARIES = {  # registers that an operation takes besides arguments and result; others none
    "erf": 4, "erfc": 6, "pow": 6, "sin": 6, "cos": 6, "log1p": 3, "expm1": 3, "log": 2, "div": 2,
    "tanh": 2, "logistic": 2,
}  # fmt: skip
REGISTERS_PER_LOADED = 3  # addresses and coordinates of an operand that TMA loads
REGISTERS_PER_MATRIX = 4  # the same of a matrix of results after the first
REDUCTION_REGISTERS = {"row_sum": 10, "row_max": 6, "row_sumexp": 24, "max": 2}
REGISTERS_PER_STATISTIC = 8  # of a whole row, in a pass of its own
REGISTERS_PER_SELECTION = 4, 48  # top-k of a row of accumulators, of computed values
REGISTERS_BESIDE_SELECTION = 64  # of computed values, while others are stored


@lru_cache(maxsize=1024)
def epilogue_registers(graph: EpilogueGraph, epi_tile_n: int) -> int:
    """Returns the registers a thread needs besides those of storing one plain matrix; an estimate.

    The sum of what is alive at the worst node, for each element in flight; what is held along the
    columns and rows of an epilogue tile; converted results that wait to be stored together;
    addresses; partial reductions.
    """
    columns = epi_tile_n // 4  # of a tile of 64 rows, that a thread holds values of
    held = {(True, True): 0, (False, True): columns, (True, False): 2, (False, False): 1}
    along = variation(graph)
    last_use = _last_uses(graph)
    registers, alive, worst = 0, 0, 0
    for value in range(graph.accumulators, graph.num_values):
        registers += held[along[value]] if value in last_use else 0
    for index, node in enumerate(graph.nodes):
        value = graph.first_node + index
        if along[value] != (True, True):
            continue
        alive += 1
        worst = max(worst, alive + TEMPORARIES.get(node.op, 0))
        ending = {a for a in node.args if last_use[a] == value and graph.operand(a) is None}
        alive -= sum(along[a] == (True, True) and a >= graph.first_node for a in ending)
    registers += IN_FLIGHT * worst + REGISTERS_PER_LOADED * len(graph.loaded)
    for operand in graph.operands:
        if operand.kind == "matrix":
            registers += _tile_registers(operand.dtype, epi_tile_n)
    for i, result in enumerate(graph.matrices):
        computed = result.value >= graph.accumulators
        if i or (computed and result.dtype == "float32"):
            registers += _tile_registers(result.dtype, epi_tile_n)
        registers += REGISTERS_PER_MATRIX if i else 0
    for result in graph.reductions:
        if result.kind == "column_sum":
            registers += columns
        elif result.kind == "top_k_values":
            computed = result.value >= graph.accumulators
            registers += REGISTERS_PER_SELECTION[computed]
            if computed and any(other.value != result.value for other in graph.matrices):
                registers += REGISTERS_BESIDE_SELECTION
        else:
            registers += REDUCTION_REGISTERS.get(result.kind, 0)
    statistics = sum(node.op in ROW_REDUCTIONS for node in graph.nodes)
    return registers + REGISTERS_PER_STATISTIC * statistics


def _tile_registers(dtype: str, epi_tile_n: int) -> int:
    """Returns the registers of a thread's elements of an epilogue tile."""
    return epi_tile_n * max(2, DTYPES[dtype].itemsize) // 8


def variation(graph: EpilogueGraph) -> list[tuple[bool, bool]]:
    """Returns for each value whether it differs between the rows, and between the columns, of D."""
    of_kind = {
        "scalar": (False, False), "row": (False, True), "column": (True, False),
        "matrix": (True, True),
    }  # fmt: skip
    found = [(True, True)] * graph.accumulators
    found += [of_kind[operand.kind] for operand in graph.operands]
    for node in graph.nodes:
        rows = any(found[argument][0] for argument in node.args)
        columns = any(found[argument][1] for argument in node.args)
        found.append((rows, columns and node.op not in ROW_REDUCTIONS))
    return found


def _last_uses(graph: EpilogueGraph) -> dict[int, int]:
    """Returns the last node that reads each value; of a result, one past the last node."""
    found: dict[int, int] = {}
    for index, node in enumerate(graph.nodes):
        found |= dict.fromkeys(node.args, graph.first_node + index)
    return found | {result.value: graph.num_values for result in graph.results}
