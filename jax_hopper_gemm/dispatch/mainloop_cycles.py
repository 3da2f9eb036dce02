"""The cycles of a k-tile: loading A and B, converting B, multiplying.

Constants marked "fitted" as in `cost`.
"""

from __future__ import annotations

from ..gemm import grid
from ..gemm.bf16_parts import num_parts
from ..gemm.dtypes import DTYPES, MMA_BYTES
from ..gemm.problem import GemmProblem, MatrixLayout
from ..gemm.smem import PART_BUFFERS
from ..gemm.spec import GemmSpec
from ..gemm.tma_box import TmaBox
from .device import ISSUE_CYCLES, L2_BYTES_PER_CYCLE, LINE_BYTES, SM_BYTES_PER_CYCLE, Device
from .expected_tiles import equal_groups
from .several import divisor, each, least, most, where

# Fitted, with what split-K exchanges (`cost`) and the rates of loads (`device`), over 900 dense
# products with 3 to 20 kernels each: how much longer the tensor cores take than they must, and
# exponents of `bounded_by`, for math and loads, the limits of loads and those of an instruction.
MATH_LOSS = 1.07
K_TILE_EXPONENT, LOAD_EXPONENT, MMA_EXPONENT = 6.0, 4.2, 12.0

CLIPPED_LINE_CYCLES = 6.0  # measured with M = 1 and 16: lines outside a matrix are slow zeros
# Measured: of a loader warp, for 16 bytes a thread; along K before indices were loaded ahead.
GATHER_CYCLES = {"m": 40.0, "k": 62.0}
CLUSTER_WAIT = 0.09  # fitted: of a load; see `load_cycles`
# Fitted over 4,704 kernels of 350 medium products: the part of a load that clusters of four and
# eight save, for each CTA, in place of that wait. Kernels of least cost then took 1.034 of the
# fastest one's time in the mean, before 1.040.
GAIN_OF_CLUSTERS = 1 / 40
# Fitted over 172 kernels of 30 gated products on an H100: lines of B, stored along N, that are read
# more for each row of a tile's part of gate or up, which lie apart, but in products of 512 rows.
# With it kernels of least cost took 1.003 of the fastest one's time in the mean and 1.03 at most,
# without 1.018 and 1.16. No H200 has been asked.
LINES_APART = {"H100": 0.5, "H200": 0.0}
LINES_APART_ROWS = 512
# Fitted over 352 kernels of 27 products with epilogues: from asking for a stage of operands to the
# end of its multiplication, on a busy chip. A ring of n stages takes in no more than n of them in
# that time. Where warpgroups take k-tiles in turns, each takes longer: fitted over 240 products of
# 1 to 32 rows on an H200, whose kernels of least cost took 1.001 of the fastest one's time in the
# mean with 4,400 and 1.016 with the other number; fitted anew to 191 products of 1 to 64 rows,
# 1.007 for 1.008. Those are k-tiles of so many bytes of B, converted; others take it in proportion
# (of 84 narrow products 0.6 % for 1.4 % from the fastest).
RING_CYCLES, RING_CYCLES_IN_TURNS, BYTES_IN_TURNS = 2400.0, 5000.0, 2**15

# Fitted over 25 kernels on 6 products of 8 bits, which then err by 4 % (rms): cycles of a k-tile
# beside those of the tensor cores, where sums are promoted, by math warpgroups (of one assumed).
PROMOTION_CYCLES = {1: 260.0, 2: 130.0, 3: 30.0}
SHORT_K_CYCLES = {**PROMOTION_CYCLES, 3: 130.0}  # the same where K is in groups: measured
BLOCK_SCALES_CYCLES = 40.0  # more, with scales of blocks of both operands
# More, where each column has a scale: for 64x128 elements, and for each piece of a tile.
COLUMN_SCALES_CYCLES, PIECE_CYCLES = 90.0, 40.0
# Where two warpgroups take k-tiles in turns, what either takes to promote its own: at all, and for
# 64 columns, by whether each has a scale; and the cycles of such a ring. Fitted, with
# `epilogue_cycles`, over 265 such kernels and 83 others on 61 products of 1 to 8192 rows, mostly
# of e4m3 by blocks, on an H200: kernels of least cost then took 1.007 of the fastest one's time in
# the mean and 1.07 at most. Sums that have no scales are assumed to take as long.
TURN_CYCLES, TURN_RING_CYCLES = 150.0, 2000.0
TURN_COLUMNS_CYCLES = {False: 220.0, True: 310.0}

