"""Rows of a benchmark, and what is shown of them: a table, ratios, JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..gemm.problem import GemmProblem
from . import shapes
from .timing import Timing

OURS = ("hopper", "auto")
IN_TABLE = (*OURS, "xla", "pallas")


@dataclass(frozen=True)
class Row:
    """The times of all candidates on one problem, in one regime."""

    problem: GemmProblem  # what is computed
    regime: str  # "burst" or "sustained"
    kernel: str  # our kernel; "" where none is legal
    auto: str  # what `implementation=None` runs: a kernel, or "XLA"
    timings: Mapping[str, Timing]  # by candidate

    def ratio(self, ours: str) -> float | None:
        """Returns XLA's median over ours: above 1, ours is the faster."""
        if ours not in self.timings or "xla" not in self.timings:
            return None
        return self.timings["xla"].median / self.timings[ours].median

    def to_dict(self) -> dict:
        return {
            "problem": asdict(self.problem),
            "layout": shapes.layout_name(self.problem),
            "regime": self.regime,
            "kernel": self.kernel,
            "auto": self.auto,
            "timings": {name: t.to_dict() for name, t in self.timings.items()},
            "ratios": {ours: self.ratio(ours) for ours in OURS},
        }


def summary(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """Returns geometric mean and minimum of XLA's time over ours, by regime and candidate."""
    totals: dict[str, dict[str, Any]] = {}
    by_case: dict[tuple[str, str], list[tuple[float, Row]]] = {}
    for row in rows:
        for name in OURS:
            if (ratio := row.ratio(name)) is not None:
                by_case.setdefault((row.regime, name), []).append((ratio, row))
    for (regime, name), cases in by_case.items():
        ratios = [ratio for ratio, _ in cases]
        least, row = min(cases, key=lambda case: case[0])
        totals[f"{name}, {regime}"] = {
            "geometric_mean": math.exp(sum(map(math.log, ratios)) / len(ratios)),
            "minimum": least,
            "minimum_at": f"{extents(row.problem)} {shapes.layout_name(row.problem)}",
            "problems": len(ratios),
        }
    return totals


def extents(problem: GemmProblem) -> str:
    batch = f"{problem.l}x" if problem.l > 1 else ""
    return f"{batch}{problem.m}x{problem.n}x{problem.k}"


HEADER = (
    f"{'MxNxK':<18} {'A,B':<6} {'regime':<9} {'hopper us':>10} {'q1-q3':>15} {'TF':>5} "
    f"{'auto us':>9} {'XLA us':>9} {'TF':>5} {'X/hop':>6} {'X/auto':>6} {'pallas us':>9}  kernel"
)


def format_row(row: Row) -> str:
    """Returns one line of the table under `HEADER`; further candidates follow at the end."""

    def median(name: str) -> str:
        return f"{row.timings[name].median:.1f}" if name in row.timings else "-"

    def rate(name: str) -> str:  # TFLOP/s
        found = row.timings.get(name)
        return f"{row.problem.flops / found.median / 1e6:.0f}" if found else "-"

    def ratio(name: str) -> str:
        value = row.ratio(name)
        return "-" if value is None else f"{value:.3f}"

    ours = row.timings.get("hopper")
    spread = "{:.1f}-{:.1f}".format(*ours.quartiles) if ours else "-"
    others = "".join(f"  {n} {median(n)} us" for n in row.timings if n not in IN_TABLE)
    runs = row.kernel if row.auto == row.kernel else f"{row.kernel or '-'} (auto: {row.auto})"
    return (
        f"{extents(row.problem):<18} {shapes.layout_name(row.problem):<6} {row.regime:<9} "
        f"{median('hopper'):>10} {spread:>15} {rate('hopper'):>5} {median('auto'):>9} "
        f"{median('xla'):>9} {rate('xla'):>5} {ratio('hopper'):>6} {ratio('auto'):>6} "
        f"{median('pallas'):>9}  {runs}{others}"
    )
