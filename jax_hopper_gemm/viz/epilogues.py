"""An epilogue as text."""

from __future__ import annotations

from ..gemm.epilogue_graph import EpilogueGraph


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