# Of an element, of a loop: counted of int8 stored along N. Fitted of int4, by the blocks of 64
# columns that share what is loaded; counted 2.2 and 1.7.
CONVERSION_INSTRUCTIONS = 2.2
INT4_INSTRUCTIONS = {1: 2.0, 2: 1.5}
PARTS_LOSS = 1.42  # measured: of a k-tile whose operands two warpgroups cut, 1.35 to 1.48
# Instructions for an element that one warpgroup cuts, and for each of its parts, while the tensor
# cores wait. Fitted over 67 such kernels on 59 products by 3 and 6 terms on an H200: kernels of
# least cost then took 1.003 of the fastest one's time in the mean and 1.12 at most.
CUT_INSTRUCTIONS, PART_INSTRUCTIONS = 6.0, 3.5
# Of the faster of conversion and multiplication: fitted over 9 kernels of 1 and 64 rows, assumed
# the same with more. Measured: an instruction whose other operand is in registers.
CONVERSION_LEAK = 0.3
LEAST_MMA_CYCLES = 16.0
# What it takes to begin a k-tile, and until the sums of a group are there, beside the other
# warpgroup. Fitted over 408 products of 1 to 512 rows on an H200: kernels of least cost then took
# 1.004 of the fastest one's time in the mean and 1.12 at most.
BEGIN_CYCLES, SCALING_CYCLES = 80.0, 30.0
# Of what it takes to scale sums, where a warpgroup does while the other multiplies: fitted over 216
# kernels of 36 products of 1 to 32 rows on an H200, 1.022 of the fastest one's time for 1.034.
SCALING_IN_TURNS = 0.5


WIDE_EXPONENT = 8.0  # where B is float32: of the tensor cores' time and shared memory's


def bounded_by(a: float, b: float, exponent: float) -> float:
    """Returns how long it takes what two limits bound, by the times that either alone would take.

    It is the longer one, but more where both are near: 2**(1/exponent) times that at most.
    """
    return (a**exponent + b**exponent) ** (1 / exponent)


def k_tile_cycles(math: float, load: float) -> float:
    return bounded_by(MATH_LOSS * math, load, K_TILE_EXPONENT)


def math_cycles(spec: GemmSpec) -> float:
    """Returns the tensor cores' cycles for one k-tile.

    An instruction multiplies 64 rows of A by N columns of B, 32 bytes of K each, for N / 2 cycles,
    bounded by its reads of shared memory, at 128 bytes a cycle. A gated product takes two.
    """
    if spec.b_in_registers:
        return _converting_cycles(spec)
    columns = spec.d_tile_n
    read = (64 + columns) * MMA_BYTES / 128
    k_steps = spec.tile_k / spec.mma_k
    if spec.cuts_operands:
        return _parts_cycles(spec)
    instructions = spec.graph.accumulators * (spec.tile_m / 64) * k_steps
    cycles = bounded_by(columns / 2, read, MMA_EXPONENT) * instructions
    return cycles + _promotion_cycles(spec, cycles) if spec.promoted else cycles


