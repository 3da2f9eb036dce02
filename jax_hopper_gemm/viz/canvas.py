"""Helpers of all drawings: figures, cells of a matrix, colours."""

from __future__ import annotations

from typing import Any


def subplots(rows: int, columns: int, size: tuple[float, float], **options: Any) -> Any:
    try:
        from matplotlib import pyplot
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "jax_hopper_gemm.viz draws with matplotlib, which is not installed: "
            'python -m pip install "jax-hopper-gemm[notebooks]"'
        ) from error
    return pyplot.subplots(rows, columns, figsize=size, layout="constrained", **options)


def rectangle(axis: Any, x: float, y: float, width: float, height: float, **style: Any) -> None:
    from matplotlib.patches import Rectangle

    axis.add_patch(Rectangle((x, y), width, height, **style))


def cell(axis: Any, x: float, y: float, colour: Any, text: str = "", bold: bool = False) -> None:
    edge, line = ("#d62828", 2.5) if bold else ("white", 0.6)
    rectangle(axis, x, y, 1, 1, facecolor=colour, edgecolor=edge, linewidth=line, zorder=1 + bold)
    if text:
        axis.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=7, zorder=3)


def frame(axis: Any, columns: int, rows: int, aspect: Any = "equal") -> None:
    """Prepares an axis for a matrix of `rows` x `columns` cells, row 0 on top."""
    axis.set_xlim(0, columns)
    axis.set_ylim(rows, 0)
    axis.set_aspect(aspect)
    axis.set_xticks(range(0, columns + 1, 8))
    axis.set_yticks(range(0, rows + 1, 8 if rows > 8 else 1))
    axis.spines[:].set_visible(False)


def plain_colour(index: int) -> Any:
    """Returns a light colour, one for each of eight numbers."""
    from matplotlib import colormaps

    return (*colormaps["Set2"](index % 8)[:3], 0.7)
