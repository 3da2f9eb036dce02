"""Stand-in: a graph's values, by a few operations."""

import cutlass.cute as cute
from cutlass import Float32

OPERATIONS = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "max": cute.arch.fmax,
    "neg": lambda x: -x,
    "tanh": lambda x: cute.math.tanh(x, fastmath=True),
    "exp": lambda x: cute.math.exp(x, fastmath=True),
}


class Elements:
    def __init__(self, graph, read, row_of, column_of):
        self.graph, self.read, self.known = graph, read, {}

    def value(self, number, v):
        if (number, v) not in self.known:
            node = self.graph.node(number)
            if node is None or node.op.startswith("row_"):
                found = self.read(number, v)
            elif node.op == "constant":
                found = Float32(node.params[0])
            else:
                found = OPERATIONS[node.op](*(self.value(a, v) for a in node.args))
            self.known[number, v] = found
        return self.known[number, v]
