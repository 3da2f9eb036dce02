"""The decision: which kernel runs a problem, or that XLA should.

    user's tables -> packaged table -> cost model and the rules of `preferences`

Tables hold plain products. One with an epilogue takes the kernel measured for the plain product
of its arithmetic, its shared memory filled anew, unless that kernel cannot hold the epilogue or
the model expects another one to be faster by more than it errs. The model is not asked where the
epilogue loads a matrix or the product is gated.

Grouped products have entries of their own, and do not go to XLA unless one says so: on an H200
its `ragged_dot` reached 6 to 99 TFLOP/s of some 820.

Nothing is timed here; the same problem, device and tables give the same answer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Literal

from ..gemm.epilogue_graph import ROW_REDUCTIONS, EpilogueGraph
from ..gemm.legality import violations
from ..gemm.problem import ITEMSIZE, GemmProblem, GroupedAxis, Major
from ..gemm.spec import GemmSpec, RasterOrder
from .candidates import (
    TRAVERSALS,
    Config,
    OperandTypes,
    filled_spec,
    model_specs,
    tuner_specs,
    worthwhile,
)
from .cost import (
    LAUNCH_NS,
    MEMORY_BYTES_PER_NS,
    Estimate,
    best_raster_order,
    equal_groups,
    estimate,
    mean_rows,
    roofline_ns,
)
from .device import Device
from .legality import (
    AB_DTYPES,
    D_DTYPES,
    GATHERABLE,
    device_violations,
    limit_violations,
    pairing_violations,
    problem_violations,
)
from .table import Entry, Key, Table, TableError, packaged_table, read_table

TABLE_VARIABLE = "JAX_HOPPER_GEMM_TABLE"
MODEL_ERROR = 0.01  # of the cost model, where it compares a measured kernel with others
LARGE_TILE = 128 * 192  # elements of D
MAX_CLAIMING_COST = 1.05  # of a kernel that claims tiles, beside the best with fixed shares
ROUGH = TRAVERSALS[:2]  # enough to tell kernels apart; the winner's is then chosen among all

Source = Literal["table", "model", "user table"]


@dataclass(frozen=True)
class Decision:
    """How a problem runs.

    Attributes:
      spec, raster_order: the kernel and its order of tiles; both None where XLA is the answer.
      reason: why, for `explain`.
      source: what decided: "user table", "table" (packaged) or "model" (rules and estimates).
    """

    spec: GemmSpec | None
    raster_order: RasterOrder | None
    reason: str
    source: Source


def choose(problem: GemmProblem, device: Device, *, kernel_only: bool = False) -> Decision:
    """Returns how `problem` runs on `device`.

    With `kernel_only`, XLA is the answer only where no kernel of ours can run the problem.

    Raises:
      TableError: the table that JAX_HOPPER_GEMM_TABLE names cannot be used.
    """
    if problem.indexed and (reasons := problem_violations(problem)):
        return Decision(None, None, "; ".join(reasons), "model")
    whole = replace(problem, indexed=None, stack=1)
    alone = replace(device, comm_overlap=False)
    decision = _choose(whole, alone, kernel_only, _tables.current())
    if device.comm_overlap:
        decision = _claiming(whole, alone, decision)
    spec = decision.spec and replace(decision.spec, indexed=problem.indexed)
    return replace(decision, spec=spec)


@lru_cache(maxsize=4096)
def _claiming(problem: GemmProblem, device: Device, decision: Decision) -> Decision:
    """Returns the decision where transfers may hold SMs while the kernel runs.

    A kernel of large tiles then claims them while it runs. With fixed shares, a thread block that
    waits for an SM keeps its share waiting, and so the whole kernel. Small tiles are soon done.
    """
    spec, raster_order = decision.spec, decision.raster_order
    if spec is None or raster_order is None or not _is_large(spec):
        return decision
    if (found := claiming_spec(spec)) is None:  # for want of registers
        expected = estimate(problem, spec, raster_order, device).ns
        best, _ = _best(problem, device, claiming=True)
        if best is None or best[0].ns > MAX_CLAIMING_COST * expected:
            return decision
        found, raster_order = best[1], best_raster_order(problem, best[1], device)
    reason = f"{decision.reason}; it claims tiles while it runs, since transfers may hold SMs"
    return replace(decision, spec=found, raster_order=raster_order, reason=reason)


def _is_large(spec: GemmSpec) -> bool:
    """Whether a kernel has fixed shares of large tiles."""
    fixed = spec.tile_scheduler == "static" and not spec.grouped
    return fixed and spec.tile_m * spec.tile_n >= LARGE_TILE


def claiming_spec(spec: GemmSpec) -> GemmSpec | None:
    """Returns the same kernel that claims its tiles while it runs, if there are registers for it.

    None as well for one that has no fixed shares of large tiles.
    """
    found = replace(spec, tile_scheduler="dynamic")
    return found if _is_large(spec) and not violations(found) else None


def load_table(path: str | os.PathLike[str]) -> Table:
    """Adds a user's table for this process; it precedes those loaded before and the packaged one.

    It serves the kind of GPU that it names and no other.

    Raises:
      TableError: the file cannot be read or holds an entry that no kernel can serve.
    """
    table = read_table(path)
    _tables.add(table)
    return table


def decided_by() -> tuple[object, ...]:
    """Returns what tells the tables that `choose` reads now from those it read before or after."""
    return _tables, _tables.loaded


def legal_specs(problem: GemmProblem, device: Device) -> list[tuple[GemmSpec, RasterOrder]]:
    """Returns every kernel and order of tiles that the tuner may try on `problem`."""
    if device_violations(device) or problem_violations(problem):
        return []
    specs = tuner_specs(OperandTypes.of(problem))
    return [(s, t) for s in specs if not pairing_violations(problem, s) for t in TRAVERSALS]


def table_specs(device: Device, dtypes: Iterable[tuple[str, str]] | None = None) -> list[GemmSpec]:
    """Returns every kernel without an epilogue that `choose` can return on `device`, once each.

    Dense ones first, then grouped ones, then what tables hold besides.

    Args:
      dtypes: pairs (ab_dtype, d_dtype) to restrict to; None means all of them.
    """
    if device_violations(device):
        return []
    pairs = [(ab, d) for ab in AB_DTYPES for d in D_DTYPES] if dtypes is None else list(dtypes)
    specs: dict[GemmSpec, None] = {}
    axes: tuple[GroupedAxis | None, ...] = (None, "m", "k")
    for axis, (ab_dtype, d_dtype) in product(axes, pairs):
        for types in _operand_types(ab_dtype, d_dtype, None, axis):
            specs |= dict.fromkeys(model_specs(types))
    for measured in _measured_specs(device):
        if (measured.ab_dtype, measured.d_dtype) in pairs:
            types = OperandTypes.of_spec(measured)
            gathering = (replace(types, gathered=g) for g in GATHERABLE.get(types.grouped, ()))
            refilled = (refilled_spec(measured, types) for types in gathering)
            specs |= dict.fromkeys((measured, *(spec for spec in refilled if spec)))
    return _on(device, specs)


def _on(device: Device, specs: Iterable[GemmSpec]) -> list[GemmSpec]:
    """Returns the kernels that `choose` returns on `device` where these are for a GPU alone."""
    if not device.comm_overlap:
        return list(specs)
    return list(dict.fromkeys(claiming_spec(spec) or spec for spec in specs))


def _operand_types(
    ab_dtype: str, d_dtype: str, graph: EpilogueGraph | None, axis: GroupedAxis | None
) -> list[OperandTypes]:
    """Returns what a legal problem of these dtypes, epilogue and grouped axis may ask for."""
    a_majors: dict[GroupedAxis | None, tuple[Major, ...]] = {None: ("k", "m"), "m": ("k",)}
    b_majors: tuple[Major, ...] = ("n",) if axis == "k" else ("n", "k")
    layouts = product(a_majors.get(axis, ("m",)), b_majors)
    gathered = (None, *GATHERABLE.get(axis, ()))
    return [
        OperandTypes(ab_dtype, d_dtype, a_major, b_major, graph, axis, operand)
        for (a_major, b_major), operand in product(layouts, gathered)
    ]


def _measured_specs(device: Device) -> list[GemmSpec]:
    device = replace(device, comm_overlap=False)
    tables = (*_tables.current(), packaged_table(device))
    return [e.spec for t in tables if t.device == device for e in t.entries.values()]


def epilogue_specs(
    device: Device,
    graphs: Iterable[EpilogueGraph],
    ab_dtypes: Iterable[str] = AB_DTYPES,
    grouped: GroupedAxis | None = None,
) -> list[GemmSpec]:
    """Returns every kernel that `choose` can return on `device` for these epilogues, once each.

    They are of dense products, or of those that groups cut along `grouped`. An epilogue whose
    results have no matrix is taken to have a `d_dtype` of `ab_dtype`.
    """
    if device_violations(device):
        return []
    measured = _measured_specs(device)
    specs: dict[GemmSpec, None] = {}
    for graph, ab_dtype in product(graphs, ab_dtypes):
        d_dtype = graph.matrices[0].dtype if graph.matrices else ab_dtype
        for types in _operand_types(ab_dtype, d_dtype, graph, grouped):
            specs |= dict.fromkeys(model_specs(types))
            alike = (s for s in measured if OperandTypes.of_spec(s) == types.plain)
            refilled = (refilled_spec(spec, types) for spec in alike)
            specs |= dict.fromkeys(spec for spec in refilled if spec)
    return _on(device, specs)


def refilled_spec(plain: GemmSpec, types: OperandTypes) -> GemmSpec | None:
    """Returns the kernel of a measured plain one's configuration for an epilogue, if it fits.

    The same for gathered rows.
    """
    spec = filled_spec(replace(Config.of(plain), epi_tile_n=None), types)
    return spec if spec is not None and worthwhile(spec) else None


@lru_cache(maxsize=4096)
def _choose(
    problem: GemmProblem, device: Device, kernel_only: bool, user_tables: tuple[Table, ...]
) -> Decision:
    if reasons := device_violations(device) + problem_violations(problem):
        return Decision(None, None, "; ".join(reasons), "model")
    if device.limited:  # tables were measured on whole GPUs
        return _modelled(problem, device, kernel_only)
    key, types = Key.of(problem), OperandTypes.of(problem)
    measured: list[tuple[Entry, str, Source]] = [
        (table.entries[key], table.origin, "user table")
        for table in user_tables
        if table.device == device and key in table.entries
    ]
    packaged = packaged_table(device)
    if key in packaged.entries:
        measured.append((packaged.entries[key], device.key, "table"))
    for entry, origin, source in measured[:1]:
        if types == types.plain and not pairing_violations(problem, entry.spec):
            return _measured(entry, origin, kernel_only, source)
        if decision := _refilled(problem, device, entry, origin, kernel_only, source):
            return decision
    return _modelled(problem, device, kernel_only)


def _measured(entry: Entry, origin: str, kernel_only: bool, source: Source) -> Decision:
    times = f"measured {_us(entry.kernel_us)}, XLA {_us(entry.xla_us)} ({origin})"
    if entry.prefer == "xla" and not kernel_only:
        return Decision(None, None, f"XLA is faster: best kernel {times}", source)
    return Decision(entry.spec, entry.raster_order, times, source)


def _refilled(
    problem: GemmProblem,
    device: Device,
    entry: Entry,
    origin: str,
    kernel_only: bool,
    source: Source,
) -> Decision | None:
    """Returns the decision that the plain product's entry suggests; None leaves it to the model.

    XLA reads D once more for most epilogues. So where the entry prefers XLA, a kernel runs if
    that would cost more than the kernel loses.
    """
    types = OperandTypes.of(problem)
    plain = f"the plain product measured {_us(entry.kernel_us)}, XLA {_us(entry.xla_us)} ({origin})"
    if entry.prefer == "xla" and not kernel_only:
        matrices = 1 if types.grouped == "m" else problem.l
        d_bytes = matrices * problem.m * problem.n * ITEMSIZE[problem.d_dtype]
        pass_us = d_bytes / MEMORY_BYTES_PER_NS / 1e3
        lost_us = (entry.kernel_us or 0.0) - (entry.xla_us or 0.0)
        if lost_us >= pass_us or not entry.kernel_us or not entry.xla_us:
            return Decision(None, None, f"XLA is faster, and runs the epilogue: {plain}", source)
    spec = refilled_spec(entry.spec, types)
    if spec is None or pairing_violations(problem, spec):
        return None
    loads_matrix = any(operand.kind == "matrix" for operand in problem.graph.operands)
    if not loads_matrix and not problem.gated and _is_slow(problem, spec, entry, device):
        return None
    rider = "the epilogue" if problem.epilogue else "gathering"
    return Decision(spec, entry.raster_order, f"{plain}; {rider} rides on its kernel", source)


def _is_slow(problem: GemmProblem, spec: GemmSpec, entry: Entry, device: Device) -> bool:
    """Whether the model expects another kernel to be faster with the epilogue than `entry`'s."""
    best = _best(problem, device)[0]
    ns = estimate(problem, spec, entry.raster_order, device).ns
    if entry.kernel_us:  # what the model gets wrong of the plain product
        bare = replace(problem, epilogue=None, operands=())
        ns *= entry.kernel_us * 1e3 / estimate(bare, entry.spec, entry.raster_order, device).ns
    return best is not None and ns > (1 + MODEL_ERROR) * best[0].ns