def _promotion_cycles(spec: GemmSpec, multiplied: float) -> float:
    """Returns the cycles that it takes to promote the sums of a k-tile, beside its products.

    A warpgroup that takes turns promotes while the other multiplies, and where that takes longer
    half of the rest is left of each k-tile.
    """
    s, of_warpgroups = spec, SHORT_K_CYCLES if spec.grouped == "k" else PROMOTION_CYCLES
    cycles = each(of_warpgroups.__getitem__, s.math_warpgroups)
    if s.b_block == 1:
        elements, pieces = s.tile_m * s.tile_n, s.tile_m // 64 * (s.tile_n // s.sum_columns)
        cycles += elements / (64 * 128) * COLUMN_SCALES_CYCLES + pieces * PIECE_CYCLES
    elif s.b_block:
        cycles += BLOCK_SCALES_CYCLES
    in_turns = TURN_CYCLES + s.tile_n / 64 * TURN_COLUMNS_CYCLES[s.b_block == 1]
    return where(s.k_in_turns, most(0.0, (in_turns - multiplied) / 2), cycles)


def _parts_cycles(spec: GemmSpec) -> float:
    """Returns the cycles in which one k-tile of float32 operands is multiplied by bfloat16 parts.

    The tensor cores', or those of shared memory: TMA writes A and B, warps read both and write B's
    parts, and each instruction reads a part's columns. As much again is lost as was measured. One
    warpgroup cuts and multiplies by turns.
    """
    s = spec
    instructions = s.bf16_terms * (s.tile_m / 64) * (s.tile_k / s.mma_k)
    multiplied = instructions * s.tile_n / 2
    parts = s.parts_bytes / PART_BUFFERS
    moved = 2 * s.stage_bytes + parts + instructions * s.tile_n * MMA_BYTES
    of_element = CUT_INSTRUCTIONS + PART_INSTRUCTIONS * num_parts(s.bf16_terms)
    cut = (s.tile_m + s.tile_n) * s.tile_k * of_element * ISSUE_CYCLES / 128
    side_by_side = PARTS_LOSS * most(multiplied, moved / 128)
    return where(s.math_warpgroups == 1, cut + multiplied, side_by_side)


def _converting_cycles(spec: GemmSpec) -> float:
    """Returns the same where B is converted: 64 of its columns are multiplied by all rows of A.

    Where groups along K have scales, the tensor cores wait for their sums to be scaled.
    """
    s = spec
    instructions = s.tile_n / 64 * s.tile_k / s.mma_k
    read = s.tile_m * MMA_BYTES / 128
    multiplied = instructions * most(most(s.tile_m / 2, read), LEAST_MMA_CYCLES)
    if s.rounds_operands:  # TMA writes A and B, warps read B, and each instruction A's rows
        loaded = s.tile_n * s.tile_k * s.b_itemsize
        moved = s.stage_bytes + loaded + instructions * s.tile_m * MMA_BYTES
        return bounded_by(multiplied, moved / 128, WIDE_EXPONENT)
    of_element = CONVERSION_INSTRUCTIONS
    if DTYPES[s.b_dtype].bits == 4:
        blocks = s.converted_columns // s.graph.accumulators // 64
        alone = (blocks % 2 > 0) | (s.b_major == "k")
        of_element = where(alone, INT4_INSTRUCTIONS[1], INT4_INSTRUCTIONS[2])
    converted = s.tile_n * s.tile_k * of_element * ISSUE_CYCLES / 128
    faster, slower = least(multiplied, converted), most(multiplied, converted)
    cycles = slower + CONVERSION_LEAK * faster + BEGIN_CYCLES
    if s.k_group:
        scaled = s.tile_m * s.tile_n * ISSUE_CYCLES / 128 + SCALING_CYCLES
        cycles += s.tile_k / s.k_group * scaled * where(s.k_in_turns, SCALING_IN_TURNS, 1.0)
    return cycles


