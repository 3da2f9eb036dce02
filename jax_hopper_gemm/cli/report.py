"""Output of commands: aligned facts, tables, JSON, and errors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..cubin import BuildReport


class CommandError(Exception):
    """A command failed; the text gives the reason and the way out."""


def print_facts(title: str, facts: Mapping[str, Any]) -> None:
    """Prints one fact a line under a title, values aligned."""
    print(title)
    width = max(map(len, facts), default=0)
    for name, value in facts.items():
        print(f"  {name:<{width}}  {value}")


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints rows of text, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        print("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip())


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def bytes_text(nbytes: int) -> str:
    """Returns a size as text: 512 B, 48.2 KiB, 1.5 MiB."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"


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


def check_file(path: Path | None, option: str) -> None:
    """Refuses a file that a command could not write when its work is done.

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
        raise CommandError(f"{option} {path} cannot be written: {reason}. Name another file.")


def check_built(report: BuildReport) -> None:
    """Raises CommandError if kernels could not be built."""
    if report.failures:
        total = len(report.compiled) + len(report.reused) + len(report.failures)
        raise CommandError(
            f"{len(report.failures)} of {total} kernels could not be built. The first reason: "
            f"{next(iter(report.failures.values()))}"
        )
