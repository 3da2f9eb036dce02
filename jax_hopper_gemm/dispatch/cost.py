"""How long a kernel takes, estimated from what it must multiply and move.

    expected_tiles -> mainloop_cycles, epilogue_cycles, memory_traffic -> cost

A CTA's tiles cost, for each k-tile, the slower of its tensor cores and its loads, or some more
where these are near; then an epilogue, which persistent kernels hide in part. A launch costs its
waves of tiles, or device memory where that is slower.

The form is the hardware's; the constants marked "fitted" are least squares over 1,900 kernels
timed on an H200 (42 problems of over 16 rows, 6 to 1,400 us), with most weight on the fastest
of each problem. On these same problems the kernel of least cost was 1 % slower than the fastest
on average and 3 % at most; costs of good kernels were within 5 % of their times, nine out of ten.
Of the streams of `benchmarks/few_rows.py`, 1 to 64 rows, that of least cost was 0.2 % slower than
the fastest on average and 4 % at most. None of them had an epilogue. Loads and split-K were fitted
again to 900 random products.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Any, NamedTuple

from ..gemm import grid, simt
from ..gemm.bf16_parts import num_parts
from ..gemm.dtypes import DTYPES
from ..gemm.problem import GemmProblem
from ..gemm.raster import RasterOrder
from ..gemm.spec import GemmSpec
from .configs import RASTER_ORDERS
from .device import (
    CYCLES_PER_NS,
    FMA_UNITS,
    H200,
    MEMORY_BYTES_PER_NS,
    MMA_FLOPS,
    SM_BYTES_PER_CYCLE,
    Device,
)
from .epilogue_cycles import EPILOGUE_CYCLES, computing_cycles, epilogue_cycles, loose_cycles
from .expected_tiles import (
    NOT_SHARED,
    Waves,
    expected_k_tiles,
    expected_largest,
    expected_tiles,
    expected_waves,
    partial_tiles,
)
from .mainloop_cycles import MATH_LOSS, k_tile_cycles, load_cycles, math_cycles
from .memory_traffic import memory_bytes
from .several import Several, least, most, where

ROUGH = RASTER_ORDERS[:2]  # enough to tell kernels apart; the winner's is then chosen among all

LAUNCH_NS = 1400.0  # fitted; includes the gap between two launches of a CUDA graph
EVICTED = 0.99  # measured, up to 64 rows: where what is read once leaves L2 first
MEMORY_LEAK = 0.1  # fitted: of the faster of SMs and device memory, that does not hide
EXPOSED = 0.6  # fitted: of an epilogue, in spite of the other warpgroup's multiplication
# The same of promoted sums where K is in groups, with three stages and with more: measured, by the
# times of three tiles with and without their stores. A tile begins no sooner there without claims.
EXPOSED_OF_SHORT_K = 0.4, 0.19
# The same of other sums of groups along K, and of an epilogue that lengthens a pingpong warpgroup's
# turn there. Fitted, with what the largest group takes, over 278 kernels of 31 products on an H200:
# kernels of least cost then took 1.008 of the fastest one's time in the mean, before 1.085.
EXPOSED_OF_GROUPS, LENGTHENING = 0.35, 0.15
COUNTER_NS = 500.0  # assumed: until the counter of tiles is ready
DYNAMIC_CYCLES = 900.0  # fitted: to claim and find a tile of groups
# Fitted over 940 kernels of 47 products: what claims cost the tiles of two pingpong warpgroups.
# Cooperative ones claim a tile while they multiply.
IN_TURNS_CYCLES = 1600.0
# Fitted over 6,000 kernels of 840 batches, where turns of such warpgroups take so much less, claims
# included, and the counter so much. With `memory_traffic.STORED_IN_BATCHES` kernels of least cost
# then took 1.031 of the fastest one's time in the mean, before 1.043, none with K shared.
HIDDEN_IN_BATCHES, COUNTER_OF_BATCHES_NS = 1300.0, 1800.0
# Fitted: from asking for a partial sum to its arrival, once for each: of tiles of so many elements
# of D, or more; of smaller ones in proportion, but no less than the last. With that the kernels of
# least cost of 1,843 products took 1.019 of the fastest one's time in the mean, before 1.021, and
# 1.019 for 1.026 of those with up to 64 rows or columns and K from 2,000 on.
PARTIAL_CYCLES, PARTIAL_ELEMENTS, LEAST_PARTIAL_CYCLES = 1100.0, 8192, 600.0
# Chosen for 300 narrow products, of 16 and 8 bits, in TF32 and with weights of 8 and 4 bits, where
# the kernel of least cost is 1.9 % from the fastest timed: cycles for each SM that is at work, and
# the rate at which a CTA gets sums of its slice.
CLUSTER_CYCLES_OF_SM, CLUSTER_BYTES_PER_CYCLE = 6.0, 24.0
HANDOVER_CYCLES = 1000.0  # fitted: from the first store of a partial sum until others may read it
SHARED_WAVE = 1.067  # fitted: of the time where a last wave is shared; no SM rests, the clock drops
COPY_PASSES = 2.4  # measured: as many bytes moved for each byte of lines that begin anywhere
CUT_PASSES = 1.2  # fitted: as many bytes moved for each that is moved to cut operands into parts
WIDENING_NS = {8: 0.79e-3, 4: 0.7e-3}  # measured on an H200, with scales along K
SIMT_LOSS = 0.05  # assumed: of their cycles, to copies for each side of a tile of 128x128


class Estimate(NamedTuple):
    """What a launch is expected to cost."""

    ns: float  # time of the kernel
    bound: str  # what limits it: "tensor cores", "FMA units", "L2" or "device memory"
    tiles: int  # of D, expected ones of a grouped product
    waves: int  # tiles that one CTA computes at most
    occupancy: float  # share of the tile slots of those waves that hold a tile, or some k-tiles
    splits_k: bool = False  # whether clusters share the k-tiles of some tiles


@lru_cache(maxsize=4096)
def estimate(
    problem: GemmProblem, spec: GemmSpec, raster_order: RasterOrder, device: Device
) -> Estimate:
    """Returns the expected cost of `spec`'s kernel on `problem`."""
    return _estimate(problem, spec, (raster_order,), device)


