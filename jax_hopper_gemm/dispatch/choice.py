"""The decision: which kernel runs a problem, or that XLA should.

    user's tables -> packaged table -> cost model and rules (`model`)

Tables hold plain products. One with an epilogue takes the kernel measured for the plain product
of its arithmetic, its shared memory filled anew, unless that kernel cannot hold the epilogue or
the model expects another one to be faster by more than it errs. The model is not asked where the
epilogue loads a matrix or the product is gated.

Grouped products have entries of their own, and do not go to XLA unless one says so: on an H200
its `ragged_dot` reached 6 to 99 TFLOP/s of some 820.

Nothing is timed here; the same problem, device and tables give the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ..gemm import grid
from ..gemm.dtypes import DTYPES
from ..gemm.problem import GemmProblem
from ..gemm.problem_type import ProblemType
from ..gemm.raster import RasterOrder
from ..gemm.spec import GemmSpec
from .candidates import (
    considered_specs,
    dynamic_spec,
    has_large_shares,
    refilled_spec,
    types_of,
)
from .cost import Estimate, copying_ns, cutting_ns, estimate, pass_ns
from .device import L2_BYTES, MEMORY_BYTES_PER_NS, Device
from .expected_tiles import equal_groups
from .invariance import invariant_specs, is_invariant, reduces_rows
from .legality import device_violations, is_legal, pairing_violations, problem_violations
from .memory_traffic import best_raster_order
from .model import beside_xla, best_kernel, not_measured, xla_is_faster, xla_time
from .table import Entry, Key, Source, Table, tables_of

MODEL_ERROR = 0.01  # of the cost model, where it compares a measured kernel with others
TOGETHER_DOUBT = 1.05  # of the expected cost of products of one A that one kernel runs
# XLA puts the right operands of its own products of one A side by side, and cuts the result apart.
# Of 40 sets, on an H100, that took longer by -0.2 to 1.4 passes over both, 0.7 in the median, of
# which so much is counted on.
MERGED_PASSES = 0.5
# Of a kernel with a dynamic scheduler, beside the best with fixed shares. Of 24 random products by
# tiles of 256x208, which have no registers for it, other tiles cost up to 1.12 times as much.
MAX_DYNAMIC_COST = 1.15
LINE_COLUMNS = 128  # of a mask, a byte each, that are a line
# Of L2, what a product moves whose stream is not evicted first, so that the next call finds it. On
# an H100 calls on the same 25 to 42 MB are then 1.0 to 1.8 times as fast, and take up to 1.07 times
# as long after others, 1.19 after 128 MB of writes. Less stays anyway, more never does.
STAYING = 0.4, 0.9


@dataclass(frozen=True)
class Decision:
    """How a problem runs."""

    spec: GemmSpec | None  # the kernel; None where XLA is the answer
    raster_order: RasterOrder | None  # its order of tiles, or None
    reason: str  # why, for `explain`
    source: Source  # what decided; "model" stands for rules and estimates

    @classmethod
    def unsupported(cls, reasons: Sequence[str]) -> Decision:
        """Returns the decision of a problem that no kernel of ours can run."""
        return cls(None, None, "; ".join(reasons), "unsupported")

    @classmethod
    def xla(cls, reason: str, source: Source = "model") -> Decision:
        return cls(None, None, reason, source)


def choose(problem: GemmProblem, device: Device, *, kernel_only: bool = False) -> Decision:
    """Returns how `problem` runs on `device`.

    With `kernel_only`, XLA is the answer only where no kernel of ours can run the problem.

    Raises:
      TableError: the table that JAX_HOPPER_GEMM_TABLE names cannot be used.
    """
    if problem.indexed and (reasons := problem_violations(problem)):
        return Decision.unsupported(reasons)
    whole = _whole(problem)
    alone = replace(device, comm_overlap=False)
    decision = _choose(whole, alone, kernel_only, tables_of(alone))
    if device.comm_overlap:
        decision = _for_overlap(whole, alone, decision)
    return _of_problem(decision, problem)


def _refusals(problem: GemmProblem, device: Device) -> list[str]:
    """Returns why no kernel runs `problem`, neither as it is nor transposed nor cut into parts."""
    runs = is_legal(problem) or types_of(problem)
    return device_violations(device) + ([] if runs else problem_violations(problem))


def _whole(problem: GemmProblem) -> GemmProblem:
    """Returns the problem of a matrix that is no part of a stack, which runs as one that is.

    That of one to cut into parts does not.
    """
    alone = problem.bf16_terms or problem.indexed is None
    return problem if alone else replace(problem, indexed=None, stack=1)


def choose_invariant(problem: GemmProblem, device: Device, *, kernel_only: bool = True) -> Decision:
    """Returns how `problem` runs where a row has the same bits in every batch (`invariance`).

    XLA is the answer only where no kernel of ours can run it, whatever `kernel_only` says. Shards
    run the kernels of one GPU, since the devices that share the rows must not matter either.
    """
    if reasons := _refusals(problem, device):
        return Decision.unsupported(reasons)
    whole = _whole(problem)
    alone = replace(device, comm_overlap=False)
    decision = _choose_invariant(whole, alone, tables_of(alone))
    return _of_problem(decision, problem)


def _of_problem(decision: Decision, problem: GemmProblem) -> Decision:
    """Returns a decision for the matrix of a stack that `problem` reads, if it does.

    The kernel lets L2 keep a stream that may be read again from there.
    """
    if (spec := decision.spec) is None:
        return decision
    indexed, evict_first = problem.as_stored(spec.d_major).indexed, spec.evict_first
    if evict_first and decision.source != "user table":
        least, most = (share * L2_BYTES for share in STAYING)
        moved = problem.bytes * problem.stack  # a loop reads the stack's others, too
        evict_first = None if least <= moved <= most else evict_first
    if (indexed, evict_first) == (spec.indexed, spec.evict_first):
        return decision
    return replace(decision, spec=replace(spec, indexed=indexed, evict_first=evict_first))


@lru_cache(maxsize=4096)
def _choose_invariant(problem: GemmProblem, device: Device, tables: tuple[Table, ...]) -> Decision:
    if not reduces_rows(problem.graph):
        decision = _choose(problem, device, True, tables)
        if decision.spec is None or is_invariant(decision.spec):
            return decision
    return _modelled(problem, device, True, invariant_specs(problem, device))


@lru_cache(maxsize=4096)
def _choose(
    problem: GemmProblem, device: Device, kernel_only: bool, tables: tuple[Table, ...]
) -> Decision:
    if reasons := _refusals(problem, device):
        return Decision.unsupported(reasons)
    if problem.panels:
        return _together(problem, device, kernel_only)
    key = Key.of(problem)
    table = next((table for table in tables if key in table.entries), None)
    other = problem.bf16_terms > 0 or problem.simt  # than the arithmetic that tables are of
    if table is None or device.limited or other:  # tables were measured on whole GPUs
        return _modelled(problem, device, kernel_only)
    problem_type = ProblemType.of(problem)
    is_plain = problem_type == problem_type.plain
    if is_plain and not pairing_violations(problem, table.entries[key].spec):
        return _measured(table, key, kernel_only)
    refilled = _refilled(problem, device, table, kernel_only)
    return refilled or _modelled(problem, device, kernel_only)


def _together(problem: GemmProblem, device: Device, kernel_only: bool) -> Decision:
    """Returns how products of one A run: by one kernel, or as XLA's where one by one is faster."""
    decision = _modelled(problem, device, True)
    if decision.spec is None or decision.raster_order is None:
        return decision
    apart = one_by_one_ns(problem, device, kernel_only=kernel_only)
    together = estimate(problem, decision.spec, decision.raster_order, device).ns
    reason = f"{decision.reason}; one by one {apart / 1e3:.1f} us"
    if together * TOGETHER_DOUBT >= apart:
        return Decision.xla(reason)
    return replace(decision, reason=reason)


