"""The record of kernels that passed on a GPU: a JSON object, an entry a line, by a cubin's sha256.

The key is the machine code itself, so a changed comment changes nothing and a changed
instruction asks for a new run.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from pathlib import Path


def read(path: Path) -> dict[str, dict[str, str]]:
    """Returns the entries; none when the file does not exist."""
    return json.loads(path.read_text()) if path.exists() else {}


def merge(path: Path, kernels: Mapping[str, str], device: str) -> None:
    """Adds kernels that passed today on `device`.

    Args:
      path: the record; created when missing.
      kernels: names of the kernels by sha256 of their cubins.
      device: name of the GPU.
    """
    date = datetime.date.today().isoformat()
    entries = read(path)
    for sha256, kernel in kernels.items():
        entries[sha256] = {"kernel": kernel, "device": device, "date": date}
    by_name = sorted(entries.items(), key=lambda item: (item[1]["kernel"], item[0]))
    lines = (f" {json.dumps(sha256)}: {json.dumps(entry)}" for sha256, entry in by_name)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def missing(path: Path, sha256s: Iterable[str]) -> list[str]:
    """Returns those cubins that no recorded run has covered."""
    entries = read(path)
    return [sha256 for sha256 in sha256s if sha256 not in entries]
