"""What commands print, text for people or one JSON object, and how they fail."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.filesize import pick_unit_and_suffix
from rich.table import Table

import jax_hopper_gemm

from .. import cubin

SCHEMA = 1  # of the JSON object; a change of a field's meaning makes another

# An option of every command. `main` looks for it, since a command that fails prints JSON too.
json_option = click.option(
    "--json", is_flag=True, expose_value=False, help="Print one JSON object instead of text."
)


class CommandError(Exception):
    """A command failed: the text gives the reason and the way out.

    Attributes:
      result: what it found nevertheless, for JSON.
    """

    def __init__(self, text: str, result: dict[str, Any] | None = None) -> None:
        super().__init__(text)
        self.result = result


class Printer:
    """Prints what people read, or nothing where JSON is asked for."""

    silent = False

    def __call__(self, *what: Any) -> None:
        # Pipes and files get whole lines; a terminal's lines are as long as it is wide.
        console = Console(highlight=False, markup=False, emoji=False, quiet=self.silent)
        if not console.is_terminal:
            console.width = 10_000
        console.print(*what, soft_wrap=True)


say = Printer()


def say_facts(title: str, facts: Mapping[str, Any]) -> None:
    """Prints one fact a line under a title, values aligned."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, value in facts.items():
        table.add_row(f"  {name}", str(value))
    say(title)
    say(table)


def print_json(command: str, status: int, result: Any, error: str | None) -> None:
    """Prints the object that is the same for every command but for `result`."""
    document = {
        "schema": SCHEMA, "version": jax_hopper_gemm.__version__, "command": command,
        "status": status, "error": error, "result": result,
    }  # fmt: skip
    print(json.dumps(document, indent=2), flush=True)


def bytes_text(nbytes: int) -> str:
    """Returns a size as text: 512 B, 48.2 KiB, 1.5 MiB."""
    unit, suffix = pick_unit_and_suffix(nbytes, ["B", "KiB", "MiB", "GiB"], 1024)
    return f"{nbytes} B" if unit == 1 else f"{nbytes / unit:.1f} {suffix}"


def make_folder(path: Path, name: str) -> None:
    """Makes a folder that a command will fill.

    Raises:
      CommandError: it cannot be made or written; `name` says which folder it is.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(path, os.W_OK | os.X_OK) else "Permission denied"
    except OSError as error:
        reason = "it is a file" if path.is_file() else error.strerror
    if reason:
        raise CommandError(f"{name} {path} cannot be written: {reason}. Name another folder.")


def check_file(path: Path | None) -> None:
    """Refuses a file of --out that a command could not write when its work is done.

    Raises:
      CommandError: it is a folder, or in a folder that does not exist or cannot be written.
    """
    if path is None:
        return
    if path.is_dir():
        reason = "it is a folder"
    elif not path.parent.is_dir():
        reason = f"there is no folder {path.parent}"
    else:
        reason = "" if os.access(path.parent, os.W_OK | os.X_OK) else "Permission denied"
    if reason:
        raise CommandError(f"--out {path} cannot be written: {reason}. Name another file.")


def built(report: cubin.BuildReport) -> dict[str, Any]:
    """Says what was built and returns it for JSON.

    Raises:
      CommandError: kernels could not be built.
    """
    say(str(report))
    result = {
        "folder": str(report.folder or cubin.cache_dir()),
        "compiled": [spec.name for spec in report.compiled],
        "reused": [spec.name for spec in report.reused],
        "failures": {spec.name: why for spec, why in report.failures.items()},
    }
    if report.failures:
        total = sum(map(len, (report.compiled, report.reused, report.failures)))
        raise CommandError(
            f"{len(report.failures)} of {total} kernels could not be built. The first reason: "
            f"{next(iter(report.failures.values()))}",
            result,
        )
    return result