def one_by_one_ns(problem: GemmProblem, device: Device, *, kernel_only: bool = False) -> float:
    """Returns the expected time of products of one A, each by the kernel or by XLA as it would run.

    XLA makes one of those that are its own.
    """
    total, merged = 0.0, []
    for each in problem.apart:
        decision = choose(each, device, kernel_only=kernel_only)
        if decision.spec is None and (xla := xla_time(each, device)):
            total += xla.ns
            merged.append(each)
            continue
        if decision.spec is None or decision.raster_order is None:
            decision = _modelled(each, device, True)
        if decision.spec is None or decision.raster_order is None:
            return math.inf
        total += estimate(each, decision.spec, decision.raster_order, device).ns
    if len(merged) > 1:
        elements = sum((x.k + x.m) * x.n for x in merged)
        total += MERGED_PASSES * pass_ns(2 * DTYPES[problem.b_dtype].nbytes(elements))
    return total


def _measured(table: Table, key: Key, kernel_only: bool) -> Decision:
    entry = table.entries[key]
    times = f"measured {_us(entry.kernel_us)}, XLA {_us(entry.xla_us)} ({table.origin})"
    if entry.prefer == "xla" and not kernel_only:
        return Decision.xla(f"XLA is faster: best kernel {times}", table.source)
    return Decision(entry.spec, entry.raster_order, times, table.source)


