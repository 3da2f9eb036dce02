"""Problems and operands that put a kernel's edges to the test."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from support.places import Operand

from jax_hopper_gemm.gemm.dtypes import DTYPES
from jax_hopper_gemm.gemm.grid import ceil_div, max_clusters
from jax_hopper_gemm.gemm.problem import BlockScales, GemmProblem, Major, MatrixLayout
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.lowering.canonical import scale_shape

MAX_EXTENT = 9000
_EDGES = (1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257)
_MAX_ELEMENTS = 1 << 26  # of one operand
STACK = 3  # matrices


def edge_problems(spec: GemmSpec, num_sms: int) -> list[tuple[GemmProblem, RasterOrder]]:
    """Returns problems at the edges of a kernel, each with an order of tiles.

    In turn: less than one tile in every direction; K of many turns of the ring of stages, over
    three matrices; several waves of tiles, so that a persistent grid wraps around. No extent is
    a whole number of tiles, and rows have gaps.
    """
    cluster_m, cluster_n = spec.tile_m * spec.cluster_m, spec.d_tile_n * spec.cluster_n
    clusters = math.ceil(2.3 * num_sms / spec.cluster_size)
    across = max(1, round(math.sqrt(clusters * cluster_m / cluster_n)))  # D is about square
    down = ceil_div(clusters, across)
    long_k = spec.tile_k * (2 * spec.num_stages + 1) + 24
    return [
        (padded(spec, cluster_m // 2 + 3, cluster_n - 7, 9), RasterOrder("m", 1)),
        (padded(spec, cluster_m + 1, cluster_n + 5, long_k, 3), RasterOrder("n", 3)),
        (
            padded(spec, cluster_m * down - 3, cluster_n * across - 5, spec.tile_k + 8),
            RasterOrder("m", 8),
        ),
        (
            padded(spec, cluster_m * across - 3, cluster_n * down - 5, 2 * spec.tile_k),
            RasterOrder("n", 16),
        ),
    ]


def short_problems(spec: GemmSpec) -> list[tuple[GemmProblem, RasterOrder]]:
    """Returns problems of fewer rows or columns than a tile, and three tiles of the other."""
    across, down = 3 * spec.d_tile_n - 5, 3 * spec.tile_m - 7
    long_k = spec.tile_k * (spec.num_stages + 2) + 8
    few_rows = [
        padded(spec, m, across, long_k, batches)
        for m, batches in ((1, 1), (3, 2), (8, 1), (17, 3), (spec.tile_m - 1, 1))
    ]
    few_columns = [
        padded(spec, down, n, spec.tile_k + 8, batches)
        for n, batches in ((1, 2), (8, 1), (spec.d_tile_n - 8, 1))
    ]
    return [(problem, RasterOrder("n", 2)) for problem in (*few_rows, *few_columns)]


def nested_problems(spec: GemmSpec) -> list[tuple[GemmProblem, RasterOrder]]:
    """Returns problems whose batch has two and three axes that do not lie evenly.

    The rows of the innermost axis's matrices take turns. B is shared along one axis or two, every
    other operand of the epilogue along all, a vector along the outer ones.
    """
    m, n, k = spec.tile_m + 3, spec.d_tile_n + 5, 2 * spec.tile_k + 16
    return [
        (nested(spec, *extents, outer, inner), RasterOrder("n", 2))
        for extents, outer, inner in (((m, n, k), (2,), 3), ((8, 24, 32), (3, 2), 4))
    ]


def nested(
    spec: GemmSpec, m: int, n: int, k: int, outer: tuple[int, ...], inner: int
) -> GemmProblem:
    """Returns a problem of a nested batch for `spec`'s kernel, with gaps after rows."""

    gap = alignment(spec)

    def place(major: Major, contiguous: int, other: int, count: int, operand: Operand):
        line = _aligned(contiguous, gap) + gap
        block = line * inner * other + gap  # of the matrices whose rows take turns
        strides = [math.prod(outer[i + 1 :]) * block for i in range(len(outer))]
        shared = operand == "b"
        if shared:
            strides[0] = 0
        between = 0 if shared and len(outer) > 1 else line
        return MatrixLayout(major, line * inner, between, tuple(strides))

    def nest(kind: str, layout: MatrixLayout) -> MatrixLayout:
        apart = 0 if kind in ("row", "column") else layout.batch_stride
        steps = (apart * inner * math.prod(outer[i + 1 :]) for i in range(len(outer)))
        return replace(layout, outer_strides=tuple(steps))

    problem = laid_out(spec, m, n, k, inner * math.prod(outer), place)
    kinds = (operand.kind for operand in problem.graph.operands)
    operands = tuple(map(nest, kinds, problem.operands))
    return replace(problem, operands=operands, outer=outer)


def padded(spec: GemmSpec, m: int, n: int, k: int, batches: int = 1) -> GemmProblem:
    """Returns a problem for `spec`'s kernel with gaps after every row and every matrix."""
    gap = alignment(spec)
    return laid_out(spec, m, n, k, batches, lambda *args: spaced(*args, gap=gap, aligned=gap))


