"""The decision: which kernel runs a problem, or that XLA should.

    user's tables -> packaged table -> cost model and the rules of `preferences`

Nothing is timed here; the same problem, device and tables give the same answer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from ..problem import GemmProblem
from ..spec import GemmSpec, Traversal
from .candidates import TRAVERSALS, OperandTypes, model_specs, tuner_specs
from .cost import Estimate, best_traversal, estimate
from .device import Device
from .legality import (
    AB_DTYPES,
    D_DTYPES,
    device_violations,
    pairing_violations,
    problem_violations,
)
from .preferences import XLA_PREFERENCES
from .table import Entry, Key, Table, TableError, packaged_table, read_table

TABLE_VARIABLE = "JAX_HOPPER_GEMM_TABLE"
ROUGH = TRAVERSALS[:2]  # enough to tell kernels apart; the winner's is then chosen among all

Source = Literal["table", "model", "user table"]


@dataclass(frozen=True)
class Decision:
    """How a problem runs.

    Attributes:
      spec, traversal: the kernel and its order of tiles; both None where XLA is the answer.
      reason: why, for `explain`.
      source: what decided: "user table", "table" (packaged) or "model" (rules and estimates).
    """

    spec: GemmSpec | None
    traversal: Traversal | None
    reason: str
    source: Source


def choose(problem: GemmProblem, device: Device, *, kernel_only: bool = False) -> Decision:
    """Returns how `problem` runs on `device`.

    With `kernel_only`, XLA is the answer only where no kernel of ours can run the problem.

    Raises:
      TableError: the table that JAX_HOPPER_GEMM_TABLE names cannot be used.
    """
    return _choose(problem, device, kernel_only, _tables.current())


def load_table(path: str | os.PathLike[str]) -> Table:
    """Adds a user's table for this process; it precedes those loaded before and the packaged one.

    It serves the kind of GPU that it names and no other.

    Raises:
      TableError: the file cannot be read or holds an entry that no kernel can serve.
    """
    table = read_table(path)
    _tables.add(table)
    return table


def legal_specs(problem: GemmProblem, device: Device) -> list[tuple[GemmSpec, Traversal]]:
    """Returns every kernel and order of tiles that the tuner may try on `problem`."""
    if device_violations(device) or problem_violations(problem):
        return []
    specs = tuner_specs(_types(problem))
    return [(s, t) for s in specs if not pairing_violations(problem, s) for t in TRAVERSALS]


def table_specs(device: Device, dtypes: Iterable[tuple[str, str]] | None = None) -> list[GemmSpec]:
    """Returns every kernel that `choose` can return on `device`, with no repeats.

    Args:
      dtypes: pairs (ab_dtype, d_dtype) to restrict to; None means all of them.
    """
    if device_violations(device):
        return []
    pairs = [(ab, d) for ab in AB_DTYPES for d in D_DTYPES] if dtypes is None else list(dtypes)
    specs: dict[GemmSpec, None] = {}
    for ab_dtype, d_dtype in pairs:
        for a_major in ("k", "m"):
            for b_major in ("n", "k"):
                types = OperandTypes(ab_dtype, d_dtype, a_major, b_major)
                specs |= dict.fromkeys(model_specs(types))
    for table in (*_tables.current(), packaged_table(device)):
        if table.device == device:
            measured = (entry.spec for entry in table.entries.values())
            specs |= dict.fromkeys(s for s in measured if (s.ab_dtype, s.d_dtype) in pairs)
    return list(specs)


@lru_cache(maxsize=4096)
def _choose(
    problem: GemmProblem, device: Device, kernel_only: bool, user_tables: tuple[Table, ...]
) -> Decision:
    if reasons := device_violations(device) + problem_violations(problem):
        return Decision(None, None, "; ".join(reasons), "model")
    key = Key.of(problem)
    for table in user_tables:
        if table.device == device and key in table.entries:
            return _measured(table.entries[key], table.origin, kernel_only, "user table")
    packaged = packaged_table(device)
    if key in packaged.entries:
        return _measured(packaged.entries[key], device.key, kernel_only, "table")
    return _modelled(problem, device, kernel_only)


def _measured(entry: Entry, origin: str, kernel_only: bool, source: Source) -> Decision:
    times = f"measured {_us(entry.kernel_us)}, XLA {_us(entry.xla_us)} ({origin})"
    if entry.prefer == "xla" and not kernel_only:
        return Decision(None, None, f"XLA is faster: best kernel {times}", source)
    return Decision(entry.spec, entry.traversal, times, source)


def _us(microseconds: float | None) -> str:
    return "not timed" if microseconds is None else f"{microseconds:.1f} us"


def _modelled(problem: GemmProblem, device: Device, kernel_only: bool) -> Decision:
    best: tuple[Estimate, GemmSpec] | None = None
    reasons: list[str] = []
    for spec in model_specs(_types(problem)):
        if found := pairing_violations(problem, spec):
            reasons = found
            continue
        cost = min((estimate(problem, spec, t, device) for t in ROUGH), key=lambda e: e.ns)
        if best is None or cost.ns < best[0].ns:
            best = cost, spec
    if best is None:
        return Decision(None, None, "; ".join(reasons), "model")
    cost, spec = best
    traversal = best_traversal(problem, spec, device)
    if not kernel_only:
        for prefers_xla in XLA_PREFERENCES:
            if reason := prefers_xla(problem, cost, device):
                return Decision(None, None, reason, "model")
    reason = (
        f"expected {cost.ns / 1e3:.1f} us, bound by {cost.bound}: {cost.tiles} tiles of "
        f"{spec.tile_m}x{spec.tile_n} in {cost.waves} {'wave' if cost.waves == 1 else 'waves'}, "
        f"{cost.occupancy:.0%} full"
    )
    return Decision(spec, traversal, reason, "model")


def _types(problem: GemmProblem) -> OperandTypes:
    return OperandTypes(problem.ab_dtype, problem.d_dtype, problem.a.major, problem.b.major)


class _UserTables:
    """The user's tables, latest first; the environment's is read when first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: tuple[Table, ...] = ()
        self._environment: tuple[Table, ...] | None = None

    def add(self, table: Table) -> None:
        with self._lock:
            self._loaded = (table, *self._loaded)

    def current(self) -> tuple[Table, ...]:
        environment = self._environment
        if environment is None:
            with self._lock:
                environment = self._environment = self._read_environment()
        return self._loaded + environment

    def _read_environment(self) -> tuple[Table, ...]:
        path = os.environ.get(TABLE_VARIABLE)
        if not path:
            return ()
        try:
            return (read_table(path),)
        except TableError as error:
            raise TableError(f"{error} (the path comes from {TABLE_VARIABLE})") from error


_tables = _UserTables()
