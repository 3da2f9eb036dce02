"""`bench`: times our kernels and XLA's on this GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from . import products
from .report import check_file, json_option, say


@click.command("bench")
@click.argument("wanted", nargs=-1, type=products.ProductsType(), metavar="[MxNxK|SUITE]...")
@products.options
@click.option("--regime", type=click.Choice(["burst", "sustained", "both"]), default="burst")
@click.option("--rounds", type=products.POSITIVE, default=5, help="Turns of each candidate [5].")
@click.option("--without", multiple=True, metavar="CANDIDATE", help="Leave a candidate out.")
@click.option("--out", type=Path, metavar="FILE", help="Write all figures, as JSON.")
@json_option
def command(
    wanted: tuple[Any, ...], regime: str, rounds: int, without: tuple[str, ...],
    out: Path | None, **described: Any,
) -> dict[str, Any]:  # fmt: skip
    """Time products beside XLA's and Pallas's, in alternation [bars]; needs a Hopper GPU."""
    from ..testing import benchmark, results

    makers = {name: make for name, make in benchmark.MAKERS.items() if name not in without}
    if unknown := sorted(set(without) - benchmark.MAKERS.keys()):
        names = ", ".join(benchmark.MAKERS)
        raise click.UsageError(f"--without: no candidate is {unknown[0]!r}; there are {names}.")
    if not makers:
        raise click.UsageError("--without leaves out every candidate; keep one to time.")
    check_file(out)
    benchmark.this_device()
    facts = benchmark.environment()
    say("  ".join(f"{key} {value}".replace("\n", " ") for key, value in facts.items()))
    say(results.HEADER)
    rows = benchmark.run(
        products.problems(wanted or ("bars",), **described),
        benchmark.REGIMES if regime == "both" else (regime,),
        makers, rounds, report=lambda row: say(results.format_row(row)),
    )  # fmt: skip
    totals = results.summary(rows)
    for name, total in totals.items():
        say(
            f"XLA / {name}: geometric mean {total['geometric_mean']:.3f}, "
            f"minimum {total['minimum']:.3f} at {total['minimum_at']} ({total['problems']})"
        )
    found = {"environment": facts, "summary": totals, "rows": [row.to_dict() for row in rows]}
    if out:
        out.write_text(json.dumps(found, indent=1) + "\n")
    return found
