"""How long a kernel takes, estimated from what it must multiply and move.

A CTA's tiles cost, for each k-tile, the slower of its tensor cores and its loads; then an
epilogue, which persistent kernels hide in part. A launch costs its waves of tiles, or device
memory where that is slower.

The form is the hardware's; the constants marked "fitted" are least squares over 1,900 kernels
timed on an H200 (42 problems of over 16 rows, 6 to 1,400 us), with most weight on the fastest
of each problem. On these same problems the kernel of least cost was 1 % slower than the fastest
on average and 3 % at most; costs of good kernels were within 5 % of their
times, nine out of ten. Of the streams of `benchmarks/few_rows.py`, 1 to 64 rows, that of least cost
was 0.2 % slower than the fastest on average and 4 % at most. None of them had an epilogue: what one
adds is reckoned from rates of instructions and latencies.

Sizes of groups are not known. A grouped product is taken for a batch of equal groups, but for the
tiles that they fill in part, which are counted as if sizes were spread (`expected_pieces`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, exp, gcd, prod

from ..gemm import grid, simt
from ..gemm.dtypes import DTYPES, MMA_BYTES
from ..gemm.epilogue_checks import variation
from ..gemm.epilogue_graph import ROW_REDUCTIONS, EpilogueGraph
from ..gemm.k_split import KSplit
from ..gemm.problem import GemmProblem, MatrixLayout
from ..gemm.spec import PART_BUFFERS, GemmSpec, RasterOrder, TmaBox
from .configs import RASTER_ORDERS
from .device import Device

ROUGH = RASTER_ORDERS[:2]  # enough to tell kernels apart; the winner's is then chosen among all

CYCLES_PER_NS = 1.755  # the clock under load; cycles below are of this clock
LINE_BYTES = 128  # of L2; a row of a TMA box costs every line it touches
L2_BYTES = 50e6
MEMORY_BYTES_PER_NS = 4300.0  # measured; 4800 on the datasheet

SM_BYTES_PER_CYCLE = 77.0  # fitted: what an SM takes in, its own loads and multicasts
L2_BYTES_PER_CYCLE = 7700.0  # fitted: the lines that all SMs ask of L2
EVICTED = 0.99  # measured, up to 64 rows: where what is read once leaves L2 first
CLIPPED_LINE_CYCLES = 6.0  # measured with M = 1 and 16: lines outside a matrix are slow zeros
# Measured: of a loader warp, for 16 bytes a thread; along K before indices were loaded ahead.
GATHER_CYCLES = {"m": 40.0, "k": 62.0}
CLUSTER_WAIT = 0.13  # fitted: of a load; see `_load_cycles`
# Fitted over 352 kernels of 27 products with epilogues: from asking for a stage of operands to the
# end of its multiplication, on a busy chip. A ring of n stages takes in no more than n of them in
# that time.
RING_CYCLES = 2400.0
LEAK = 0.14  # fitted: of the faster of math and loads, that does not hide behind the slower
MEMORY_LEAK = 0.1  # fitted: the same of the faster of SMs and device memory

FMA_UNITS = 128  # of an SM, for float32
SIMT_LOSS = 0.05  # assumed: of their cycles, to copies for each side of a tile of 128x128

LAUNCH_NS = 1400.0  # fitted; includes the gap between two launches of a CUDA graph
EPILOGUE_CYCLES = 2700.0  # fitted: fill of the ring, drain of the tensor cores, last store
SUBTILE_BYTES_PER_CYCLE = 47.0  # fitted: one warpgroup converts and stages
SUBTILE_WAIT = 100.0  # fitted: two stages: a subtile waits until the one before has been read
LOOSE_CYCLES = 12.0  # assumed: of a warp, to read an element a thread and store it, without TMA
LOAD_CYCLES = 1100.0  # assumed: from asking for an operand's epilogue tile to its arrival
ISSUE_CYCLES = 1.3  # assumed: of an instruction of one warp, stalls included
SPECIAL_CYCLES = 8.0  # of one that the special function units execute: 4 lanes a cycle
EXPOSED = 0.6  # fitted: of an epilogue, in spite of the other warpgroup's multiplication
DYNAMIC_CYCLES = 900.0  # fitted: to fetch a tile from the counter
PARTIAL_CYCLES = 1100.0  # fitted: from asking for a partial sum to its arrival, once for each
HANDOVER_CYCLES = 1500.0  # fitted: from the first store of a partial sum until others may read it
CONVERSION_INSTRUCTIONS = 2.5  # counted, of an element: of int8 stored along N
INT4_INSTRUCTIONS = {1: 2.8, 2: 2.1}  # by the blocks of 64 columns that share what is loaded
CONVERSION_LEAK = 0.3  # assumed: of the faster of conversion and multiplication
# Measured on 9 products of up to 64 rows: the same of so few, what an instruction takes whose other
# operand is in registers, and what it takes to begin a k-tile.
FEW_ROWS_LEAK = 0.6
LEAST_MMA_CYCLES = 16.0
BEGIN_CYCLES = 80.0
SCALING_CYCLES = 100.0  # assumed: until the sums of a group are there, beside the other warpgroup
SHARED_WAVE = 1.025  # fitted: of the time where a last wave is shared; no SM rests, the clock drops


@dataclass(frozen=True)
class Estimate:
    """What a launch is expected to cost."""

    ns: float  # time of the kernel
    bound: str  # what limits it: "tensor cores", "FMA units", "L2" or "device memory"
    tiles: int  # of D, expected ones of a grouped product
    waves: int  # tiles that one CTA computes at most
    occupancy: float  # share of the tile slots of those waves that hold a tile, or some k-tiles
    splits_k: bool = False  # whether clusters share the k-tiles of some tiles


def estimate(
    problem: GemmProblem, spec: GemmSpec, raster_order: RasterOrder, device: Device
) -> Estimate:
    """Returns the expected cost of `spec`'s kernel on `problem`."""
    memory = memory_bytes(problem, spec, raster_order, device)
    return _estimate(problem.as_stored(spec.d_major), spec, memory, device)