def _us(microseconds: float | None) -> str:
    return "not timed" if microseconds is None else f"{microseconds:.1f} us"


def _best(
    problem: GemmProblem, device: Device, *, claiming: bool = False
) -> tuple[tuple[Estimate, GemmSpec] | None, list[str]]:
    """Returns the kernel of least expected cost, or None and the reasons against the last one.

    Args:
      claiming: of `claiming_spec` alone, whose tiles have whole lines of 128 bytes even of a mask.
        (On an H200 one of 256x160 that stored a mask took 3.1 ms where those of 128 and 256 columns
        took 2.5; the model says 2.4 of all.)
    """
    reasons = ["no kernel has the registers and shared memory that the epilogue needs"]
    legal = []
    specs: Iterable[GemmSpec] = model_specs(OperandTypes.of(problem))
    if claiming:
        specs = [x for spec in specs if (x := claiming_spec(spec)) and x.tile_n % 128 == 0]
    for spec in specs:
        found = pairing_violations(problem, spec)
        if found := found or limit_violations(problem, spec, device):
            reasons = found
        else:
            legal.append(spec)
    best: tuple[Estimate, GemmSpec] | None = None
    for spec in [spec for spec in legal if not _is_too_tall(problem, spec)] or legal:
        cost = min((estimate(problem, spec, t, device) for t in ROUGH), key=lambda e: e.ns)
        if best is None or cost.ns < best[0].ns:
            best = cost, spec
    return best, reasons


