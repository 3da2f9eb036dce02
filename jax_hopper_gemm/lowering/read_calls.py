"""The launches in a program: which kernels it will ask for where it is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..launch import ffi_target


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
    for call in _calls(module, ffi_target.TARGET):
        config = call.attributes["mhlo.backend_config"]
        digest, spec, name = (config[field].value for field in ("digest", "spec", "name"))
        found.append(Launch(digest, spec, name, tuple(config["plan"])))
    return found


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
