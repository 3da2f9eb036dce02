"""The command line of benchmarks: options of all, kernels built ahead, heads, figures as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jax_hopper_gemm import cubin
from jax_hopper_gemm.gemm.kernel_params import KernelSpec
from jax_hopper_gemm.testing import benchmark


def parser(
    description: str | None, rounds: int | None = None, *, builds: bool = True
) -> argparse.ArgumentParser:
    """Returns a parser of `--json`, `--build` and, with a default of `rounds`, of `--rounds`."""
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if builds:
        found.add_argument(
            "--build", "--build-only", type=Path, metavar="FOLDER", help="only compile the kernels"
        )
    found.add_argument("--json", type=Path, help="write all figures to this file")
    if rounds is not None:
        found.add_argument("--rounds", type=int, default=rounds, help=f"of each [{rounds}]")
    return found


def begin(regime: str, header: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Prints what is timed where and a table's head; returns the regimes and the environment.

    Args:
      regime: one of `benchmark.REGIMES`, or "both".

    Raises:
      RuntimeError: jax has no Hopper GPU.
    """
    benchmark.this_device()
    facts = benchmark.environment()
    print("  ".join(f"{key} {value}".replace("\n", " ") for key, value in facts.items()))
    print(header)
    return benchmark.REGIMES if regime == "both" else (regime,), facts


def build(specs: Iterable[KernelSpec | None], folder: Path) -> int:
    """Compiles kernels, each once, into `folder`; returns the exit status."""
    report = cubin.build([spec for spec in dict.fromkeys(specs) if spec], folder=folder)
    print(report)
    return 1 if report.failures else 0


def write(path: Path | None, rows: Any, **facts: Any) -> int:
    """Writes rows and where they were measured, if a path was given; returns the exit status."""
    if path:
        document = {"environment": benchmark.environment(), "rows": rows, **facts}
        path.write_text(json.dumps(document, indent=1) + "\n")
    return 0
