"""The record of kernels that passed on a GPU: a JSON object of runs, a kernel a line.

    {
    "NVIDIA H200, 2026-11-22": {
     "07900d3c9217aad7cd6c422f0b658eca": "jhg_gemm_bf16_bf16_nn_128x128x64_...",

The key is the machine code itself, the first 128 bits of a cubin's sha256: a changed comment
changes nothing, and a changed instruction asks for a new run. A kernel stays in the first run that
it has passed.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

DIGITS = 32  # of a sha256, in the record


def read(path: Path) -> dict[str, dict[str, str]]:
    """Returns the names of kernels by digest, by run; none when the file does not exist."""
    return json.loads(path.read_text()) if path.exists() else {}


def merge(path: Path, kernels: Mapping[str, str], device: str) -> None:
    """Adds kernels that passed today on `device`.

    Args:
      path: the record; created when missing.
      kernels: names of the kernels by sha256 of their cubins.
      device: name of the GPU.
    """
    runs = read(path)
    if new := {sha256[:DIGITS]: kernels[sha256] for sha256 in missing(path, kernels)}:
        runs.setdefault(f"{device}, {datetime.date.today().isoformat()}", {}).update(new)
    parts = []
    for name, passed in runs.items():
        by_name = sorted(passed.items(), key=lambda item: (item[1], item[0]))
        lines = ",\n".join(f" {json.dumps(digest)}: {json.dumps(x)}" for digest, x in by_name)
        parts.append(f"{json.dumps(name)}: {{\n{lines}\n}}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def missing(path: Path, sha256s: Iterable[str]) -> list[str]:
    """Returns those cubins that no recorded run has covered."""
    passed = {digest for run in read(path).values() for digest in run}
    return [sha256 for sha256 in sha256s if sha256[:DIGITS] not in passed]