def rough_estimate(problem: GemmProblem, spec: GemmSpec, device: Device) -> Estimate:
    """Returns the same in the better one of `ROUGH`."""
    memory = min(memory_bytes(problem, spec, order, device) for order in ROUGH)
    return _estimate(problem.as_stored(spec.d_major), spec, memory, device)


def _estimate(problem: GemmProblem, spec: GemmSpec, memory: float, device: Device) -> Estimate:
    """Returns the expected cost where device memory moves so many bytes for A, B and D."""
    p, s = problem, spec
    if s.simt_width:
        return _simt_estimate(p, s, memory, device)
    clusters, slots = _clusters(p, s), grid.max_clusters(s, device.num_sms)
    waves = grid.num_waves(clusters, s, device.num_sms)
    active_sms = _active_sms(p, s, device)

    math = _math_cycles(s)
    load = _load_cycles(p, s, active_sms)
    partial, live = _partial_tiles(p, s)
    k_tile = (1 - partial) * _k_tile_cycles(math, load)
    k_tile += partial * _k_tile_cycles(live * math, load)
    occupancy = clusters / (waves * slots)
    if s.split_k:
        tape = grid.k_split(p, s, device.num_sms)
        sm_ns = _split_cycles(p, s, device, tape, k_tile) / CYCLES_PER_NS
        sm_ns *= SHARED_WAVE if waves > 1 else 1.0
        memory += tape.ranges * s.cluster_size * _partial_bytes(s)  # written back from L2
        occupancy = _active_sms(p, s, device) / (slots * s.cluster_size)
    else:
        sm_ns = _sm_cycles(s, waves, _k_tiles(p, s) * k_tile) / CYCLES_PER_NS

    memory_ns = memory / MEMORY_BYTES_PER_NS
    if s.evict_first == ("b" if p.n > p.m else "a"):
        memory_ns *= EVICTED
    bound = "device memory" if memory_ns > sm_ns else "L2" if load > math else "tensor cores"
    return Estimate(
        ns=LAUNCH_NS + max(sm_ns, memory_ns) + MEMORY_LEAK * min(sm_ns, memory_ns),
        bound=bound,
        tiles=_tiles(p, s),
        waves=waves,
        occupancy=occupancy,
        splits_k=s.split_k,
    )


