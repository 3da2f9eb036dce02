"""Cubins made by hand, for tests that need no compiler: ELF files with a kernel's attributes.

They hold what the toolkits write and nothing that runs.
"""

from __future__ import annotations

import struct
import subprocess
import sys
import textwrap
from pathlib import Path

from jax_hopper_gemm.cubin.manifest import Manifest, derive_manifest
from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph, Node, Operand, Result
from jax_hopper_gemm.gemm.kernel_params import param_list
from jax_hopper_gemm.gemm.spec import GemmSpec

SPEC = GemmSpec("bfloat16", "bfloat16", "bfloat16", "k", "n", 128, 128)
OTHER_VALUES = {  # for each field of a spec, one that SPEC does not have
    "a_dtype": "float16", "b_dtype": "float16", "d_dtype": "float32",
    "a_major": "m", "b_major": "k", "tile_m": 64, "tile_n": 192, "tile_k": 128, "cluster_m": 2,
    "cluster_n": 2, "warp_schedule": "pingpong", "tile_scheduler": "dynamic", "num_stages": 5,
    "epi_tile_n": 64, "epi_stages": 2, "epi_load_stages": 2, "grouped": "m", "gathered": "a",
    "indexed": "a", "nested": True, "short_boxes": True, "evict_first": "b", "split_k": True,
    "cluster_k": 2,
    "promoted": True, "a_block": 1, "b_block": 128, "bf16_terms": 3, "k_group": 128,
    "simt_width": 4, "d_major": "m", "loose_d": True, "panels": 2,
    "epilogue": EpilogueGraph(
        operands=(Operand("row", "float32"),), nodes=(Node("add", (0, 1)),),
        results=(Result("matrix", 2, "bfloat16"),),
    ),
}  # fmt: skip


def places_of(spec: GemmSpec) -> tuple[tuple[int, int], ...]:
    """Returns (offset, size) of each parameter of `spec`'s kernel, one behind the other."""
    offset, places = 48, []
    for param in param_list(spec):
        offset += -offset % min(param.nbytes, 8)
        places.append((offset, param.nbytes))
        offset += param.nbytes
    return tuple(places)


PLACES = places_of(SPEC)


def sample_cubin(
    *,
    entry: str = "kernel",
    kernels: int = 1,
    sm: int = 90,
    abi_version: int = 7,
    api_version: int = 129,
    places: tuple[tuple[int, int], ...] = PLACES,
    threads: int = SPEC.threads,
    registers: int = 168,
    stack_bytes: int = 0,
    code: bytes = b"\0" * 64,
) -> bytes:
    """Returns an ELF file that says these things of its kernel."""
    symbol = 7

    def attribute(number: int, payload: bytes) -> bytes:
        return struct.pack("<BBH", 4, number, len(payload)) + payload

    def parameter(ordinal: int, offset: int, size: int) -> bytes:
        return attribute(0x17, struct.pack("<IHHI", 0, ordinal, offset, size << 18 | 0x1F000))

    of_module = attribute(0x2F, struct.pack("<II", symbol, registers))
    of_module += attribute(0x11, struct.pack("<II", symbol, stack_bytes))
    of_kernel = attribute(0x37, struct.pack("<I", api_version))
    for ordinal, place in reversed(list(enumerate(places))):  # the order that ptxas writes
        of_kernel += parameter(ordinal, *place)
    of_kernel += struct.pack("<BBH", 3, 0x1B, 255)  # a short attribute: no payload follows
    of_kernel += attribute(0x10, struct.pack("<3I", threads, 1, 1))

    sections = [(".nv.info", of_module, 0)]
    for index in range(kernels):
        name = entry if index == 0 else f"{entry}{index}"
        sections += [(f".nv.info.{name}", of_kernel, 0), (f".text.{name}", code, 8 << 24 | symbol)]
    return _elf(sections, abi_version, sm if abi_version < 8 else sm << 8)


def _elf(sections: list[tuple[str, bytes, int]], abi_version: int, flags: int) -> bytes:
    """Returns an ELF64 file; each section is (name, content, info)."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name, _, _ in sections) + b".shstrtab\0"
    body, headers = b"", [bytes(64)]
    for name, content, info in [*sections, (".shstrtab", names, 0)]:
        place = 64 + len(body)
        fields = (names.index(name.encode() + b"\0"), 1, 0, 0, place, len(content), 0, info, 1, 0)
        headers.append(struct.pack("<2I4Q2I2Q", *fields))
        body += content
    ident = b"\x7fELF\x02\x01\x01\x33" + bytes([abi_version]) + bytes(7)
    head = struct.pack("<2HI3QI6H", 2, 190, 1, 0, 0, 64 + len(body), flags, 64, 0, 0, 64,
                       len(headers), len(headers) - 1)  # fmt: skip
    return ident + head + body + b"".join(headers)


def sample_manifest(spec: GemmSpec = SPEC, cubin: bytes | None = None) -> Manifest:
    cubin = cubin or sample_cubin(threads=spec.threads, places=places_of(spec))
    return derive_manifest(spec, cubin)


# Stands in for kernels/, so that a test sees each compile and needs no compiler. `COMPILES` is a
# file that gets a line for each.
FAKE_COMPILER = """
    import os, sys, time, types
    from support.cubin_samples import places_of, sample_cubin
    from jax_hopper_gemm.cubin import compiler

    def compile_cubin(spec, workdir):
        assert workdir.is_dir()
        with open(os.environ["COMPILES"], "a") as file:
            file.write(spec.name + "\\n")
        time.sleep(float(os.environ.get("COMPILE_SECONDS", 0)))
        return sample_cubin(entry=spec.name, threads=spec.threads, places=places_of(spec))

    fake = types.ModuleType("jax_hopper_gemm.kernels")
    fake.compile_cubin = compile_cubin
    sys.modules["jax_hopper_gemm.kernels"] = fake
    compiler.require_compiler = lambda: None
"""

# Makes a module look as if it were not installed.
HIDE_CUTLASS = """
    import sys
    sys.modules["cutlass"] = None
    sys.modules["jax_hopper_gemm.kernels"] = None
"""


def start_python(source: str, **environment: str) -> subprocess.Popen:
    """Starts `source` in a fresh process that can import the package and this module."""
    tests = Path(__file__).resolve().parents[1]
    paths = {"PYTHONPATH": f"{tests.parent}:{tests}", "PATH": "/usr/bin:/bin"}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source)],
        env=paths | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_python(source: str, **environment: str) -> str:
    """Returns what `source` prints; fails where it raises."""
    process = start_python(source, **environment)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out
