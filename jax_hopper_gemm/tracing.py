"""Stand-in: enough of jaxpr -> graph to test the primitives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal

from .epilogue import EpilogueGraph, Node, Operand, Result


class NotFusable(ValueError):
    pass


@dataclass(frozen=True)
class Fusion:
    graph: EpilogueGraph
    operands: tuple[int, ...]
    labels: tuple[str, ...]
    results: tuple[tuple[str, ...], ...]
    uncovered: tuple[str, ...]
    finish: Callable


ELEMENTWISE = {
    "add": "add", "add_any": "add", "sub": "sub", "mul": "mul", "div": "div", "neg": "neg",
    "tanh": "tanh", "logistic": "logistic", "max": "max", "gt": "gt", "select_n": "select",
    "exp": "exp", "square": "square", "abs": "abs",
}  # fmt: skip


@dataclass
class V:
    number: Any  # of a node, ("op", i), or ("lit", value)
    axes: tuple
    rounded: str | None = None
    kind: str = "value"  # or "column_sum", "max", "stack"


def fuse(closed: ClosedJaxpr, num_accumulators: int, out: str, m: str, n: str, tile_limit=256):
    nodes: list = []
    seen: list = []
    letters: dict = {}
    operand_avals = [v.aval for v in closed.jaxpr.invars[num_accumulators:]]

    def emit(op, args, params=()):
        nodes.append((op, tuple(args), params))
        return ("node", len(nodes) - 1)

    def lit(value):
        return V(emit("constant", (), (float(value),)), ())

    def run(jaxpr, consts, args):
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(a):
            if isinstance(a, Literal):
                return lit(a.val)
            return env[a]

        for e in jaxpr.eqns:
            name = e.primitive.name
            ins = [read(a) for a in e.invars]
            if name in ("pjit", "jit", "custom_jvp_call", "closed_call"):
                inner = e.params.get("jaxpr", e.params.get("call_jaxpr"))
                outs = run(inner.jaxpr, inner.consts, ins)
            elif name == "convert_element_type":
                (x,) = ins
                new = e.params["new_dtype"].name
                if x.kind != "value":
                    outs = [V(x.number, x.axes, new, x.kind)]
                elif new != "float32":
                    outs = [V(x.number, x.axes, new)]
                elif x.rounded:
                    outs = [V(emit("convert", [x.number], (x.rounded,)), x.axes)]
                else:
                    outs = [x]
            elif name in ("copy", "stop_gradient", "pvary", "pcast"):
                outs = ins
            elif name == "broadcast_in_dim":
                (x,) = ins
                dims, shape = e.params["broadcast_dimensions"], e.params["shape"]
                axes = [None] * len(shape)
                for d, a in zip(dims, x.axes, strict=True):
                    axes[d] = a
                    if isinstance(a, tuple) and len(shape) == len(out):
                        letters[a] = out[d]
                if len(shape) == len(out):
                    axes = [
                        out[d] if a is not None or shape[d] > 1 else None
                        for d, a in enumerate(axes)
                    ]
                outs = [V(x.number, tuple(axes), x.rounded)]
            elif name == "reduce_sum":
                (x,) = ins
                reduced = "".join(x.axes[a] or "" for a in e.params["axes"])
                if set(reduced) != set(m):
                    raise NotFusable("a sum")
                rest = tuple(a for i, a in enumerate(x.axes) if i not in e.params["axes"])
                outs = [V(x.number, rest, None, "column_sum")]
            elif name == "reduce_max":
                outs = [V(ins[0].number, (), None, "max")]
            elif name == "integer_pow":
                number = emit("integer_pow", [ins[0].number], (e.params["y"],))
                outs = [V(number, ins[0].axes)]
            elif name == "concatenate":
                outs = [V([x.number for x in ins], (), ins[0].rounded, "stack")]
            elif name == "reshape":
                outs = [V(ins[0].number, (), ins[0].rounded, ins[0].kind)]
            elif name in ELEMENTWISE:
                args = ins
                if name == "select_n":
                    args = [ins[0], ins[2], ins[1]]
                axes = max((x.axes for x in args), key=len)
                for x in args:
                    for a, letter in zip(x.axes, out, strict=False):
                        if isinstance(a, tuple) and len(x.axes) == len(out):
                            letters[a] = letter
                outs = [V(emit(ELEMENTWISE[name], [x.number for x in args]), axes)]
            else:
                raise NotFusable(f"{name} is not covered")
            env.update(zip(e.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    args = [V(("acc", i), tuple(out)) for i in range(num_accumulators)]
    for i, aval in enumerate(operand_avals):
        axes = tuple((i, a) if x > 1 else None for a, x in enumerate(aval.shape))
        args.append(V(("op", i), axes))
    outs = run(closed.jaxpr, closed.consts, args)
    # number what is used
    stack = [v.number for v in outs]
    used: set = set()
    while stack:
        x = stack.pop()
        if isinstance(x, list):
            stack += x
        elif x not in used:
            used.add(x)
            if x[0] == "node":
                stack += nodes[x[1]][1]
    if not any(x[0] == "acc" for x in used):
        raise NotFusable("the function does not use the product")
    seen = [i for i in range(len(operand_avals)) if ("op", i) in used]
    labels, operands = [], []
    extents = dict(zip(out, closed.jaxpr.invars[0].aval.shape, strict=True))
    for i in seen:
        aval = operand_avals[i]
        if len(aval.shape) == len(out):
            for a, x in enumerate(aval.shape):
                if x > 1:
                    letters.setdefault((i, a), out[a])
        label = "".join(letters[i, a] for a, x in enumerate(aval.shape) if x > 1)
        labels.append(label)
        rows, cols = any(x in m for x in label), any(x in n for x in label)
        kind = {(0, 0): "scalar", (0, 1): "row", (1, 0): "column", (1, 1): "matrix"}[rows, cols]
        operands.append(Operand(kind, "float32" if kind == "scalar" else aval.dtype.name))
    numbering = {("acc", i): i for i in range(num_accumulators)}
    numbering |= {("op", i): num_accumulators + j for j, i in enumerate(seen)}
    final = []
    for i, (op, a, params) in enumerate(nodes):
        if ("node", i) in used:
            numbering["node", i] = num_accumulators + len(seen) + len(final)
            final.append(Node(op, tuple(numbering[x] for x in a), params))
    results: list = []
    order = []
    for j, v in enumerate(outs):
        if v.kind == "stack":
            dtype = v.rounded or "float32"
            first = [
                Result("matrix", numbering[x], dtype, plane=p, planes=2)
                for p, x in enumerate(v.number)
            ]
        else:
            kind = "matrix" if v.kind == "value" else v.kind
            dtype = (v.rounded or "float32") if kind == "matrix" else "float32"
            first = [Result(kind, numbering[v.number], dtype)]
        order.append((first[0].kind != "matrix", j, first, v))
    order.sort(key=lambda x: x[:2])
    where = {}
    for place, (_, j, first, v) in enumerate(order):
        where[j] = place
        results += first
    finals = [v.aval for v in closed.jaxpr.outvars]

    def finish(*arrays):
        return [
            arrays[where[j]].astype(a.dtype).reshape(a.shape) for j, a in enumerate(finals)
        ]

    del extents
    graph = EpilogueGraph(num_accumulators, tuple(operands), tuple(final), tuple(results))
    return Fusion(graph, tuple(seen), tuple(labels), (), (), finish)
