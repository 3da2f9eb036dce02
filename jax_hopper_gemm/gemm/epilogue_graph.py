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
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

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
    """An array that the graph reads. A batch may have one for each matrix, of any kind."""

    kind: OperandKind
    dtype: str  # one of `dtypes.EPILOGUE`; scalars are float32


@dataclass(frozen=True)
class Node:
    """One operation: its name in `ARITY`, the numbers of its arguments, static parameters."""

    op: str
    args: tuple[int, ...]
    params: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Result:
    """What leaves the kernel.

    Matrices with `planes` 2 lie in one array (M, 2, N), at index `plane`; the one of plane 1
    follows that of plane 0 in the results.
    """

    kind: ResultKind
    value: int  # number of the value that is stored or reduced
    dtype: str = "float32"  # of a matrix; everything else is float32, indices int32
    k: int = 0  # of top_k
    plane: int = 0
    planes: int = 1


@dataclass(frozen=True)
class EpilogueGraph:
    """Operations on each element of D."""

    accumulators: int = 1  # or 2, of a product with two right operands: gate and up
    operands: tuple[Operand, ...] = ()
    nodes: tuple[Node, ...] = ()
    results: tuple[Result, ...] = ()  # the first is a matrix, if there are matrices among them

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

    @cached_property
    def matrices(self) -> tuple[Result, ...]:
        """The results that are stored element by element."""
        return tuple(result for result in self.results if result.kind == "matrix")

    @cached_property
    def reductions(self) -> tuple[Result, ...]:
        """The other results."""
        return tuple(result for result in self.results if result.kind != "matrix")

    @cached_property
    def loaded(self) -> tuple[Operand, ...]:
        """The operands that arrive in shared memory: all but scalars."""
        return tuple(operand for operand in self.operands if operand.kind != "scalar")

    @cached_property
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
    def transposed(self) -> EpilogueGraph:
        """The same of D's transpose: rows and columns exchange roles. Of matrices alone."""
        exchanged: dict[OperandKind, OperandKind] = {"row": "column", "column": "row"}
        operands = (replace(o, kind=exchanged.get(o.kind, o.kind)) for o in self.operands)
        return replace(self, operands=tuple(operands))

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