def _is_too_tall(problem: GemmProblem, spec: GemmSpec) -> bool:
    """Whether most rows of a tile are expected to be past the end of a group.

    Reading B is then what takes time, and rows that are not there leave less of it in flight.
    """
    rows = mean_rows(problem)
    return rows is not None and spec.tile_m > max(64, 2 * rows)


def _modelled(problem: GemmProblem, device: Device, kernel_only: bool) -> Decision:
    best, reasons = _best(problem, device)
    if best is None:
        return Decision(None, None, "; ".join(reasons), "model")
    cost, spec = best
    raster_order = best_raster_order(problem, spec, device)
    if not kernel_only and problem.groups is None:
        for prefers_xla in XLA_PREFERENCES:
            if reason := prefers_xla(problem, cost, device):
                also = "; the epilogue goes there with it" if problem.epilogue else ""
                return Decision(None, None, reason + also, "model")
        if problem.epilogue and (reason := _two_steps_are_faster(problem, cost, device)):
            return Decision(None, None, reason, "model")
    reason = (
        f"expected {cost.ns / 1e3:.1f} us, bound by {cost.bound}: {cost.tiles} tiles of "
        f"{spec.tile_m}x{spec.d_tile_n} in {cost.waves} {'wave' if cost.waves == 1 else 'waves'}, "
        f"{cost.occupancy:.0%} full"
    )
    if problem.groups:
        mean = equal_groups(problem)
        along, size = ("rows", mean.m) if problem.groups.axis == "m" else ("of K", mean.k)
        reason += f", if {mean.l} groups have {size} {along} on average"
    return Decision(spec, raster_order, reason, "model")


