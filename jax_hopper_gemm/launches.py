"""The launches in a program: which kernels it will ask for where it is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax import export
from jax.extend.mlir import ir
from jax.interpreters import mlir

from . import lowering, partitioning


@dataclass(frozen=True)
class Launch:
    """The attributes of one FFI call.

    Attributes:
      digest: of the kernel, when the program was lowered.
      spec: `GemmSpec.to_json()` of that version.
      name: what errors call it.
      plan: the encoded `LaunchPlan`.
    """

    digest: str
    spec: str
    name: str
    plan: tuple[int, ...]


def launches_in(module: Any) -> list[Launch]:
    """Returns the launches of a StableHLO module, in its order."""
    found = []
    for call in _calls(module, lowering.TARGET):
        config = call.attributes["mhlo.backend_config"]
        digest, spec, name = (config[field].value for field in ("digest", "spec", "name"))
        found.append(Launch(digest, spec, name, tuple(config["plan"])))
    return found


def launches_of(exported: export.Exported) -> list[Launch]:
    """Returns the launches of an exported program, without those of its derivatives.

    Raises:
      ValueError: XLA will partition products of it over devices; only then it is known which
        kernels run.
    """
    with mlir.make_ir_context():
        module = ir.Module.parse(exported.mlir_module())
        if list(_calls(module, partitioning.TARGET)):
            raise ValueError(
                f"{exported.fun_name} is partitioned over {exported.nr_devices} devices where it "
                "is loaded, and its kernels are chosen there"
            )
        return launches_in(module)


def stored_programs(content: bytes) -> list[export.Exported]:
    """Returns the programs in what `Exported.serialize` wrote: a function, then its derivatives."""
    programs = [export.deserialize(bytearray(content))]
    while programs[-1].has_vjp():
        programs.append(programs[-1].vjp())
    return programs


def _calls(module: Any, target: str) -> Iterator[Any]:
    """Yields the custom calls of `target`."""
    for operation in _operations(module.operation):
        if operation.name == "stablehlo.custom_call":
            if operation.attributes["call_target_name"].value == target:
                yield operation


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _operations(inner.operation)
