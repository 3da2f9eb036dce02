"""Kernels that compute a row with the same bits in every batch.

An accumulator gets the products of a row and a column in the order of K, whatever tile it lies in
and whichever of the two lies on the tile's rows, unless K is split: then where it is split depends
on the number of tiles; or math warpgroups take turns at k-tiles, each with sums of its own. What an
epilogue reduces along a row is cut by the tile's columns, in which a thread adds up an epilogue
tile's. So kernels do neither here, and where they reduce along rows, tiles have the columns that
are chosen for `ROWS` rows, however many there are.
"""

from __future__ import annotations

from dataclasses import replace

from ..gemm.epilogue_graph import ROW_REDUCTIONS, EpilogueGraph
from ..gemm.problem import GemmProblem
from ..gemm.spec import GemmSpec
from .candidates import considered_specs
from .device import Device
from .model import best_kernel

ROWS = 1024  # for which columns of tiles are chosen: a wide tile costs few rows less than they win
ALONG_ROWS = {"row_sum", "row_max", "row_sumexp", "top_k_values", "top_k_indices"}


def reduces_rows(graph: EpilogueGraph) -> bool:
    """Whether a result, or what it is made of, is reduced along a row."""
    along = any(result.kind in ALONG_ROWS for result in graph.results)
    return along or any(node.op in ROW_REDUCTIONS for node in graph.nodes)


def is_invariant(spec: GemmSpec) -> bool:
    """Whether a kernel gives an element the bits that the others give it.

    Kernels that store D along M have been compared with those along N without an epilogue alone.
    Those that read bfloat16 parts add up in another order than those that cut.
    """
    shared = spec.split_k or spec.cluster_k > 1
    ordered = not (shared or spec.reads_parts or spec.k_in_turns)
    return ordered and (spec.d_major == "n" or spec.epilogue is None)


def invariant_specs(problem: GemmProblem, device: Device) -> list[GemmSpec]:
    """Returns the kernels among which `problem` may choose by its number of rows."""
    if not reduces_rows(problem.graph):
        return [spec for spec in considered_specs(problem) if is_invariant(spec)]
    typical = _with_rows(problem)
    specs = [spec for spec in considered_specs(typical) if is_invariant(spec)]
    best, _ = best_kernel(typical, device, specs)
    if best is None:
        return []
    columns = best.spec.tile_n, best.spec.epi_tile_n
    return [spec for spec in specs if (spec.tile_n, spec.epi_tile_n) == columns]


def _with_rows(problem: GemmProblem) -> GemmProblem:
    """Returns the problem with `ROWS` rows of one matrix, or of as many groups."""
    p = problem
    a = replace(p.a, leading_stride=ROWS) if p.a.major == "m" else p.a
    return replace(p, m=ROWS, a=a, l=p.l if p.groups else 1)
