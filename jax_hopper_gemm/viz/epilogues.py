"""An epilogue as text, and measurements of its tiles."""

from __future__ import annotations

from typing import Any

from ..gemm.epilogue_graph import EpilogueGraph
from .canvas import TILE_COLOURS, subplots
from .fragments import ROWS


def graph_lines(graph: EpilogueGraph) -> list[str]:
    """Returns an epilogue as text: each numbered value, then the results."""
    lines = [f"v{i} = accumulator" for i in range(graph.accumulators)]
    for value in range(graph.accumulators, graph.num_values):
        if operand := graph.operand(value):
            lines.append(f"v{value} = {operand.kind} operand, {operand.dtype}")
        elif node := graph.node(value):
            arguments = [f"v{argument}" for argument in node.args] + list(map(str, node.params))
            lines.append(f"v{value} = {node.op}({', '.join(arguments)})")
    lines += [f"result: {r.kind} of v{r.value}, {r.dtype}" for r in graph.results]
    return lines


def draw_epilogue_tiles(record: dict[str, Any]) -> Any:
    """Draws recorded times over tile scheduler and epilogue tile, one panel a cluster shape.

    The record of an H200 is `benchmarks/data/h200_epilogue_tiles.json`.
    """
    rows = record["rows"]
    clusters = list(dict.fromkeys(tuple(row["cluster"]) for row in rows))
    schedulers = list(dict.fromkeys(row["scheduler"] for row in rows))
    tiles = list(dict.fromkeys((row["epi_tile_n"], row["epi_stages"]) for row in rows))
    figure, axes = subplots(1, len(clusters), (12, 4), squeeze=False, sharey=True)
    for axis, cluster in zip(axes[0], clusters, strict=True):
        for i, (columns, stages) in enumerate(tiles):
            points = [
                (schedulers.index(row["scheduler"]) + 0.2 * (i - 1), row["us"])
                for row in rows
                if tuple(row["cluster"]) == cluster and row["epi_tile_n"] == columns
            ]
            label = f"{ROWS} x {columns}, {stages} stages"
            axis.plot(*zip(*points, strict=True), "o", color=TILE_COLOURS[i], label=label)
        axis.axhline(record["xla_us"], color="black", linestyle="--", label="XLA")
        axis.set_xticks(range(len(schedulers)), schedulers)
        axis.set_title(f"cluster {cluster[0]}x{cluster[1]}")
        axis.grid(axis="y", alpha=0.4)
    axes[0, 0].set_ylabel("us")
    axes[0, -1].legend()
    figure.suptitle(f"measured on {record['environment']['device']}")
    return figure