def _two_steps_are_faster(problem: GemmProblem, cost: Estimate, device: Device) -> str | None:
    """Returns why XLA's product and then its epilogue are expected to be faster, if they are.

    XLA's product is taken to be as fast as our plain one, its epilogue to move each byte once,
    with a kernel more for each reduction.
    """
    p = problem
    plain = replace(p, n=p.n * p.graph.accumulators, epilogue=None, operands=(), up_offset=None)
    best, _ = _best(plain, device)
    if best is None:
        return None
    elements = p.l * p.m * p.n
    moved = elements * (p.element_bytes + p.graph.accumulators * ITEMSIZE[p.d_dtype])
    statistics = sum(node.op in ROW_REDUCTIONS for node in p.graph.nodes)
    kernels = 1 + statistics + len(p.graph.reductions)
    two_steps = best[0].ns + kernels * LAUNCH_NS + moved / MEMORY_BYTES_PER_NS
    if cost.ns <= two_steps:
        return None
    return (
        f"with the epilogue our best kernel is expected to take {cost.ns / 1e3:.1f} us, XLA's "
        f"product and a pass over its result {two_steps / 1e3:.1f} us"
    )


class _UserTables:
    """The user's tables, latest first; the environment's is read when first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.loaded: tuple[Table, ...] = ()
        self._environment: tuple[Table, ...] | None = None

    def add(self, table: Table) -> None:
        with self._lock:
            self.loaded = (table, *self.loaded)

    def current(self) -> tuple[Table, ...]:
        environment = self._environment
        if environment is None:
            with self._lock:
                environment = self._environment = self._read_environment()
        return self.loaded + environment

    def _read_environment(self) -> tuple[Table, ...]:
        path = os.environ.get(TABLE_VARIABLE)
        if not path:
            return ()
        try:
            return (read_table(path),)
        except TableError as error:
            raise TableError(f"{error} (the path comes from {TABLE_VARIABLE})") from error


_tables = _UserTables()


Preference = Callable[[GemmProblem, Estimate, Device], str | None]

THIN = 16  # rows or columns of D up to which XLA won all measurements, by 2 to 30 %
SPLIT_K_EXTENT = 4096  # K from which splitting it over SMs pays for adding the parts
SPLIT_K_RATIO = 1.8  # times the roofline


def thin(problem: GemmProblem, best: Estimate, device: Device) -> str | None:
    """Products that are nearly matrix times vector: XLA has kernels without tensor cores."""
    m, n = problem.m, problem.n
    if min(m, n) > THIN:
        return None
    return f"D is {m}x{n}: up to {THIN} rows or columns it is nearly a matrix-vector product"


def needs_split_k(problem: GemmProblem, best: Estimate, device: Device) -> str | None:
    """Long K over too few tiles to keep the SMs busy: cuBLAS splits K, we do not."""
    ratio = best.ns / roofline_ns(problem)
    if problem.k < SPLIT_K_EXTENT or best.tiles > device.num_sms or ratio < SPLIT_K_RATIO:
        return None
    return (
        f"K={problem.k} over {best.tiles} tiles keeps {device.num_sms} SMs waiting (expected "
        f"{ratio:.1f} times the least possible time): it wants split-K, which XLA has"
    )


XLA_PREFERENCES: tuple[Preference, ...] = (thin, needs_split_k)
