"""The operations of a lowered program that its results depend on, and the launches among them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from support.program_inspection import attributes

from jax_hopper_gemm.gemm.spec import GemmSpec


@dataclass(frozen=True)
class Operation:
    name: str
    operands: tuple[str, ...]
    text: str


def reachable(program: str) -> list[Operation]:
    """Returns the operations of a program that its results depend on."""
    body = program.split("func.func public @main")[1].split("\n  }")[0]
    operations: dict[str, Operation] = {}
    for line in body.splitlines():
        if found := re.match(r"\s*(%\w+)(?::\d+)? = \"?([\w.]+)\"?(.*)", line):
            name, operation, rest = found.groups()
            operations[name] = Operation(operation, tuple(re.findall(r"%\w+", rest)), line)
    (results,) = re.findall(r"\n\s*return (.*) :", body)
    waiting, found = re.findall(r"%\w+", results), {}
    while waiting:
        name = waiting.pop()
        if name in operations and name not in found:
            found[name] = operations[name]
            waiting += operations[name].operands
    return [operations[name] for name in operations if name in found]


def launches(program: str) -> list[GemmSpec]:
    operations = [o for o in reachable(program) if "jax_hopper_gemm.v1.launch" in o.text]
    return [GemmSpec.from_json(attributes(o.text, "spec")[0]) for o in operations]


def results(spec: GemmSpec) -> list[str]:
    return [f"{r.kind} {r.dtype}" if r.kind == "matrix" else r.kind for r in spec.graph.results]


def on_matrices(program: str, elements: int = 512 * 256) -> list[str]:
    """Returns names of operations other than launches that write at least so many elements.

    XLA computes a conversion within the reduction that alone reads it.
    """
    found, operations = [], reachable(program)
    for operation in operations:
        (name,) = re.findall(r"(%\w+)(?::\d+)? =", operation.text)
        readers = {o.name for o in operations if name in o.operands}
        if operation.name == "stablehlo.convert" and readers == {"stablehlo.reduce"}:
            continue
        types = re.findall(r"tensor<([\dx]+)x\w+>", operation.text.split("->")[-1].split(" : ")[-1])
        sizes = [eval(t.replace("x", "*")) for t in types]  # noqa: S307
        if "launch" not in operation.text and max(sizes, default=0) >= elements:
            found.append(operation.name)
    return found
