"""Draws docs/pictures/ from the figures that the documents record: python docs/pictures.py

Each picture is a bar chart of ratios, theirs over ours, read from a table of README.md or of
docs/performance.md. A bar is as long as its ratio; a line marks 1, where both take equally long.
Pictures are plain SVG, the same on every machine, so a test compares them with the tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
Bars = list[tuple[str, float, str]]  # label, ratio, what is written behind the bar

STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1f2328}.t{font-weight:600;font-size:15px}"
    ".b{fill:#fff}.n{fill:#59636e}.f{fill:#12897b}.s{fill:#c4693d}"
    ".one{stroke:#59636e;stroke-dasharray:3 3}"
    "@media (prefers-color-scheme:dark){.b{fill:#0d1117}text{fill:#e6edf3}"
    ".n{fill:#9198a1}.f{fill:#2bb5a3}}"
)
PLOT, SIDE, ROW, LETTER = 300, 200, 24, 7  # pixels: of bars, behind them, of a line, of a letter


def table(document: str, head: str) -> list[list[str]]:
    """Returns the cells of the rows of the first table whose head begins so."""
    lines = (ROOT / document).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(head))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("*") for cell in line.strip("|").split("|")])
    return rows


def number(text: str) -> float:
    return float(re.findall(r"[\d.]+", text)[-1])


def first_screen() -> Bars:
    rows = table("README.md", "| On one H200")
    return [
        (re.sub(r"\s*\(`.*|`", "", name), number(ratio), f"{ours}, {theirs}")
        for name, ours, theirs, ratio in rows
    ]


def dense() -> Bars:
    rows = table("docs/performance.md", "| M x N x K | stored | hopper | auto | XLA | Pallas")
    cases = [row for row in rows if row[1]]
    return [(f"{m}, {s}", number(auto), f"{us} us") for m, s, _, us, _, _, _, auto in cases]


def few_rows() -> Bars:
    rows = table("docs/performance.md", "| rows | N 4096, K 4096: KN")
    names = "N 4096, K 4096", "N 4096, K 14336", "N 28672, K 8192", "N 8192, K 28672"
    return [
        (f"{row[0]} rows, {name}", number(cell), cell.split(" / ")[0] + " us")
        for row in rows
        if row[0] in ("1", "16", "64")
        for name, cell in zip(names, row[1::2], strict=True)
    ]


def epilogues() -> Bars:
    rows = table("docs/performance.md", "| Epilogue | 8192 x 14336 x 4096: ours")
    return [(row[0], number(row[3]), f"{row[1]} us") for row in rows]


def grouped() -> Bars:
    rows = table("docs/performance.md", "| | ours | Pallas `ragged_dot_mgpu`")
    bars, model = [], ""
    for name, ours, pallas, tokamax in rows:
        model = name.split(",")[0] if "," in name else model
        what = name.split(", ")[-1]
        for other, us in (("Pallas", pallas), ("tokamax", tokamax)):
            bars.append((f"{model}, {what}: {other}", number(us) / number(ours), f"{ours} us"))
    return bars


def models() -> Bars:
    rows = table("docs/performance.md", "| | XLA | `accelerate` | XLA /")
    return [(name, number(ratio), f"{ours} ms") for name, _, ours, ratio in rows]


PICTURES: dict[str, tuple[str, Callable[[], Bars]]] = {
    "first_screen": ("How many times as fast, one H200 (time of theirs / ours)", first_screen),
    "dense": ("Dense GEMM, burst: XLA's time / the default's", dense),
    "few_rows": ("Few rows, burst: XLA's time / ours; B stored (K, N)", few_rows),
    "epilogues": ("Epilogues, 8192 x 14336 x 4096, burst: XLA's time / ours", epilogues),
    "grouped": ("Grouped GEMM, uneven sizes, burst: their time / ours", grouped),
    "models": ("Models by accelerate: XLA's time / ours", models),
}


def drawn(title: str, bars: Sequence[tuple[str, float, str]]) -> str:
    """Returns the SVG of a bar chart."""
    longest = max(ratio for _, ratio, _ in bars)
    scale = PLOT / max(longest, 1.2)
    left = 16 + LETTER * max(len(label) for label, _, _ in bars)
    width, height = left + PLOT + SIDE, 40 + ROW * len(bars) + 12
    one = left + scale
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'role="img"><title>{escape(title)}</title><style>{STYLE}</style>',
        f'<rect class="b" width="{width}" height="{height}" rx="6"/>',
        f'<text class="t" x="8" y="20">{escape(title)}</text>',
    ]
    for i, (label, ratio, note) in enumerate(bars):
        y = 36 + ROW * i
        kind = "f" if ratio >= 0.995 else "s"
        end = left + scale * ratio
        lines += [
            f'<text x="{left - 8}" y="{y + 16}" text-anchor="end">{escape(label)}</text>',
            f'<rect class="{kind}" x="{left}" y="{y + 3}" width="{end - left:.1f}" '
            f'height="{ROW - 7}"/>',
            f'<text x="{end + 6:.1f}" y="{y + 16}">{ratio:.3g} x'
            f'<tspan class="n" dx="10">{escape(note)}</tspan></text>',
        ]
    lines.append(f'<line class="one" x1="{one:.1f}" y1="32" x2="{one:.1f}" y2="{height - 8}"/>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def pictures() -> dict[str, str]:
    return {name: drawn(title, bars()) for name, (title, bars) in PICTURES.items()}


if __name__ == "__main__":
    for name, text in pictures().items():
        (FOLDER / f"{name}.svg").write_text(text)