def load_cycles(problem: GemmProblem, spec: GemmSpec, device: Device, active_sms: int) -> float:
    """Returns the cycles in which one k-tile of A and B arrives.

    Limits: what a CTA takes in, what all CTAs ask of L2, which multicast lowers, and the ring's
    depth. CTAs that share A wait for each other's B. B is the later, the more of the input it makes
    up and so the more of it comes from memory: sharing the larger operand is the better choice.
    Clusters of four and eight gain more than they wait.
    """
    p, s = problem, spec
    clusters_m, clusters_n = grid.cluster_grid(p, s)
    rows_a, rows_b = grid.loaded_rows(p, s)
    clipped = rows_a * (1 - p.m / (clusters_m * s.raster_m * rows_a))
    clipped += p.graph.accumulators * rows_b * (1 - p.n / (clusters_n * s.raster_n * rows_b))
    taken = grid.loaded_bytes(p, s) / SM_BYTES_PER_CYCLE
    if not p.reads_parts:  # of which 16 rows took as long as 64
        taken += clipped * (s.tile_k * s.a_itemsize / LINE_BYTES) * CLIPPED_LINE_CYCLES
    elements_b = p.graph.accumulators * rows_b * s.tile_k // DTYPES[s.b_dtype].packed
    lines = _lines(p.a, s.a_box, rows_a * s.tile_k, s.a_itemsize) / s.cluster_n
    # Measured with 64 bytes a row of B's box: a line in large products, half of one in streams,
    # whose neighbours read the other half from memory at the same time.
    row = least(1.0, s.b_box.contiguous * s.b_itemsize / LINE_BYTES)
    fraction = where(s.short_boxes, row, 1.0)
    apart = (p.graph.accumulators > 1) & (s.b_major == "n") & (p.m > LINES_APART_ROWS)
    more = LINES_APART[device.gpu] * LINE_BYTES / (rows_b * s.b_itemsize)
    fraction *= where(apart, 1 + more, 1.0)
    lines += _lines(p.b, s.b_box, elements_b, s.b_itemsize) / s.cluster_m * fraction
    requested = lines * LINE_BYTES * active_sms / L2_BYTES_PER_CYCLE[device.gpu]
    columns = p.n * p.graph.accumulators
    rows = equal_groups(p).m
    late_a = where(s.cluster_m > 1, rows / (rows + columns), 0.0)
    late_b = where(s.cluster_n > 1, columns / (rows + columns), 0.0)
    arriving = bounded_by(taken, requested, LOAD_EXPONENT)
    sharing = s.cluster_m * s.cluster_n
    waiting, gained = 1 + CLUSTER_WAIT * (late_a + late_b), 1 - GAIN_OF_CLUSTERS * sharing
    arriving *= where(sharing > 2, gained, waiting)
    in_turns = TURN_RING_CYCLES
    if s.b_in_registers:
        in_turns = RING_CYCLES_IN_TURNS * s.tile_n * s.tile_k * s.a_itemsize / BYTES_IN_TURNS
    ring = where(s.k_in_turns, in_turns, RING_CYCLES) / s.num_stages
    return most(most(arriving, _gather_cycles(s)), ring)


def _lines(layout: MatrixLayout, box: TmaBox, elements: int, itemsize: int) -> float:
    """Returns the lines of L2 that a tile of `elements` touches, row of a box by row.

    Rows start at multiples of `step` bytes, so that one of `width` bytes crosses into a second
    line in (width - step) of `LINE_BYTES` cases: never where strides are multiples of the line.
    """
    width = box.contiguous * itemsize
    step = divisor(layout.leading_stride * itemsize, width)
    return elements / box.contiguous * (1 + (width - step) / LINE_BYTES)


def _gather_cycles(spec: GemmSpec) -> float:
    """Returns the cycles in which two warps gather the rows of one k-tile."""
    if spec.gathered is None or spec.grouped is None:
        return 0.0
    of_a = spec.gathered == "a"
    row = spec.tile_k * (spec.a_itemsize if of_a else spec.b_itemsize)
    nbytes = (spec.tile_m if of_a else spec.d_tile_n) * row
    return nbytes / (16 * 64) * GATHER_CYCLES[spec.grouped]