def stacked_problems(spec: GemmSpec, num_sms: int) -> list[tuple[GemmProblem, RasterOrder]]:
    """Returns those of `edge_problems` that have one D, with an operand in a stack of three."""
    found = []
    for problem, raster_order in edge_problems(spec, num_sms):
        if problem.l == 1:
            stacked = padded(spec, problem.m, problem.n, problem.k, STACK)
            layouts = {"a": stacked.a, "b": stacked.b}
            assert spec.indexed
            named: dict[str, Any] = {spec.indexed: layouts[spec.indexed]}
            problem = replace(problem, indexed=spec.indexed, stack=STACK, **named)
            found.append((problem, raster_order))
    return found


def variant_problems(spec: GemmSpec) -> tuple[list[tuple[GemmProblem, RasterOrder]], int]:
    """Returns problems for a kernel that splits K, or has a nested batch or short boxes.

    And how many SMs run them: few, so that a persistent grid wraps around.
    """
    if spec.split_k:
        return split_problems(spec, 36), 36
    return (nested_problems if spec.nested else short_problems)(spec), 16


def split_problems(spec: GemmSpec, num_sms: int) -> list[tuple[GemmProblem, RasterOrder]]:
    """Returns problems of which clusters share tiles, each with an order of tiles.

    In turn: one tile with a part for each cluster; a few tiles in equal parts, of two matrices;
    fewer tiles than clusters in ranges that end anywhere; two waves of whole tiles and a few more,
    with a part of a k-tile.
    """
    m, n = spec.tile_m * spec.cluster_m, spec.d_tile_n * spec.cluster_n
    clusters = max_clusters(spec, num_sms)
    k = 4 * spec.tile_k
    return [
        (padded(spec, m - 5, n - 3, clusters * k + 24), RasterOrder("m", 1)),
        (padded(spec, m + 3, n - 9, 5 * k - 8, 2), RasterOrder("n", 2)),
        (padded(spec, m * max(1, clusters * 3 // 4) - 7, n, 11 * spec.tile_k), RasterOrder("m", 4)),
        (padded(spec, m * (2 * clusters + 3) - 1, n + 8, k + 40), RasterOrder("n", 8)),
    ]


def random_problem(
    rng: random.Random, spec: GemmSpec, max_extent: int = MAX_EXTENT
) -> tuple[GemmProblem, RasterOrder]:
    """Returns a problem that `spec`'s kernel can run, and an order of tiles.

    Extents go from 1 to `max_extent`, most of them small; batches are separate, interleaved with
    rows, or share one matrix; strides are any that TMA can address.
    """
    m, n, k = (_extent(rng, max_extent) for _ in range(3))
    batches = rng.choice((1, 1, 1, 2, 3, 5))
    while batches * max(m * n, m * k, n * k) > _MAX_ELEMENTS:
        batches = max(1, batches - 1)
        m, n, k = (max(1, extent // 2) for extent in (m, n, k))

    aligned = alignment(spec)

    def place(major: Major, contiguous: int, other: int, count: int, operand: Operand):
        kind = rng.choice(("separate", "interleaved", "shared"))
        gap = aligned * rng.choice((0, 0, 1, 5))
        line = _aligned(contiguous, aligned) + gap
        if kind == "shared" and operand != "d":
            return MatrixLayout(major, line, 0)
        if kind == "interleaved":
            return MatrixLayout(major, line * count, line)
        return spaced(major, contiguous, other, count, operand, gap, aligned)

    problem = laid_out(spec, m, n, k, batches, place)
    return problem, RasterOrder(rng.choice(("m", "n")), rng.randint(1, 16))


def rows_to_check(problem: GemmProblem, budget: int = 1_000_000_000) -> np.ndarray:
    """Returns rows of D, all or an even spread with both ends, that a reference can afford.

    Args:
      budget: products of elements that checking may cost.
    """
    affordable = max(2, budget // (problem.l * problem.n * problem.k))
    count = min(problem.m, affordable)
    return np.unique(np.linspace(0, problem.m - 1, count).astype(int))


def laid_out(spec: GemmSpec, m: int, n: int, k: int, batches: int, place) -> GemmProblem:
    """Returns the problem, its extents along lines raised to whole multiples of 16 bytes.

    Args:
      place: function of (major, contiguous extent, other extent, batches, operand): its layout.
    """
    graph = spec.graph
    along_d = [result.dtype for result in graph.matrices]
    along_d += [o.dtype for o in graph.operands if o.kind == "matrix"]
    along_n = [o.dtype for o in graph.operands if o.kind == "row"]
    along_n += along_d if spec.d_major == "n" else []
    along_n = [] if spec.loose_d else along_n
    along_n += [spec.b_dtype] if spec.b_major == "n" else []
    narrowest = max(map(elements_of_line, along_n), default=1)
    if graph.needs_whole_rows:
        n = min(n, spec.d_tile_n - 5)
        n = max([n, *(result.k for result in graph.results)])  # of a top-k
    n = ceil_div(n, narrowest) * narrowest
    if spec.loose_d:  # no multiple of 16 bytes
        n -= 1 - n % 2 if n > 1 else 0
    if "m" in (spec.a_major, spec.d_major):
        m = _aligned(m, alignment(spec))
    if spec.tile_m < spec.d_tile_m:  # the kernel has one row of tiles
        m = min(m, spec.tile_m)
    if spec.cluster_k > 1:  # each CTA has a k-tile
        k = max(k, (spec.cluster_k - 1) * spec.tile_k + 1)
    if spec.a_major == "k" or spec.b_major == "k":
        k = _aligned(k, alignment(spec))
    a = ("k", k, m) if spec.a_major == "k" else ("m", m, k)
    b = ("n", n, k) if spec.b_major == "n" else ("k", k, n)
    d = ("n", n, m) if spec.d_major == "n" else ("m", m, n)
    placed_b, up_offset = place(*b, batches, "b"), None
    # Gate's and up's lines take turns in an array, of every other product that has one batch axis.
    whole = spec.nested or spec.loose_d
    if graph.accumulators == 2 and (m + k) % 16 < 8 and not whole:
        up_offset = placed_b.leading_stride
        twice = 2 * up_offset
        apart = twice * b[2] if placed_b.batch_stride else 0
        placed_b = MatrixLayout(placed_b.major, twice, apart)
    return GemmProblem(
        m,
        n,
        k,
        batches,
        "float32" if spec.reads_parts else spec.a_dtype,
        "float32" if spec.reads_parts else spec.b_dtype,
        spec.d_dtype,
        a=place(*a, batches, "a"),
        b=placed_b,
        d=(partial(spaced, gap=2, aligned=1) if spec.loose_d else place)(*d, batches, "d"),
        epilogue=spec.epilogue,
        operands=tuple(
            _operand_layout(i, operand.kind, d, (m, n), batches)
            for i, operand in enumerate(graph.operands)
        ),
        up_offset=up_offset,
        promoted=spec.promoted,
        bf16_terms=spec.bf16_terms,
        a_scales=_scales(spec.a_block, m, k, 1 if spec.grouped else batches),
        b_scales=_scales(spec.b_block, n, k, 1 if spec.grouped == "k" else batches),
        k_group=spec.k_group,
    )


def _scales(block: int, lines: int, k: int, batches: int) -> BlockScales | None:
    """Returns where block scales lie, as lowering arranges them; None where there are none."""
    if not block:
        return None
    along_k, length = scale_shape(block, lines, k)
    return BlockScales(block, length, along_k * length if batches > 1 else 0)


def _operand_layout(
    index: int, kind: str, d: tuple[Major, int, int], extents: tuple[int, int], batches: int
) -> MatrixLayout:
    """Returns where an operand of an epilogue lies; every other one is shared by the batch.

    Distances are multiples of 16 elements, of whatever dtype: masks have a byte each.

    Args:
      d: D's major, contiguous and other extent.
    """
    shared = batches == 1 or index % 2 == 1
    if kind == "scalar":
        return MatrixLayout("n", 0, 0 if shared else 3)
    if kind == "matrix":
        major, contiguous, other = d
        line = ceil_div(contiguous, 16) * 16 + 16
        return MatrixLayout(major, line, 0 if shared else line * other + 16)
    m, n = extents
    extent = n if kind == "row" else m
    apart = 0 if shared else ceil_div(extent, 16) * 16 + 16
    return MatrixLayout("n" if kind == "row" else "m", 0, apart)


def spaced(
    major: Major, contiguous: int, other: int, count: int, operand: Operand, gap: int, aligned: int
) -> MatrixLayout:
    """Returns one matrix after the other, with a gap after each line and each matrix.

    Lines begin at multiples of `aligned`.
    """
    line = _aligned(contiguous, aligned) + gap
    return MatrixLayout(major, line, line * other + gap if count > 1 else 0)


def alignment(spec: GemmSpec) -> int:
    """Returns the elements of 16 bytes, of the narrowest dtype: TMA can address such strides."""
    stored = (result.dtype for result in spec.graph.matrices)
    return max(8, *map(elements_of_line, (spec.a_dtype, spec.b_dtype, *stored)))


def elements_of_line(dtype: str) -> int:
    """Returns how many elements 16 bytes hold."""
    row = DTYPES[dtype]
    return 16 * row.packed // row.itemsize


def _aligned(extent: int, aligned: int) -> int:
    return ceil_div(extent, aligned) * aligned


def _extent(rng: random.Random, largest: int) -> int:
    if rng.random() < 0.2:
        return rng.choice(_EDGES)
    return round(math.exp(rng.uniform(0, math.log(largest))))
