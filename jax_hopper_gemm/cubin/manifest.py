"""The manifest of a cubin: what must hold between kernel, launcher and device.

It is derived from the machine code when a kernel is compiled, travels beside the cubin, and is
compared with what the driver reports when the kernel is loaded.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from ..gemm.kernel_params import KernelParam, KernelSpec, param_list, spec_from_json
from .digest import TARGET, CubinError
from .elf import KernelCode, read_kernel


class Parameter(NamedTuple):
    """A kernel parameter: its name in `gemm/kernel_params.py`, its place in the constant bank."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class Manifest:
    """Facts of one compiled kernel."""

    spec: str  # JSON of the `KernelSpec`
    entry: str  # symbol of the kernel
    target: str  # architecture
    toolkit: tuple[int, int]  # of CUDA; a driver of an older major version may refuse it
    parameters: tuple[Parameter, ...]  # in the kernel's order
    threads: int  # threads of a block
    cluster: tuple[int, int, int]  # CTAs along x, y, z; set by the launch, so from the spec
    registers: int  # registers of a thread at launch
    stack_bytes: int  # local memory of a thread; 0 where nothing spills
    static_smem_bytes: int  # shared memory set aside by the compiler
    dynamic_smem_bytes: int  # that the launch asks for, as the spec says
    cubin_sha256: str  # digest of the cubin's bytes

    @property
    def name(self) -> str:
        """The spec's name, as a person knows the kernel; its symbol, where this version of the
        library cannot read the spec."""
        try:
            return spec_from_json(self.spec).name
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return self.entry

    def is_of(self, spec_json: str) -> bool:
        """Whether the kernel was compiled from this spec; not, where the text is no JSON."""
        try:
            return _canonical(self.spec) == _canonical(spec_json)
        except (ValueError, TypeError, RecursionError):
            return False

    def to_json(self) -> str:
        return as_text(asdict(self) | {"parameters": [p._asdict() for p in self.parameters]})

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Returns the manifest; fields that another version of the library added are left out.

        NOTE: a field added here needs a default: kernels of earlier versions must load.
        """
        entry = json.loads(text)
        values = {field.name: entry[field.name] for field in fields(cls) if field.name in entry}
        values["toolkit"] = tuple(values["toolkit"])
        values["cluster"] = tuple(values["cluster"])
        values["parameters"] = tuple(
            Parameter(p["name"], p["offset"], p["size"]) for p in values["parameters"]
        )
        return cls(**values)


def as_text(manifest: dict[str, Any]) -> str:
    """Returns the text of a manifest's fields, of which checksums are made."""
    return json.dumps(manifest, indent=2, sort_keys=True)


def _canonical(text: str) -> str:
    """Returns JSON as text: parsed, a NaN would differ from itself, and 0.0 not from -0.0."""
    return json.dumps(json.loads(text), sort_keys=True)


def derive_manifest(spec: KernelSpec, cubin: bytes) -> Manifest:
    """Returns the manifest of a cubin that was compiled from `spec`, read from its code.

    Raises:
      CubinError: the code does not fit `spec`; all differences in one message.
    """
    code = read_kernel(cubin)
    params = param_list(spec)
    if differences := _differences(spec, code, params):
        raise CubinError(f"{spec.name}: the compiled kernel differs: " + "; ".join(differences))
    return Manifest(
        spec=spec.to_json(),
        entry=code.entry,
        target=TARGET,
        toolkit=code.toolkit,
        parameters=tuple(
            Parameter(param.name, *place)
            for param, place in zip(params, code.parameters, strict=True)
        ),
        threads=code.threads,
        cluster=(spec.cluster_m, spec.cluster_n, spec.cluster_k),
        registers=code.registers,
        stack_bytes=code.stack_bytes,
        static_smem_bytes=code.static_smem_bytes,
        dynamic_smem_bytes=spec.smem_bytes,
        cubin_sha256=hashlib.sha256(cubin).hexdigest(),
    )


def _differences(spec: KernelSpec, code: KernelCode, params: tuple[KernelParam, ...]) -> list[str]:
    differences = []
    if TARGET != f"sm_{code.sm}a":
        differences.append(f"it is for sm_{code.sm}, not {TARGET}")
    if code.threads != spec.threads:
        differences.append(f"a block has {code.threads} threads, the spec {spec.threads}")
    sizes = [size for _, size in code.parameters]
    if sizes != [param.nbytes for param in params]:
        meant = ", ".join(f"{param.name} {param.nbytes}" for param in params)
        differences.append(f"its parameters have {sizes} bytes, expected {meant}")
    return differences
