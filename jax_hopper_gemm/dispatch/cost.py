"""How long a kernel takes, estimated from what it must multiply and move.

A CTA's tiles cost, for each k-tile, the slower of its tensor cores and its share of L2, then an
epilogue; a launch costs its waves of tiles, or device memory where that is slower. Cycles and
bytes, no measurement: good for ranking kernels on one problem, some 10 to 20 % off in time.

The hardware's figures are those of an H200; sources beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..plan import ceil_div, max_clusters, persistent_clusters
from ..problem import ITEMSIZE, GemmProblem
from ..spec import GemmSpec, Traversal
from .candidates import TRAVERSALS
from .device import Device

CYCLES_PER_NS = 1.83  # boost clock; 132 SMs x 4096 FLOP a cycle: 989 TFLOP/s
L2_BYTES_PER_CYCLE = 6150.0  # the whole chip
L2_BYTES_PER_CYCLE_SM = 64.0  # one SM
L2_BYTES = 50e6
MEMORY_BYTES_PER_NS = 4300.0  # measured; 4800 on the datasheet

LAUNCH_NS = 1500.0
PROLOGUE_CYCLES = 1200.0  # barriers and the latency of the first load
CLUSTER_CYCLES = 400.0  # to start a cluster and to end it
K_TILE_CYCLES = 30.0  # barrier round of one stage
CLUSTER_WAIT = 0.02  # of a k-tile, for each other CTA of the cluster: the slowest sets the pace
RING_WAIT = 0.08  # of a k-tile, over the number of stages: loads arrive unevenly
EPILOGUE_CYCLES = 400.0  # per tile: barriers, first and last store
EPILOGUE_BYTES_PER_CYCLE = 20.0  # one warpgroup
SMEM_LEAK = 0.10  # of shared-memory traffic that delays the tensor cores
LEAK = 0.04  # of any other resource that does not hide behind the slower one


@dataclass(frozen=True)
class Estimate:
    """What a launch is expected to cost.

    Attributes:
      ns: time of the kernel, in nanoseconds.
      bound: what limits it: "tensor cores", "L2" or "device memory".
      tiles, waves: tiles of D, and how many one CTA computes at most.
      occupancy: share of the tile slots of those waves that hold a tile.
    """

    ns: float
    bound: str
    tiles: int
    waves: int
    occupancy: float


def estimate(
    problem: GemmProblem, spec: GemmSpec, traversal: Traversal, device: Device
) -> Estimate:
    """Returns the expected cost of `spec`'s kernel on `problem`."""
    p, s = problem, spec
    clusters_m = ceil_div(p.m, s.tile_m * s.cluster_m)
    clusters_n = ceil_div(p.n, s.tile_n * s.cluster_n)
    clusters = clusters_m * clusters_n * p.l
    slots = max_clusters(s, device.num_sms)
    waves = ceil_div(clusters, slots)
    active_sms = persistent_clusters(clusters, slots) * s.cluster_size

    math, smem = _math_cycles(s), _smem_cycles(s)
    rows_m = p.m / (clusters_m * s.cluster_m)  # of a tile, without what TMA clips
    rows_n = p.n / (clusters_n * s.cluster_n)
    loaded = (rows_m / s.cluster_n + rows_n / s.cluster_m) * s.tile_k * ITEMSIZE[s.ab_dtype]
    l2 = loaded / min(L2_BYTES_PER_CYCLE_SM, L2_BYTES_PER_CYCLE / active_sms)
    k_tile = max(math, l2) + LEAK * min(math, l2) + SMEM_LEAK * smem + K_TILE_CYCLES
    k_tile *= 1 + CLUSTER_WAIT * (s.cluster_size - 1) + RING_WAIT / s.num_stages
    sm_ns = _sm_cycles(s, waves, ceil_div(p.k, s.tile_k) * k_tile) / CYCLES_PER_NS

    memory_ns = memory_bytes(p, s, traversal, device) / MEMORY_BYTES_PER_NS
    bound = "device memory" if memory_ns > sm_ns else "L2" if l2 > math else "tensor cores"
    return Estimate(
        ns=LAUNCH_NS + max(sm_ns, memory_ns) + LEAK * min(sm_ns, memory_ns),
        bound=bound,
        tiles=ceil_div(p.m, s.tile_m) * ceil_div(p.n, s.tile_n) * p.l,
        waves=waves,
        occupancy=clusters / (waves * slots),
    )