def _refilled(
    problem: GemmProblem, device: Device, table: Table, kernel_only: bool
) -> Decision | None:
    """Returns the decision that the plain product's entry suggests; None leaves it to the model.

    XLA reads D once more for most epilogues. So where the entry prefers XLA, a kernel runs if
    that would cost more than the kernel loses.
    """
    p, entry = problem, table.entries[Key.of(problem)]
    times = f"{_us(entry.kernel_us)}, XLA {_us(entry.xla_us)} ({table.origin})"
    plain = f"the plain product measured {times}"
    spec = refilled_spec(entry.spec, ProblemType.of(p.as_stored(entry.spec.d_major)))
    if spec is not None and pairing_violations(p, spec):
        spec = None
    if entry.prefer == "xla" and not kernel_only:
        matrices = 1 if p.groups and p.groups.axis == "m" else p.l
        d_bytes = matrices * p.m * p.n * DTYPES[p.d_dtype].itemsize
        pass_us = d_bytes / MEMORY_BYTES_PER_NS / 1e3
        lost_us = (entry.kernel_us or 0.0) - (entry.xla_us or 0.0)
        costs_more = lost_us >= pass_us or not entry.kernel_us or not entry.xla_us
        if costs_more and (spec or best_kernel(problem, device)[0]):
            return Decision.xla(f"XLA is faster, and runs the epilogue: {plain}", table.source)
    if spec is None:
        return None
    loads_matrix = any(operand.kind == "matrix" for operand in p.graph.operands)
    if not loads_matrix and not p.gated and _is_slow(p, spec, entry, device):
        return None
    rider = "the epilogue" if p.epilogue else "gathering" if p.groups else "a nested batch"
    reason = f"{plain}; {rider} rides on its kernel"
    return Decision(spec, entry.raster_order, reason, table.source)


def _is_slow(problem: GemmProblem, spec: GemmSpec, entry: Entry, device: Device) -> bool:
    """Whether the model expects another kernel to be faster than `spec`, the measured one's."""
    best, _ = best_kernel(problem, device)
    ns = estimate(problem, spec, entry.raster_order, device).ns
    if entry.kernel_us:  # what the model gets wrong of the plain product
        bare = replace(problem, epilogue=None, operands=())
        ns *= entry.kernel_us * 1e3 / estimate(bare, entry.spec, entry.raster_order, device).ns
    return best is not None and ns > (1 + MODEL_ERROR) * best.cost.ns


def _us(microseconds: float | None) -> str:
    return "not timed" if microseconds is None else f"{microseconds:.1f} us"


