"""The table of transformations that are tested, as docs/transformations.md shows it.

    PYTHONPATH=tests python -m support.transformation_table docs/transformations.md

writes it anew, of what the tests of transformations run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from support.transformations import (
    COMBINATIONS,
    FUNCTIONS,
    LEFT_TO_XLA,
    TRANSFORMATIONS,
    covering_combinations,
)

COVERAGE = f"""\
With each change {len(covering_combinations())} of these {len(COMBINATIONS)} combinations run on the
CPU: each transformation on a dense and on a ragged product, on a plain one and on one with an
epilogue; each kind of transformation (derivative, map, checkpoint, control flow, way to run,
devices) on every function. `JAX_HOPPER_GEMM_TEST_ALL=1` runs all of them, as the tests for a GPU
do."""
BEGIN, END = "<!-- tested: begin -->", "<!-- tested: end -->"


def table() -> str:
    """Returns the table and its notes in Markdown."""
    notes = list(dict.fromkeys(LEFT_TO_XLA.values()))
    lines = ["| | " + " | ".join(f"`{name}`" for name in FUNCTIONS) + " |"]
    lines.append("|---" * (1 + len(FUNCTIONS)) + "|")
    for name, transformation in TRANSFORMATIONS.items():
        cells = [f"{name}"]
        for function in FUNCTIONS:
            reason = LEFT_TO_XLA.get((name, function))
            marks = ["C"]
            if transformation.lower and not reason:
                marks.append("K")
            if transformation.devices == 1:
                marks.append("G")
            cells.append(" ".join(marks) + (f" ({1 + notes.index(reason)})" if reason else ""))
        lines.append("| " + " | ".join(cells) + " |")
    numbered = [f"{i}. {note[0].upper()}{note[1:]}." for i, note in enumerate(notes, 1)]
    return "\n".join([*lines, "", *numbered, "", COVERAGE])


def with_table(text: str) -> str:
    """Returns a document with the table between its two marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_table(page.read_text()))
