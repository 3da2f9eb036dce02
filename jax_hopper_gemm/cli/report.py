"""Output of commands: aligned facts, tables, JSON, and errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


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