def _simt_estimate(problem: GemmProblem, spec: GemmSpec, memory: float, device: Device) -> Estimate:
    """Returns the expected cost of a kernel for FMA units, which has not been fitted.

    An SM has 128 of them, which its CTAs share. Small tiles read more vectors of shared memory from
    more lines of L2 for each product; that is worth nothing where SMs would be idle otherwise.
    """
    p, s = problem, spec
    tiles, resident = _tiles(p, s), max(1, simt.RESIDENT_THREADS // s.threads)
    slots = resident * device.num_sms
    waves = grid.ceil_div(tiles, slots)
    busiest = grid.ceil_div(tiles, device.num_sms)  # tiles of an SM
    products = s.tile_m * s.tile_n * s.tile_k * grid.num_k_tiles(p, s)
    loss = 1 + SIMT_LOSS * (128 / s.tile_m + 128 / s.tile_n)
    sm_ns = (busiest * products / FMA_UNITS * loss + EPILOGUE_CYCLES) / CYCLES_PER_NS
    memory_ns = memory / MEMORY_BYTES_PER_NS
    return Estimate(
        ns=LAUNCH_NS + max(sm_ns, memory_ns),
        bound="device memory" if memory_ns > sm_ns else "FMA units",
        tiles=tiles,
        waves=waves,
        occupancy=tiles / (waves * slots),
    )


def pass_ns(nbytes: int) -> float:
    """Returns the expected time of an elementwise kernel that moves so many bytes."""
    return LAUNCH_NS + nbytes / MEMORY_BYTES_PER_NS


@dataclass(frozen=True)
class TileCycles:
    """What the estimate is made of, for one CTA among its equals; cycles of one tile."""

    k_tiles: int  # k-tiles of it, rounded up
    multiply: float  # the tensor cores', for one k-tile
    load: float  # in which one k-tile of A and B arrives
    epilogue: float  # of one math warpgroup


def tile_cycles(problem: GemmProblem, spec: GemmSpec, device: Device) -> TileCycles:
    """Returns the parts of `spec`'s expected cost on `problem`."""
    problem = problem.as_stored(spec.d_major)
    active_sms = _active_sms(problem, spec, device)
    return TileCycles(
        k_tiles=ceil(_k_tiles(problem, spec)),
        multiply=_math_cycles(spec),
        load=_load_cycles(problem, spec, active_sms),
        epilogue=_epilogue_cycles(spec),
    )


def equal_groups(problem: GemmProblem) -> GemmProblem:
    """Returns the dense problem of the same work, were all groups equal; a dense one itself.

    Where there are fewer rows than groups, only as many groups count.
    """
    p, g = problem, problem.groups
    if g is None:
        return p
    length = p.m if g.axis == "m" else p.k
    groups = max(1, min(g.total, length) if g.axis == "m" else g.total)
    mean = grid.ceil_div(length, groups)
    layouts = {"a": replace(p.a, batch_stride=1), "d": replace(p.d, batch_stride=1)}
    if g.axis == "m":
        return replace(p, m=mean, l=groups, groups=None, **layouts)
    layouts["b"] = replace(p.b, batch_stride=1)
    return replace(p, k=mean, l=groups, groups=None, **layouts)


def expected_pieces(mean: float, piece: int) -> float:
    """Returns how many pieces a group of `mean` elements is cut into, the last one smaller.

    Sizes are taken to be spread as a gamma distribution of shape 2 (shares of a Dirichlet
    distribution of 2): the sum over j of the probability that a size exceeds j pieces. Of many
    pieces, half of one is lost; of few, there is at least one.
    """
    a = 2 * piece / mean
    q = exp(-a)
    return 1 / (1 - q) + a * q / (1 - q) ** 2


def _clusters(problem: GemmProblem, spec: GemmSpec) -> int:
    """Returns the cluster tiles of D; those to expect where its rows are grouped."""
    return _pieces(problem, spec.tile_m * spec.raster_m, spec.d_tile_n * spec.raster_n)


def _tiles(problem: GemmProblem, spec: GemmSpec) -> int:
    return _pieces(problem, spec.tile_m, spec.d_tile_n)


def _pieces(problem: GemmProblem, rows: int, columns: int) -> int:
    """Returns the pieces of so many rows and columns that D is cut into."""
    p = equal_groups(problem)
    mean = mean_rows(problem)
    along_m = round(expected_pieces(mean, rows) * p.l) if mean else grid.ceil_div(p.m, rows) * p.l
    return along_m * grid.ceil_div(p.n, columns)


def _active_sms(problem: GemmProblem, spec: GemmSpec, device: Device) -> int:
    """Returns how many SMs load at the same time."""
    if spec.split_k:
        return grid.launched_clusters(problem, spec, device.num_sms) * spec.cluster_size
    clusters = _clusters(problem, spec)
    waves = grid.num_waves(clusters, spec, device.num_sms)
    return grid.ceil_div(clusters, waves) * spec.cluster_size


def _k_tiles(problem: GemmProblem, spec: GemmSpec) -> float:
    """Returns the k-tiles of a tile; those to expect where K is grouped."""
    if problem.groups and problem.groups.axis == "k":
        return expected_pieces(problem.k / equal_groups(problem).l, spec.tile_k)
    return grid.num_k_tiles(problem, spec)


def mean_rows(problem: GemmProblem) -> float | None:
    """Returns the rows of a group that has some, where rows are grouped."""
    if problem.groups and problem.groups.axis == "m":
        return problem.m / equal_groups(problem).l
    return None


def _partial_tiles(problem: GemmProblem, spec: GemmSpec) -> tuple[float, float]:
    """Returns which share of the tiles hold a group's last rows, and of these how much is computed.

    Their blocks of 64 rows without any are loaded, but not multiplied.
    """
    mean = mean_rows(problem)
    if mean is None:
        return 0.0, 1.0
    tiles, blocks = expected_pieces(mean, spec.tile_m), expected_pieces(mean, 64)
    blocks_of_tile = spec.tile_m // 64
    if spec.converts_b:  # warpgroups share columns, and multiply all rows of a tile
        return 1 / tiles, 1.0
    return 1 / tiles, (blocks - (tiles - 1) * blocks_of_tile) / blocks_of_tile


def _k_tile_cycles(math: float, load: float) -> float:
    return max(math, load) + LEAK * min(math, load)


def _math_cycles(spec: GemmSpec) -> float:
    """Returns the tensor cores' cycles for one k-tile.

    An instruction multiplies 64 rows of A by N columns of B, 32 bytes of K each, for N / 2 cycles,
    and no faster than it reads these from shared memory, at 128 bytes a cycle. A gated product
    takes two.
    """
    if spec.converts_b:
        return _converting_cycles(spec)
    columns = spec.d_tile_n
    read = (64 + columns) * MMA_BYTES / 128
    k_steps = spec.tile_k / spec.mma_k
    if spec.bf16_terms:
        return _parts_cycles(spec)
    instructions = spec.graph.accumulators * (spec.tile_m / 64) * k_steps
    return max(columns / 2, read) * instructions


def _parts_cycles(spec: GemmSpec) -> float:
    """Returns the cycles in which one k-tile of float32 operands is multiplied by bfloat16 parts.

    The tensor cores', or those of shared memory: TMA writes A and B, warps read both and write B's
    parts, and each instruction reads a part's columns. Estimated, not fitted.
    """
    instructions = spec.bf16_terms * (spec.tile_m / 64) * (spec.tile_k / spec.mma_k)
    parts = spec.parts_bytes / PART_BUFFERS
    moved = 2 * spec.stage_bytes + parts + instructions * spec.tile_n * MMA_BYTES
    return max(instructions * spec.tile_n / 2, moved / 128)


def _converting_cycles(spec: GemmSpec) -> float:
    """Returns the same where B is converted: 64 of its columns are multiplied by all rows of A.

    Where groups along K have scales, the tensor cores wait for their sums to be scaled.
    """
    s = spec
    instructions = s.tile_n / 64 * s.tile_k / s.mma_k
    multiplied = instructions * max(s.tile_m / 2, s.tile_m * MMA_BYTES / 128, LEAST_MMA_CYCLES)
    of_element = CONVERSION_INSTRUCTIONS
    if DTYPES[s.b_dtype].bits == 4:
        blocks = s.columns_per_warpgroup // s.graph.accumulators // 64
        of_element = INT4_INSTRUCTIONS[1 if blocks % 2 or s.b_major == "k" else 2]
    converted = s.tile_n * s.tile_k * of_element * ISSUE_CYCLES / 128
    leak = FEW_ROWS_LEAK if s.tile_m <= 64 else CONVERSION_LEAK
    cycles = max(multiplied, converted) + leak * min(multiplied, converted) + BEGIN_CYCLES
    if s.k_group:
        scaled = s.tile_m * s.tile_n * ISSUE_CYCLES / 128 + SCALING_CYCLES
        cycles += s.tile_k / s.k_group * scaled
    return cycles


def _load_cycles(problem: GemmProblem, spec: GemmSpec, active_sms: int) -> float:
    """Returns the cycles in which one k-tile of A and B arrives.

    Limits: what a CTA takes in, what all CTAs ask of L2, which multicast lowers, and the ring's
    depth. CTAs that share A wait for each other's B. B is the later, the more of the input it makes
    up and so the more of it comes from memory: sharing the larger operand is the better choice.
    """
    p, s = problem, spec
    clusters_m, clusters_n = grid.cluster_grid(p, s)
    rows_a, rows_b = grid.loaded_rows(p, s)
    clipped = rows_a * (1 - p.m / (clusters_m * s.raster_m * rows_a))
    clipped += p.graph.accumulators * rows_b * (1 - p.n / (clusters_n * s.raster_n * rows_b))
    taken = grid.loaded_bytes(p, s) / SM_BYTES_PER_CYCLE
    taken += clipped * (s.tile_k * s.a_itemsize / LINE_BYTES) * CLIPPED_LINE_CYCLES
    elements_b = p.graph.accumulators * rows_b * s.tile_k // DTYPES[s.b_dtype].packed
    lines = _lines(p.a, s.a_box, rows_a * s.tile_k, s.a_itemsize) / s.cluster_n
    lines += _lines(p.b, s.b_box, elements_b, s.b_itemsize) / s.cluster_m * _line_fraction(s)
    requested = lines * LINE_BYTES * active_sms / L2_BYTES_PER_CYCLE
    columns = p.n * p.graph.accumulators
    rows = equal_groups(p).m
    late_a = rows / (rows + columns) if s.cluster_m > 1 else 0.0
    late_b = columns / (rows + columns) if s.cluster_n > 1 else 0.0
    arriving = max(taken, requested) * (1 + CLUSTER_WAIT * (late_a + late_b))
    return max(arriving, _gather_cycles(s), RING_CYCLES / s.num_stages)


def _line_fraction(spec: GemmSpec) -> float:
    """Returns what a row of B's box costs of a line.

    Measured with 64 bytes a row: all of it in large products, half in streams of B, whose
    neighbours read the other half from memory at the same time.
    """
    row = spec.b_box.contiguous * spec.b_itemsize
    return min(1.0, row / LINE_BYTES) if spec.short_boxes else 1.0


def _gather_cycles(spec: GemmSpec) -> float:
    """Returns the cycles in which two warps gather the rows of one k-tile."""
    if spec.gathered is None or spec.grouped is None:
        return 0.0
    of_a = spec.gathered == "a"
    row = spec.tile_k * (spec.a_itemsize if of_a else spec.b_itemsize)
    nbytes = (spec.tile_m if of_a else spec.d_tile_n) * row
    return nbytes / (16 * 64) * GATHER_CYCLES[spec.grouped]


def _lines(layout: MatrixLayout, box: TmaBox, elements: int, itemsize: int) -> float:
    """Returns the lines of L2 that a tile of `elements` touches, row of a box by row.

    Rows start at multiples of `step` bytes, so that one of `width` bytes crosses into a second
    line in (width - step) of `LINE_BYTES` cases: never where strides are multiples of the line.
    """
    width = box.contiguous * itemsize
    step = gcd(layout.leading_stride * itemsize, width)
    return elements / box.contiguous * (1 + (width - step) / LINE_BYTES)


def _sm_cycles(spec: GemmSpec, waves: int, mainloop: float) -> float:
    """Returns one CTA's cycles for `waves` tiles of `mainloop` cycles each.

    Pingpong warpgroups take turns, so a store costs only what is longer than the other's
    multiplication, and that of the last tile. Cooperative ones drift apart, so that one
    multiplies while the other stores, as far as the ring is deep. They do not drift far enough to
    hide what an epilogue computes, and share the units that compute it: on an H200 bias and gelu
    took 3,900 cycles more of each 128x256 tile, 4,096 of special function units.
    """
    epilogue = _epilogue_cycles(spec)
    if spec.warp_schedule == "pingpong":
        return waves * max(mainloop, (mainloop + epilogue) / 2) + epilogue
    if not spec.persistent:
        return waves * (mainloop + epilogue)
    hidden = 1 - EXPOSED if spec.math_warpgroups > 1 else 0.0
    fetch = DYNAMIC_CYCLES if spec.dynamic else 0.0
    shared = (spec.math_warpgroups - 1) * _computing_cycles(spec)
    stored = waves * (mainloop + epilogue + fetch) - (waves - 1) * hidden * epilogue
    return stored + waves * shared


def _split_cycles(
    problem: GemmProblem, spec: GemmSpec, device: Device, tape: KSplit, k_tile: float
) -> float:
    """Returns the busiest CTA's cycles where clusters share tiles.

    It multiplies a range and whole tiles, stores its share of the tiles, leaves one partial sum and
    adds those of the others that work on its tile.
    """
    tiles, k_tiles = _clusters(problem, spec), grid.num_k_tiles(problem, spec)
    whole = tape.items - tape.ranges
    clusters = grid.launched_clusters(problem, spec, device.num_sms)
    length = whole // clusters * k_tiles
    exchange = 0.0
    if tape.ranges:
        split = tiles - whole
        length += grid.ceil_div(split * k_tiles, tape.ranges)
        taken = _partial_bytes(spec) / SM_BYTES_PER_CYCLE
        added = grid.ceil_div(tape.ranges, split) - (tape.ranges % split == 0)
        left = HANDOVER_CYCLES + taken if added else 0.0
        exchange = left + added * (PARTIAL_CYCLES + taken)
    stored = grid.ceil_div(tiles, clusters)
    return _sm_cycles(spec, stored, length * k_tile / stored) + exchange


def _partial_bytes(spec: GemmSpec) -> int:
    return 4 * spec.d_tile_m * spec.tile_n


def _epilogue_cycles(spec: GemmSpec) -> float:
    columns = spec.d_tile_n / spec.warpgroups_n
    subtiles = spec.rows_per_warpgroup / 64 * (columns / spec.epi_tile_n)
    wait = SUBTILE_WAIT if spec.epi_stages == 2 and spec.graph.matrices else 0.0
    cycles = spec.epi_stage_bytes / SUBTILE_BYTES_PER_CYCLE + wait
    if spec.loose_d:
        cycles += len(spec.graph.matrices) * spec.epi_tile_n / 2 * LOOSE_CYCLES
    cycles += _computing_cycles(spec) / subtiles
    late = 0.0
    if spec.epi_load_stages and any(operand.kind == "matrix" for operand in spec.graph.operands):
        # The first tiles arrive during the multiplication; each other one is asked for when the
        # one before it in its stage has been read.
        late = max(0.0, subtiles - spec.epi_load_stages)
        late *= max(0.0, LOAD_CYCLES / spec.epi_load_stages - cycles)
    return EPILOGUE_CYCLES + subtiles * cycles + late


def _computing_cycles(spec: GemmSpec) -> float:
    """Returns the cycles in which one warpgroup computes the epilogue of its rows of a tile."""
    columns = spec.d_tile_n / spec.warpgroups_n
    return spec.rows_per_warpgroup * columns / 128 * element_cycles(spec.graph)


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


def _in_flight(
    problem: GemmProblem, spec: GemmSpec, raster_order: RasterOrder, device: Device
) -> tuple[float, float]:
    """Returns the rows of A and columns of B that the tiles of one wave read.

    These tiles form a rectangle: as wide as the walk's band, or several bands where a band is
    shorter than the wave.
    """
    p, s = equal_groups(problem.as_stored(spec.d_major)), spec
    along, across = grid.cluster_grid(p, s)
    if raster_order.along == "n":
        along, across = across, along
    clusters = along * across
    wave = clusters / grid.num_waves(clusters, s, device.num_sms)
    wide = min(raster_order.swizzle, across)
    long = wave / wide
    if long > along:
        wide, long = min(across, wave / along), along
    m, n = (long, wide) if raster_order.along == "m" else (wide, long)
    return m * s.tile_m * s.raster_m, n * s.d_tile_n * s.raster_n


def memory_bytes(
    problem: GemmProblem, spec: GemmSpec, raster_order: RasterOrder, device: Device
) -> float:
    """Returns the bytes that device memory moves.

    Where A and B fit in L2, each is read once; else every wave reads its rows and columns
    again, but for an operand small enough to stay.
    """
    p, s = equal_groups(problem.as_stored(spec.d_major)), spec
    row_a = p.k * s.a_itemsize
    row_b = DTYPES[s.b_dtype].nbytes(p.k * p.graph.accumulators)
    a_bytes, b_bytes = p.m * row_a, p.n * row_b
    if a_bytes + b_bytes <= 0.8 * L2_BYTES:
        return p.bytes
    rows, columns = _in_flight(p, s, raster_order, device)
    waves = grid.num_waves(prod(grid.cluster_grid(p, s)), s, device.num_sms)
    inputs = sum(
        whole if whole <= 0.4 * L2_BYTES else max(whole, waves * lines * row)
        for whole, lines, row in ((a_bytes, rows, row_a), (b_bytes, columns, row_b))
    )
    return max(float(p.bytes), p.l * (inputs + p.m * p.n * p.element_bytes))


def best_raster_order(problem: GemmProblem, spec: GemmSpec, device: Device) -> RasterOrder:
    """Returns the order of tiles whose waves read the fewest rows and columns.

    Of equals, neighbours in time lie side by side along the cluster's longer edge in a
    persistent kernel, along its tile's shorter edge in one with a tile a CTA. Measured: worth
    up to 7 % with tiles of 128x128, and 5 % at 1024^3.
    """
    s = spec
    if s.persistent:
        along_m = s.tile_n * s.cluster_n > s.tile_m * s.cluster_m or s.cluster_n > s.cluster_m
    else:
        along_m = s.tile_m >= s.tile_n
    preferred = "m" if along_m else "n"
    return min(
        RASTER_ORDERS,
        key=lambda t: (round(sum(_in_flight(problem, s, t, device))), t.along != preferred),
    )


def roofline_ns(problem: GemmProblem) -> float:
    """Returns the least time that any kernel needs: tensor cores or device memory, all busy."""
    if problem.simt:
        fma_ns = problem.flops / (2 * FMA_UNITS * 132 * CYCLES_PER_NS)
        return LAUNCH_NS + max(fma_ns, problem.bytes / MEMORY_BYTES_PER_NS)
    mma_k = 16 / problem.bf16_terms if problem.bf16_terms else DTYPES[problem.a_dtype].mma_k
    peak_flops_per_ns = 820e3 * mma_k / 16  # of bfloat16 measured, 8192^3
    busy = max(problem.flops / peak_flops_per_ns, problem.bytes / MEMORY_BYTES_PER_NS)
    return LAUNCH_NS + busy
