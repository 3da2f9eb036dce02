"""Checks of an `EpilogueGraph`: why it is not well formed, how many registers it takes.

No kernel depends on them: they decide which kernels there are, not what one computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from .dtypes import DTYPES, EPILOGUE, QUANTIZED, RESULTS, names
from .epilogue_graph import (
    ARITY,
    LOGIC,
    MAX_TOP_K,
    ROW_REDUCTIONS,
    EpilogueGraph,
    Node,
    Operand,
    Result,
)


def graph_violations(graph: EpilogueGraph) -> Iterator[str]:
    """Yields every reason why `graph` is not well formed."""
    if graph.accumulators not in (1, 2):
        yield f"{graph.accumulators} accumulators, not 1 or 2"
    for i, operand in enumerate(graph.operands):
        yield from (f"operand {i} {reason}" for reason in _operand_violations(operand))
    for i, node in enumerate(graph.nodes):
        yield from (f"node {i} {reason}" for reason in _node_violations(graph, i, node))
    if not graph.results:
        yield "no results"
    if graph.matrices and graph.results[0].kind != "matrix":
        yield "the first result is not a matrix, though there is one"
    yield from _plane_violations(graph.results)
    for i, result in enumerate(graph.results):
        yield from (f"result {i} {reason}" for reason in _result_violations(graph, result))


def _operand_violations(operand: Operand) -> Iterator[str]:
    if operand.kind not in ("scalar", "row", "column", "matrix"):
        yield f"has kind {operand.kind!r}"
    if operand.dtype not in EPILOGUE:
        yield f"is {operand.dtype}, not one of {', '.join(EPILOGUE)}"
    if operand.kind == "scalar" and operand.dtype != "float32":
        yield f"is a {operand.dtype} scalar; scalars are float32"


def _node_violations(graph: EpilogueGraph, index: int, node: Node) -> Iterator[str]:
    logical = (True, False, False) if node.op == "select" else (node.op in LOGIC,) * len(node.args)
    if node.op not in ARITY:
        yield f"is {node.op!r}, which no kernel computes"
    elif len(node.args) != ARITY[node.op]:
        yield f"gives {node.op} {len(node.args)} arguments, not {ARITY[node.op]}"
    elif not all(0 <= argument < graph.first_node + index for argument in node.args):
        yield f"({node.op}) reads a value that comes after it"
    elif tuple(map(graph.is_predicate, node.args)) != logical:
        yield f"({node.op}) takes numbers for truth values or the reverse"


def _result_violations(graph: EpilogueGraph, result: Result) -> Iterator[str]:
    if not 0 <= result.value < graph.num_values:
        yield f"is value {result.value} of {graph.num_values}"
    elif graph.is_predicate(result.value):
        yield "is a truth value: select numbers by it"
    if result.kind == "matrix" and result.dtype in names("sum"):
        if result.value >= graph.accumulators:
            yield f"is {result.dtype} and no accumulator"
    elif result.kind == "matrix" and result.dtype not in RESULTS + QUANTIZED:
        yield f"is {result.dtype}, not one of {', '.join(RESULTS + QUANTIZED)}"
    if result.kind.startswith("top_k") and not 1 <= result.k <= MAX_TOP_K:
        yield f"has k {result.k}, not 1 to {MAX_TOP_K}"


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
    registers = _computing_registers(graph, columns) + REGISTERS_PER_LOADED * len(graph.loaded)
    read = (operand.dtype for operand in graph.operands if operand.kind == "matrix")
    registers += sum(_tile_registers(dtype, epi_tile_n) for dtype in read)
    for i, result in enumerate(graph.matrices):
        computed = result.value >= graph.accumulators
        if i or (computed and result.dtype == "float32"):
            registers += _tile_registers(result.dtype, epi_tile_n)
        registers += REGISTERS_PER_MATRIX if i else 0
    registers += sum(_reduction_registers(graph, result, columns) for result in graph.reductions)
    statistics = sum(node.op in ROW_REDUCTIONS for node in graph.nodes)
    return registers + REGISTERS_PER_STATISTIC * statistics


def _computing_registers(graph: EpilogueGraph, columns: int) -> int:
    """Returns the registers of what is held along rows and columns, and of the worst node."""
    held = {(True, True): 0, (False, True): columns, (True, False): 2, (False, False): 1}
    along = variation(graph)
    # Of each value the last node that reads it; of a result, one past the last node.
    last_use = {a: i for i, node in enumerate(graph.nodes, graph.first_node) for a in node.args}
    last_use |= {result.value: graph.num_values for result in graph.results}
    used = [value for value in range(graph.accumulators, graph.num_values) if value in last_use]
    alive = worst = 0
    for value, node in enumerate(graph.nodes, graph.first_node):
        if along[value] != (True, True):
            continue
        alive += 1
        worst = max(worst, alive + TEMPORARIES.get(node.op, 0))
        ending = {a for a in node.args if last_use[a] == value and graph.operand(a) is None}
        alive -= sum(along[a] == (True, True) and a >= graph.first_node for a in ending)
    return sum(held[along[value]] for value in used) + IN_FLIGHT * worst


def _reduction_registers(graph: EpilogueGraph, result: Result, columns: int) -> int:
    if result.kind == "column_sum":
        return columns
    if result.kind != "top_k_values":
        return REDUCTION_REGISTERS.get(result.kind, 0)
    computed = result.value >= graph.accumulators
    beside = computed and any(other.value != result.value for other in graph.matrices)
    return REGISTERS_PER_SELECTION[computed] + REGISTERS_BESIDE_SELECTION * beside


def _tile_registers(dtype: str, epi_tile_n: int) -> int:
    return epi_tile_n * max(2, DTYPES[dtype].itemsize) // 8


def variation(graph: EpilogueGraph) -> list[tuple[bool, bool]]:
    """Returns for each value whether it differs between the rows, and between the columns, of D."""
    kinds = ("matrix",) * graph.accumulators + tuple(operand.kind for operand in graph.operands)
    varying = [(kind in ("column", "matrix"), kind in ("row", "matrix")) for kind in kinds]
    for node in graph.nodes:
        rows = any(varying[argument][0] for argument in node.args)
        columns = any(varying[argument][1] for argument in node.args)
        varying.append((rows, columns and node.op not in ROW_REDUCTIONS))
    return varying