def _math_cycles(spec: GemmSpec) -> float:
    """Returns the tensor cores' cycles for one k-tile.

    An m64 x N x k16 instruction multiplies for N / 2 cycles, and no faster than it reads.
    """
    return max(spec.tile_n / 2, _read_cycles(spec)) * _instructions(spec)


def _smem_cycles(spec: GemmSpec) -> float:
    """Returns shared memory's cycles for one k-tile: what TMA writes and instructions read."""
    return _read_cycles(spec) * _instructions(spec) + spec.stage_bytes / 128


def _read_cycles(spec: GemmSpec) -> float:
    """Returns the cycles in which an instruction reads 64 x 16 of A and N x 16 of B.

    Shared memory delivers 128 bytes a cycle.
    """
    return (64 + spec.tile_n) * 16 * ITEMSIZE[spec.ab_dtype] / 128


def _instructions(spec: GemmSpec) -> float:
    return (spec.tile_m / 64) * (spec.tile_k / 16)


def _sm_cycles(spec: GemmSpec, waves: int, mainloop: float) -> float:
    """Returns one CTA's cycles for `waves` tiles of `mainloop` cycles each.

    Cooperative warpgroups multiply, then store, together. Pingpong ones take turns, so a store
    costs only what is longer than the other's multiplication, and that of the last tile.
    """
    start = PROLOGUE_CYCLES + (CLUSTER_CYCLES if spec.cluster_size > 1 else 0.0)
    storing = 1 if spec.warp_schedule == "pingpong" else spec.math_warpgroups
    tile_bytes = spec.tile_m * spec.tile_n * ITEMSIZE[spec.d_dtype]
    epilogue = EPILOGUE_CYCLES + tile_bytes / (EPILOGUE_BYTES_PER_CYCLE * storing)
    if spec.warp_schedule == "pingpong":
        return start + waves * max(mainloop, (mainloop + epilogue) / 2) + epilogue
    if spec.tile_scheduler == "single":
        return waves * (start + mainloop + epilogue)
    return start + waves * (mainloop + epilogue)


def memory_bytes(
    problem: GemmProblem, spec: GemmSpec, traversal: Traversal, device: Device
) -> float:
    """Returns the bytes that device memory moves.

    The tiles in flight form a rectangle of D, which reads its rows of A and columns of B. Where
    A and B fit in L2, each is read once. Where one rectangle's share does, the operand across
    the walk is read once and the other once for each band of the walk. Else every rectangle
    reads its share again.
    """
    p, s = problem, spec
    itemsize = ITEMSIZE[p.ab_dtype]
    a_bytes, b_bytes = p.m * p.k * itemsize, p.n * p.k * itemsize
    if a_bytes + b_bytes <= 0.8 * L2_BYTES:
        return p.bytes
    clusters_m = ceil_div(p.m, s.tile_m * s.cluster_m)
    clusters_n = ceil_div(p.n, s.tile_n * s.cluster_n)
    along, across = clusters_m, clusters_n
    if traversal.along == "n":
        along, across = across, along
    in_flight = min(max_clusters(s, device.num_sms), along * across)
    band = min(traversal.swizzle, across)
    bands_in_flight = ceil_div(in_flight, band * along)
    wide = min(across, band * bands_in_flight)
    long = min(along, ceil_div(in_flight, band))
    part_m, part_n = long / clusters_m, wide / clusters_n
    if traversal.along == "n":
        part_m, part_n = wide / clusters_m, long / clusters_n
    share = part_m * a_bytes + part_n * b_bytes
    if share <= 0.6 * L2_BYTES:
        bands = ceil_div(across, band)
        walked, crossed = (a_bytes, b_bytes) if traversal.along == "m" else (b_bytes, a_bytes)
        again = 1 if walked <= 0.4 * L2_BYTES else bands
        inputs = again * walked + crossed
    else:
        inputs = clusters_m * clusters_n / in_flight * share
    return max(float(p.bytes), p.l * (inputs + p.m * p.n * ITEMSIZE[p.d_dtype]))


def best_traversal(problem: GemmProblem, spec: GemmSpec, device: Device) -> Traversal:
    """Returns the order of tiles that moves the fewest bytes; the first such in `TRAVERSALS`."""
    return min(TRAVERSALS, key=lambda t: memory_bytes(problem, spec, t, device))


def roofline_ns(problem: GemmProblem) -> float:
    """Returns the least time that any kernel needs: tensor cores or device memory, all busy."""
    peak_flops_per_ns = 820e3  # measured, 8192^3
    busy = max(problem.flops / peak_flops_per_ns, problem.bytes / MEMORY_BYTES_PER_NS)
    return LAUNCH_NS + busy