def _modelled(
    problem: GemmProblem,
    device: Device,
    kernel_only: bool,
    candidates: Iterable[GemmSpec] | None = None,
) -> Decision:
    best, reasons = best_kernel(problem, device, candidates)
    if best is None:
        return Decision.unsupported(reasons)
    if not kernel_only:
        of_xla = xla_is_faster if problem.groups is None else not_measured
        if reason := of_xla(problem, best.cost, device):
            return Decision.xla(reason)
    raster_order = best_raster_order(problem, best.spec, device)
    reason = _expectation(problem, best.spec, best.cost, device)
    return Decision(best.spec, raster_order, reason, "model")


def _expectation(problem: GemmProblem, spec: GemmSpec, cost: Estimate, device: Device) -> str:
    waves = f"in {cost.waves} {'wave' if cost.waves == 1 else 'waves'}, {cost.occupancy:.0%} full"
    if spec.split_k:
        waves = _sharing(problem, spec, device)
    if spec.cluster_k > 1:
        waves += f", K of each shared by {spec.cluster_k} thread blocks"
    transposed = " of D's transpose" if spec.d_major == "m" else ""
    reason = (
        f"expected {cost.ns / 1e3:.1f} us, bound by {cost.bound}: {cost.tiles} tiles of "
        f"{spec.tile_m}x{spec.d_tile_n}{transposed} {waves}"
    )
    if copies := copying_ns(problem):
        reason += f"; {copies / 1e3:.1f} us more to copy operands into lines of whole 16 bytes"
    if cutting := cutting_ns(problem.as_run_by(spec)):
        reason += f"; {cutting / 1e3:.1f} us of it to cut operands into bfloat16 parts"
    if xla := beside_xla(problem, cost.ns + copying_ns(problem), device):
        reason += f"; {xla}"
    if problem.groups:
        mean = equal_groups(problem)
        along, size = ("rows", mean.m) if problem.groups.axis == "m" else ("of K", mean.k)
        reason += f", if {mean.l} groups have {size} {along} on average"
    return reason


def _sharing(problem: GemmProblem, spec: GemmSpec, device: Device) -> str:
    """Returns how thread blocks share tiles, for `explain`."""
    tape = grid.k_split(problem, spec, device.num_sms)
    whole = (tape.items - tape.ranges) * spec.cluster_size
    blocks = tape.ranges * spec.cluster_size
    return f"whose K {blocks} thread blocks share" + (f", but of {whole} tiles" if whole else "")


@lru_cache(maxsize=4096)
def _for_overlap(problem: GemmProblem, device: Device, decision: Decision) -> Decision:
    """Returns the decision where transfers may hold SMs while the kernel runs.

    Large tiles are then scheduled dynamically. With fixed shares, a thread block that waits for an
    SM keeps its share waiting, and so the whole kernel. Small tiles are soon done.
    """
    spec, raster_order = decision.spec, decision.raster_order
    if spec is None or raster_order is None or not has_large_shares(spec):
        return decision
    dynamic = dynamic_spec(spec)
    if dynamic is None:  # for want of registers
        candidates = [x for x in map(dynamic_spec, considered_specs(problem)) if x]
        if problem.epilogue:
            # Whole lines of 128 bytes even of a mask: on an H200 tiles of 256x160 that stored a
            # mask took 3.1 ms where those of 128 and 256 columns took 2.5; the model says 2.4 of
            # all.
            candidates = [x for x in candidates if x.tile_n % LINE_COLUMNS == 0]
        best, _ = best_kernel(problem, device, candidates)
        limit = MAX_DYNAMIC_COST * estimate(problem, spec, raster_order, device).ns
        if best is None or best.cost.ns > limit:
            return decision
        dynamic, raster_order = best.spec, best_raster_order(problem, best.spec, device)
    reason = f"{decision.reason}; its tiles are scheduled dynamically, since transfers may hold SMs"
    return replace(decision, spec=dynamic, raster_order=raster_order, reason=reason)