def rough_estimate(problem: GemmProblem, spec: GemmSpec, device: Device) -> Estimate:
    """Returns the same in the better one of `ROUGH`."""
    return _estimate(problem, spec, ROUGH, device)


def _estimate(
    problem: GemmProblem, spec: GemmSpec, orders: Iterable[RasterOrder], device: Device
) -> Estimate:
    t = expected_times(problem, spec, device, orders)
    tiles = expected_tiles(problem.as_run_by(spec), spec)
    bound = "L2" if t.by_loads else "FMA units" if spec.simt_width else "tensor cores"
    bound = "device memory" if t.memory_ns > t.sm_ns else bound
    occupied, slots = t.waves.tiles, t.waves.number * t.waves.resident
    if spec.split_k:
        occupied, slots = t.waves.active_sms, t.waves.resident * spec.cluster_size
    return Estimate(t.ns, bound, tiles, t.waves.number, occupied / slots, spec.split_k)


class Times(NamedTuple):
    """What an estimate is made of: numbers, or arrays of them."""

    ns: Any
    sm_ns: Any
    memory_ns: Any
    by_loads: Any  # whether loads take an SM longer than math
    waves: Waves


def expected_times(
    problem: GemmProblem,
    spec: GemmSpec | Several,
    device: Device,
    orders: Iterable[RasterOrder] = ROUGH,
) -> Times:
    """Returns the expected times of a kernel, or several of a type, in the best of some orders."""
    s: Any = spec
    p, memory = problem.as_run_by(s), memory_bytes(problem, s, orders, device)
    if s.simt_width:
        return _simt_times(p, s, memory, device)
    waves = expected_waves(p, s, device)
    math, load = math_cycles(s), load_cycles(p, s, device, waves.active_sms)
    partial, live = partial_tiles(p, s)
    k_tile = (1 - partial) * k_tile_cycles(math, load)
    k_tile += partial * k_tile_cycles(live * math, load)

    shared, k_tiles = waves.shared, expected_k_tiles(p, s)
    k_tiles = where(s.cluster_k > 1, -(-k_tiles // s.cluster_k), k_tiles)
    mainloop = where(s.split_k, shared.multiplied * k_tile / shared.stored, k_tiles * k_tile)
    batch = p.l > 1 and not p.groups
    cycles = _sm_cycles(s, where(s.split_k, shared.stored, waves.number), mainloop, batch)
    if p.groups and p.groups.axis == "k":  # an SM with few tiles may have the largest group's
        cycles += (expected_largest(p.groups.total) - 1) * mainloop / waves.number
    sm_ns = cycles / CYCLES_PER_NS
    sm_ns *= where(s.split_k & (waves.number > 1), SHARED_WAVE, 1.0)
    sm_ns += waves.number * loose_cycles(s) / CYCLES_PER_NS

    memory += shared.ranges * s.cluster_size * _partial_bytes(s)  # written back from L2
    memory_ns = memory / MEMORY_BYTES_PER_NS
    memory_ns *= where(s.evict_first == ("b" if p.n > p.m else "a"), EVICTED, 1.0)
    ns = LAUNCH_NS + most(sm_ns, memory_ns) + MEMORY_LEAK * least(sm_ns, memory_ns)
    # When all k-tiles have been read.
    exchange = _exchange_cycles(s, shared.added) + _cluster_sum_cycles(s, waves.active_sms)
    ns += exchange / CYCLES_PER_NS
    counter_ns = COUNTER_OF_BATCHES_NS if batch else COUNTER_NS
    ns += s.dynamic * (0.0 if p.groups else counter_ns)
    return Times(ns + cutting_ns(p), sm_ns, memory_ns, load > math, waves)


def _sm_cycles(spec: GemmSpec, waves: int, mainloop: float, batch: bool) -> float:
    """Returns one CTA's cycles for `waves` tiles of `mainloop` cycles each.

    Pingpong warpgroups take turns, so a store costs only what is longer than the other's
    multiplication, and that of the last tile. Cooperative ones drift apart, so that one
    multiplies while the other stores, as far as the ring is deep. They do not drift far enough to
    hide what an epilogue computes, and share the units that compute it: on an H200 bias and gelu
    took 3,900 cycles more of each 128x256 tile, 4,096 of special function units. The loader of one
    warpgroup runs ahead, too: of each further tile's epilogue twice what is over `EPILOGUE_CYCLES`
    counts (fitted, 1,776 products).
    """
    epilogue = epilogue_cycles(spec) / spec.slices
    fetch, claims = (DYNAMIC_CYCLES, 0.0) if spec.grouped else (0.0, IN_TURNS_CYCLES)
    more = -HIDDEN_IN_BATCHES if batch else spec.dynamic * claims
    in_turns = mainloop + epilogue + more
    fetch, turn, exposed = spec.dynamic * fetch, mainloop, EXPOSED
    if spec.grouped == "k":
        turn, exposed = mainloop + LENGTHENING * epilogue, EXPOSED_OF_GROUPS
        if spec.promoted:
            fetch, exposed = DYNAMIC_CYCLES, where(spec.num_stages <= 3, *EXPOSED_OF_SHORT_K)
    in_turns = waves * most(turn, in_turns / 2) + epilogue
    alone = most(0.0, 2 * EPILOGUE_CYCLES - epilogue)
    hidden = where(spec.math_warpgroups > 1, (1 - exposed) * epilogue, alone)
    shared = spec.persistent * (spec.math_warpgroups - 1) * computing_cycles(spec)
    stored = waves * (mainloop + epilogue + fetch) - (waves - 1) * spec.persistent * hidden
    return where(spec.warp_schedule == "pingpong", in_turns, stored + waves * shared)


def _exchange_cycles(spec: GemmSpec, added: int) -> float:
    """Returns the cycles in which a CTA leaves a partial sum and adds some."""
    nbytes = _partial_bytes(spec)
    taken = nbytes / SM_BYTES_PER_CYCLE
    large = least(1.0, nbytes / (4 * PARTIAL_ELEMENTS))
    arrival = most(LEAST_PARTIAL_CYCLES, PARTIAL_CYCLES * large)
    return where(added > 0, HANDOVER_CYCLES + taken, 0.0) + added * (arrival + taken)


def _cluster_sum_cycles(spec: GemmSpec, active_sms: int) -> float:
    """Returns the cycles in which CTAs of a cluster send their sums and each adds up its slice."""
    cycles = CLUSTER_CYCLES_OF_SM * active_sms + spec.slot_bytes / CLUSTER_BYTES_PER_CYCLE
    return where(spec.cluster_k > 1, cycles, 0.0)


def _partial_bytes(spec: GemmSpec) -> int:
    return 4 * spec.d_tile_m * spec.tile_n


def _simt_times(problem: GemmProblem, spec: GemmSpec, memory: float, device: Device) -> Times:
    """Returns the expected times of a kernel for FMA units, which have not been fitted.

    An SM has 128 of them, which its CTAs share. Small tiles read more vectors of shared memory from
    more lines of L2 for each product; that is worth nothing where SMs would be idle otherwise.
    """
    p, s = problem, spec
    tiles, resident = expected_tiles(p, s), most(1, simt.RESIDENT_THREADS // s.threads)
    slots = resident * device.num_sms
    waves = grid.ceil_div(tiles, slots)
    busiest = grid.ceil_div(tiles, device.num_sms)  # tiles of an SM
    products = s.tile_m * s.tile_n * s.tile_k * grid.num_k_tiles(p, s)
    loss = 1 + SIMT_LOSS * (128 / s.tile_m + 128 / s.tile_n)
    sm_ns = (busiest * products / FMA_UNITS * loss + EPILOGUE_CYCLES) / CYCLES_PER_NS
    memory_ns = memory / MEMORY_BYTES_PER_NS
    taken = Waves(tiles, slots, waves, device.num_sms, NOT_SHARED)
    return Times(LAUNCH_NS + most(sm_ns, memory_ns), sm_ns, memory_ns, False, taken)


@dataclass(frozen=True)
class TileCycles:
    """What the estimate is made of, for one CTA among its equals; cycles of one tile."""

    k_tiles: int  # k-tiles of it, rounded up
    multiply: float  # the tensor cores', for one k-tile
    load: float  # in which one k-tile of A and B arrives
    epilogue: float  # of one math warpgroup


def tile_cycles(problem: GemmProblem, spec: GemmSpec, device: Device) -> TileCycles:
    """Returns the parts of `spec`'s expected cost on `problem`."""
    problem = problem.as_run_by(spec)
    active_sms = expected_waves(problem, spec, device).active_sms
    return TileCycles(
        k_tiles=ceil(expected_k_tiles(problem, spec)),
        multiply=math_cycles(spec),
        load=load_cycles(problem, spec, device, active_sms),
        epilogue=epilogue_cycles(spec),
    )


def pass_ns(nbytes: float) -> float:
    """Returns the expected time of an elementwise kernel that moves so many bytes."""
    return LAUNCH_NS + nbytes / MEMORY_BYTES_PER_NS


def widening_ns(elements: int, dtype: str) -> float:
    """Returns the expected time in which XLA makes 16 bits of elements of 8 or 4."""
    return LAUNCH_NS + WIDENING_NS[DTYPES[dtype].bits] * elements


def copying_ns(problem: GemmProblem) -> float:
    """Returns the expected time to copy operands into whole lines (`MatrixLayout.copied_line`)."""
    p = problem
    return sum(
        pass_ns(COPY_PASSES * extent * p.k * (p.l if layout.batch_stride else 1) * row.itemsize)
        for extent, layout, row in ((p.m, p.a, DTYPES[p.a_dtype]), (p.n, p.b, DTYPES[p.b_dtype]))
        if layout.copied_line
    )


def cutting_ns(problem: GemmProblem) -> float:
    """Returns the expected time to cut operands into parts, where they are read as such."""
    p = problem
    if not p.reads_parts:
        return 0.0
    moved = DTYPES["float32"].itemsize + DTYPES[p.a_dtype].itemsize * num_parts(p.bf16_terms)
    operands = [p.m * p.distinct(p.a)] + [p.n * p.distinct(p.b)] * p.graph.accumulators
    return sum(pass_ns(ceil(CUT_PASSES * lines * p.k * moved)) for lines in operands)


def fma_ns(products: float) -> float:
    """Returns the least time in which the FMA units of all SMs add up so many products."""
    return products / (FMA_UNITS * H200.num_sms * CYCLES_PER_NS)


def roofline_ns(problem: GemmProblem) -> float:
    """Returns the least time that any kernel needs: tensor cores or device memory, all busy."""
    if problem.simt:
        math_ns = fma_ns(problem.flops / 2)
    else:
        mma_k = 16 / problem.bf16_terms if problem.bf16_terms else DTYPES[problem.a_dtype].mma_k
        peak_flops_per_ns = MMA_FLOPS * H200.num_sms * CYCLES_PER_NS / MATH_LOSS * mma_k / 16
        math_ns = problem.flops / peak_flops_per_ns
    return LAUNCH_NS + max(math_ns, problem.bytes / MEMORY_BYTES_PER_NS)
