"""Tuning without a GPU in it: candidates to time, conclusions from the times. Timers are passed in.

Candidates differ in shape: tile, cluster, warp schedule. The fastest one's details (scheduler,
epilogue tile, order of tiles) are then improved one at a time, and the finalists are timed again
in turns with XLA.

    ranked_candidates -> tuned_entry(time_kernel, time_xla) -> merged_table -> write_table
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from statistics import median

from ..gemm.problem import GemmProblem
from ..gemm.raster import RasterOrder
from ..gemm.spec import GemmSpec
from .candidates import legal_specs
from .cost import estimate
from .device import Device
from .memory_traffic import best_raster_order
from .table import Entry, Key, Table

Candidate = tuple[GemmSpec, RasterOrder]

REFINEMENTS = 2  # how often the fastest candidate's `variants` are timed too, at most
# How many of the fastest are timed again, in turns with XLA so that they share clock and
# temperature; the medians decide.
FINALISTS = 3
ROUNDS = 3  # how often the finalists are timed


def ranked_candidates(problem: GemmProblem, device: Device, count: int = 24) -> list[Candidate]:
    """Returns up to `count` candidates of different shapes, the cost model's favourite first.

    Each is static persistent where that is possible, with the usual epilogue tile and the order
    of tiles that the model prefers.
    """
    by_shape: dict[tuple, GemmSpec] = {}
    for spec, _ in legal_specs(problem, device):
        by_shape.setdefault(_shape(spec), spec)
    candidates = [(spec, best_raster_order(problem, spec, device)) for spec in by_shape.values()]
    candidates.sort(key=lambda candidate: estimate(problem, *candidate, device).ns)
    return candidates[:count]


def specs_to_try(problem: GemmProblem, device: Device, count: int = 24) -> list[GemmSpec]:
    """Returns every kernel that tuning `problem` may time: to be built where there is no GPU."""
    shapes = {_shape(spec) for spec, _ in ranked_candidates(problem, device, count)}
    legal = dict.fromkeys(spec for spec, _ in legal_specs(problem, device))
    return [spec for spec in legal if _shape(spec) in shapes]


def variants(problem: GemmProblem, device: Device, candidate: Candidate) -> list[Candidate]:
    """Returns the legal candidates of the same shape that differ from `candidate` in one detail.

    A detail is the tile scheduler, the epilogue tile or the order of tiles. Rings of stages
    follow from the rest.
    """
    details, shape = _details(candidate), _shape(candidate[0])
    alike = (other for other in legal_specs(problem, device) if _shape(other[0]) == shape)
    return [o for o in alike if sum(a != b for a, b in zip(details, _details(o), strict=True)) == 1]


def _shape(spec: GemmSpec) -> tuple:
    s = spec
    tile = (s.tile_m, s.tile_n, s.tile_k)
    cluster = s.cluster_m, s.cluster_n
    return (*tile, *cluster, s.warp_schedule, s.short_boxes, s.split_k, s.d_major)


def _details(candidate: Candidate) -> tuple:
    spec, raster_order = candidate
    return (spec.tile_scheduler, spec.epi_tile_n, spec.evict_first, raster_order)


def tuned_entry(
    problem: GemmProblem,
    device: Device,
    candidates: Iterable[Candidate],
    time_kernel: Callable[[GemmSpec, RasterOrder], float],
    time_xla: Callable[[], float],
    *,
    progress: Callable[[Candidate, float], None] = lambda candidate, microseconds: None,
) -> Entry:
    """Returns the entry for `problem`: the fastest kernel found, and whether XLA beats it.

    Args:
      candidates: timed once each.
      time_kernel: microseconds of a candidate; infinity where it cannot run.
      time_xla: microseconds of XLA's product.
      progress: is told every candidate and its first time.

    Raises:
      ValueError: no candidate could run.
    """
    times: dict[Candidate, float] = {}

    def sweep(untimed: Iterable[Candidate]) -> None:
        for candidate in untimed:
            if candidate not in times:
                times[candidate] = time_kernel(*candidate)
                progress(candidate, times[candidate])

    def fastest(count: int) -> list[Candidate]:
        runnable = [candidate for candidate in times if math.isfinite(times[candidate])]
        return sorted(runnable, key=times.__getitem__)[:count]

    sweep(candidates)
    if not fastest(1):
        raise ValueError(
            f"none of {len(times)} candidates could run M={problem.m} N={problem.n} "
            f"K={problem.k} L={problem.l}"
        )
    for _ in range(REFINEMENTS):
        (leader,) = fastest(1)
        sweep(variants(problem, device, leader))
        if fastest(1) == [leader]:
            break
    kernel_times: dict[Candidate, list[float]] = {c: [] for c in fastest(FINALISTS)}
    xla_times: list[float] = []
    for _ in range(ROUNDS):
        for candidate, measured in kernel_times.items():
            measured.append(time_kernel(*candidate))
            xla_times.append(time_xla())
    winner = min(kernel_times, key=lambda candidate: median(kernel_times[candidate]))
    kernel_us, xla_us = round(median(kernel_times[winner]), 2), round(median(xla_times), 2)
    return entry_of(problem, winner, kernel_us, xla_us)


def entry_of(problem: GemmProblem, fastest: Candidate, kernel_us: float, xla_us: float) -> Entry:
    """Returns the entry of a problem whose fastest kernel and XLA took so long."""
    prefer = "kernel" if kernel_us <= xla_us else "xla"
    return Entry(Key.of(problem), prefer, *fastest, kernel_us=kernel_us, xla_us=xla_us)


def merged_table(table: Table, entries: Iterable[Entry]) -> Table:
    """Returns `table` with `entries` added; a new entry replaces the old one of its problem."""
    return Table.of(table.device, [*table.entries.values(), *entries], table.origin)
