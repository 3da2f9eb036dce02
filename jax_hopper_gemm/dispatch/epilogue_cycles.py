"""The cycles of a tile's epilogue: computing it, loading its operands, storing its results.

Constants marked "fitted" as in `cost`, of kernels without an epilogue's graph. What one adds is
reckoned from rates of instructions and latencies.
"""

from __future__ import annotations

from functools import lru_cache

from ..gemm.epilogue_checks import variation
from ..gemm.epilogue_graph import ROW_REDUCTIONS, EpilogueGraph
from ..gemm.spec import GemmSpec
from .device import ISSUE_CYCLES
from .several import most, where

EPILOGUE_CYCLES = 2700.0  # fitted: fill of the ring, drain of the tensor cores, last store
SUBTILE_BYTES_PER_CYCLE = 47.0  # fitted: one warpgroup converts and stages
SUBTILE_WAIT = 100.0  # fitted: two stages: a subtile waits until the one before has been read
LOOSE_CYCLES = 3.0  # measured: of an SM, for a warp's store of an element a thread, without TMA
LOAD_CYCLES = 1100.0  # assumed: from asking for an operand's epilogue tile to its arrival
ADDING_UP_CYCLES = 800.0  # fitted: of promoted sums in turns, see `mainloop_cycles`
# Of an element that is turned on its way through shared memory, where float32 B is in registers:
# tiles of 256x128 took 13 us longer in 6 waves, of 128x128 7 in 5. Where B is converted the fit of
# a k-tile's cycles has it.
TURNING_CYCLES = 0.12
SPECIAL_CYCLES = 8.0  # of one that the special function units execute: 4 lanes a cycle

# Instructions for one element: on the special function units, and all. Others take one.
INSTRUCTIONS = {
    "constant": (0, 0), "select": (0, 1), "exp": (1, 2), "exp2": (1, 1), "log": (1, 3),
    "expm1": (1, 10), "log1p": (1, 10), "sqrt": (1, 3), "rsqrt": (1, 2), "div": (1, 4),
    "tanh": (2, 5), "logistic": (2, 5), "erf": (1, 18), "erfc": (1, 24), "pow": (2, 10),
    "sin": (1, 6), "cos": (1, 6), "sign": (0, 3), "integer_pow": (0, 3), "convert": (0, 2),
    "round": (0, 1), "floor": (0, 1), "ceil": (0, 1),
}  # fmt: skip
REDUCTION_INSTRUCTIONS = {
    "row_sum": (0, 1), "row_max": (0, 1), "column_sum": (0, 1), "max": (0, 1),
    "row_sumexp": (1, 4), "top_k_values": (0, 12), "top_k_indices": (0, 0),
}  # fmt: skip


def epilogue_cycles(spec: GemmSpec) -> float:
    columns = spec.d_tile_n / spec.warpgroups_n
    subtiles = spec.rows_per_warpgroup / 64 * (columns / spec.epi_tile_n)
    wait = where(spec.epi_stages == 2, SUBTILE_WAIT, 0.0) if spec.graph.matrices else 0.0
    cycles = spec.epi_stage_bytes / SUBTILE_BYTES_PER_CYCLE + wait
    cycles += computing_cycles(spec) / subtiles
    late = 0.0
    if any(operand.kind == "matrix" for operand in spec.graph.operands):
        # The first tiles arrive during the multiplication; each other one is asked for when the
        # one before it in its stage has been read.
        stages = most(spec.epi_load_stages, 1)
        waits = most(0.0, subtiles - stages) * most(0.0, LOAD_CYCLES / stages - cycles)
        late = where(spec.epi_load_stages > 0, waits, 0.0)
    adding_up = where(spec.k_in_turns & spec.promoted, ADDING_UP_CYCLES, 0.0)
    if spec.rounds_operands and spec.b_in_registers:
        late += spec.tile_m * spec.tile_n * TURNING_CYCLES
    return EPILOGUE_CYCLES + subtiles * cycles + late + adding_up


def loose_cycles(spec: GemmSpec) -> float:
    """Returns an SM's cycles to store a tile without TMA, which no multiplication hides.

    Measured on an H200 with rows of an odd number of bfloat16: tiles of 128x192 took 2,100 and
    2,200 cycles longer, of 128x128 1,100 and 1,800.
    """
    if not spec.loose_d:
        return 0.0
    return len(spec.graph.matrices) * spec.tile_m * spec.d_tile_n / 32 * LOOSE_CYCLES


def computing_cycles(spec: GemmSpec) -> float:
    """Returns the cycles in which one warpgroup computes the epilogue of its rows of a tile."""
    if spec.epilogue is None:
        return 0.0
    columns = spec.d_tile_n / spec.warpgroups_n
    return spec.rows_per_warpgroup * columns / 128 * element_cycles(spec.epilogue)


@lru_cache(maxsize=256)
def element_cycles(graph: EpilogueGraph) -> float:
    """Returns a warp's cycles to compute one element a thread; 0 where it is only stored.

    What varies along rows or columns alone is computed once for each, which counts as nothing.
    A statistic of a whole row takes a pass of its own over what it reads.
    """
    varying = variation(graph)
    special = total = 0
    for index, node in enumerate(graph.nodes):
        if node.op in ROW_REDUCTIONS:
            total += 1
        elif varying[graph.first_node + index] == (True, True):
            counts = INSTRUCTIONS.get(node.op, (0, 1))
            special, total = special + counts[0], total + counts[1]
    for result in graph.reductions:
        counts = REDUCTION_INSTRUCTIONS[result.kind]
        special, total = special + counts[0], total + counts[1]
    total += 2 * sum(operand.kind == "matrix" for operand in graph.operands)
    passes = 1 + sum(node.op in ROW_REDUCTIONS for node in graph.nodes)
    return passes * max(special * SPECIAL_CYCLES, total * ISSUE_CYCLES)
