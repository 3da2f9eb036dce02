"""Tensor maps over grouped rows, which end a copy where a group ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..gemm.group_search import SPAN_EXTENT
from ..gemm.problem import GemmProblem
from ..gemm.raster import RasterOrder
from ..gemm.spec import GemmSpec
from ..launch.plan import TensorMap, make_plan
from .canvas import rectangle, subplots

ADDRESSES = 2**64


@dataclass(frozen=True)
class BoxRow:
    """A row of the box that one copy moves."""

    row: int  # its number in the box
    coordinates: tuple[int, int, int]  # in the map, but for the first, along the row
    inside: bool  # the map's extents; outside, loads give zeros, stores do nothing
    address: int  # the row of the array that they lead to


def span_map(problem: GemmProblem, spec: GemmSpec) -> TensorMap:
    """Returns the first map of a launch that ends copies where a group ends.

    It is the result's map if rows are grouped, A's map if K is.

    Raises:
      ValueError: the launch has no such map.
    """
    for param in make_plan(problem, spec, RasterOrder(), num_sms=132).params:
        if isinstance(param, TensorMap) and SPAN_EXTENT in param.dims:
            return param
    raise ValueError(f"no tensor map of {spec.name} ends where a span does")


def clipped_rows(span_map: TensorMap, first: int, end: int, rows: Iterable[int]) -> list[BoxRow]:
    """Returns rows of a box that begins at row `first` of the array, in a group that ends at `end`.

    Args:
      rows: numbers of rows in the box, from 0.
    """
    box_rows = []
    for row in rows:
        coordinates = (SPAN_EXTENT - (end - first) + row, end, SPAN_EXTENT)
        pairs = zip(coordinates, span_map.dims[1:], strict=True)
        inside = all(0 <= coordinate < extent for coordinate, extent in pairs)
        nbytes = sum(c * s for c, s in zip(coordinates, span_map.strides, strict=True)) % ADDRESSES
        box_rows.append(BoxRow(row, coordinates, inside, nbytes // span_map.strides[0]))
    return box_rows


def draw_clipped_rows(span_map: TensorMap, first: int, end: int, rows: Iterable[int]) -> Any:
    """Draws `clipped_rows` as a table, what the map clips hatched.

    The second and third coordinates are those of every row, so they are said once, on top.
    """
    box_rows = clipped_rows(span_map, first, end, rows)
    first_extent, *others = map(_by_extent, span_map.dims[1:])
    heads = (
        "row of the box", f"coordinate 1\nof extent {first_extent}", "row of the array that\n"
        "the coordinates lead to", "copied",
    )  # fmt: skip
    figure, axis = subplots(1, 1, (8.5, 1.3 + 0.32 * len(box_rows)))
    for y, row in enumerate(box_rows):
        colour, hatch = ("#95d5b2", None) if row.inside else ("white", "///")
        rectangle(axis, 0, y, len(heads), 1, facecolor=colour, edgecolor="#bbbbbb", hatch=hatch)
        copied = "yes" if row.inside else "no, clipped"
        texts = [str(row.row), _by_extent(row.coordinates[0]), str(row.address), copied]
        for x, text in enumerate(texts):
            axis.text(
                x + 0.5, y + 0.5, text, ha="center", va="center",
                bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.5},
            )  # fmt: skip
    axis.set_xlim(0, len(heads))
    axis.set_ylim(len(box_rows), 0)
    pairs = zip(map(_by_extent, box_rows[0].coordinates[1:]), others, strict=True)
    second, third = (f"{coordinate} of extent {extent}" for coordinate, extent in pairs)
    title = f"a group that ends at row {end}; coordinate 2: {second}; 3: {third}"
    axis.set_title(title, fontsize=9)
    axis.set_xticks([i + 0.5 for i in range(len(heads))], heads)
    axis.xaxis.tick_top()
    axis.set_yticks([])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    return figure


def _by_extent(value: int) -> str:
    """Returns a number as text; a number near `SPAN_EXTENT` by its distance from it."""
    distance = value - SPAN_EXTENT
    if abs(distance) >= SPAN_EXTENT // 2:
        return str(value)
    power = f"$2^{{{SPAN_EXTENT.bit_length() - 1}}}$"
    return power if distance == 0 else f"{power} {'+' if distance > 0 else '−'} {abs(distance)}"
