"""What a launch moves through device memory, and the order of tiles that moves the least."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from math import prod

from ..gemm import grid
from ..gemm.dtypes import DTYPES
from ..gemm.problem import SECTOR_BYTES, GemmProblem
from ..gemm.raster import RasterOrder
from ..gemm.spec import GemmSpec
from .configs import RASTER_ORDERS
from .device import L2_BYTES, LINE_BYTES, Device
from .expected_tiles import equal_groups
from .several import least, most, where

# Fitted: what a byte of D costs, in bytes that are read. Where clusters have fixed shares of the
# tiles some fall behind, so that tiles in flight lie farther apart.
STORED, STORED_BY_SHARES = 1.2, 1.4
STORED_IN_BATCHES = 0.65  # of what either is more than 1; fitted as `cost.HIDDEN_IN_BATCHES`
# The same of groups along K, of tiles by one CTA and by clusters; fitted as `cost.LENGTHENING`.
STORED_OF_GROUPS, STORED_BY_CLUSTERS = 1.02, 1.08
# Measured, for each line of a box that is stored: what two sectors cost of which it fills a part.
# 60 to 90 with 32 elements of 16 bits, 80 to 110 with 64.
SPLIT_SECTOR_BYTES = 80.0
# Fitted: how long reading B takes where a tile's lines are shorter than L2's and CTAs are apart
# along K, so that none nearby reads the rest of a line.
CUT_LINES = 1.25
# Fitted: elements of K from which CTAs are so far apart that each reads a sector that two share. Of
# 31 streams of such K that were drawn afterwards kernels of least cost took 0.95 of the time of
# those without this and `cost.LEAST_PARTIAL_CYCLES`; of 8 of K from 2,000 on 1.02, so none there.
APART_K = 6000
FITTING = 0.8  # of L2, that A and B may take to stay there
BALANCE = 190.0  # FLOPs for each byte moved, from which tensor cores take longer than memory


def memory_bytes(
    problem: GemmProblem, spec: GemmSpec, orders: Iterable[RasterOrder], device: Device
) -> float:
    """Returns the bytes that device memory moves, in the best of some orders of tiles.

    Where A and B fit in L2, each is read once; else every wave reads its rows and columns
    again, but for an operand small enough to stay. What is stored counts as so many bytes that are
    read as take as long.
    """
    p, s = equal_groups(problem.as_run_by(spec)), spec
    row_a = p.stored_k * s.a_itemsize
    row_b = DTYPES[s.b_dtype].nbytes(p.stored_k * p.graph.accumulators)
    a_bytes, b_bytes = p.m * row_a, p.n * row_b
    slow = _slow_bytes(p, s) + p.l * _cut_lines(s) * b_bytes
    slow += p.l * _split_reads(p, s, a_bytes, b_bytes)
    if a_bytes + b_bytes <= FITTING * L2_BYTES:
        return p.bytes + slow
    clusters = grid.cluster_grid(p, s)
    waves = grid.num_waves(prod(clusters), s, device.num_sms)
    inputs = (
        sum(
            whole if whole <= 0.4 * L2_BYTES else most(whole, waves * lines * row)
            for whole, lines, row in ((a_bytes, rows, row_a), (b_bytes, columns, row_b))
        )
        for rows, columns in (_in_flight(s, clusters, waves, order) for order in orders)
    )
    moved = p.l * (reduce(least, inputs) + p.m * p.n * p.element_bytes)
    return most(float(p.bytes), moved) + slow


def _slow_bytes(problem: GemmProblem, spec: GemmSpec) -> float:
    """Returns the bytes that could be read in the time that stores take longer than reads."""
    p, s = problem, spec
    elements = p.l * p.m * p.n
    if s.grouped == "k":
        stored = where(s.cluster_size > 1, STORED_BY_CLUSTERS, STORED_OF_GROUPS)
    else:
        stored = where(s.dynamic, STORED, STORED_BY_SHARES)
        stored = 1 + (stored - 1) * (STORED_IN_BATCHES if p.l > 1 and not s.grouped else 1.0)
    slow = (stored - 1) * elements * p.element_bytes
    if p.splits_sectors:
        widths = (s.epi_box(result.dtype).contiguous for result in p.graph.matrices)
        slow += SPLIT_SECTOR_BYTES * elements * sum(1 / width for width in widths)
    return slow


def _cut_lines(spec: GemmSpec) -> float:
    """Returns how much longer reading B takes for lines of which a tile has a part."""
    s = spec
    if s.b_major == "k":
        return 0.0
    shared = s.split_k | (s.cluster_k > 1)
    cut = shared & (DTYPES[s.b_dtype].nbytes(s.tile_n) < LINE_BYTES)
    return where(cut, CUT_LINES - 1, 0.0)


def _split_reads(problem: GemmProblem, spec: GemmSpec, a_bytes: float, b_bytes: float) -> float:
    """Returns the bytes of a matrix of A and of B that are read twice.

    Lines of a tile along M or N may begin and end within sectors, whose rest its neighbours read:
    at the same time, unless K is long. Along K a tile itself reads the rest next.
    """
    p, s = problem, spec
    more = 0.0
    for layout, dtype, lines, whole in (
        (p.a, s.a_dtype, s.tile_m, a_bytes), (p.b, s.b_dtype, s.d_tile_n, b_bytes)
    ):  # fmt: skip
        nbytes = DTYPES[dtype].nbytes
        apart = p.k >= APART_K and layout.major != "k"
        if apart and nbytes(layout.leading_stride) % SECTOR_BYTES:
            more += whole * SECTOR_BYTES / nbytes(lines)
    return more


def best_raster_order(problem: GemmProblem, spec: GemmSpec, device: Device) -> RasterOrder:
    """Returns the order of tiles whose waves read the fewest rows and columns.

    Of equals, neighbours in time lie side by side along the cluster's longer edge in a
    persistent kernel, along its tile's shorter edge in one with a tile a CTA. Measured: worth
    up to 7 % with tiles of 128x128, and 5 % at 1024^3.

    Where storing D takes longest they follow its lines: for six products 1 to 11 % faster than the
    order that would be chosen else; of one, another order was 2 % faster still.
    """
    s = spec
    if _is_stored_longest(problem):
        return RasterOrder("m" if s.d_major == "m" else "n", swizzle=1)
    if s.persistent:
        along_m = s.tile_n * s.cluster_n > s.tile_m * s.cluster_m or s.cluster_n > s.cluster_m
    else:
        along_m = s.tile_m >= s.tile_n
    preferred = "m" if along_m else "n"
    clusters = grid.cluster_grid(equal_groups(problem.as_stored(s.d_major)), s)
    waves = grid.num_waves(prod(clusters), s, device.num_sms)
    return min(
        RASTER_ORDERS,
        key=lambda t: (round(sum(_in_flight(s, clusters, waves, t))), t.along != preferred),
    )


def _is_stored_longest(problem: GemmProblem) -> bool:
    """Whether memory takes longer than the tensor cores, most of it to store D."""
    p = problem
    stored = p.l * p.m * p.n * p.element_bytes
    return (
        p.groups is None
        and p.flops < BALANCE * p.bytes
        and stored > L2_BYTES
        and p.bytes - stored <= FITTING * L2_BYTES * p.l
    )


def _in_flight(
    spec: GemmSpec, clusters: tuple[int, int], waves: int, raster_order: RasterOrder
) -> tuple[float, float]:
    """Returns the rows of A and columns of B that the tiles of one of so many waves read.

    These tiles form a rectangle: as wide as the walk's band, or several bands where a band is
    shorter than the wave.
    """
    s, (along, across) = spec, clusters
    if raster_order.along == "n":
        along, across = across, along
    wave = along * across / waves
    wide = least(raster_order.swizzle, across)
    long = wave / wide
    turns = long > along
    wide = where(turns, least(across, wave / along), wide)
    long = where(turns, along, long)
    m, n = (long, wide) if raster_order.along == "m" else (wide, long)
    return m * s.tile_m * s.raster_m, n * s.d_tile_n * s.raster_n
