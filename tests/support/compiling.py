"""For the modules of tests that compile kernels."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import pytest

from jax_hopper_gemm import cubin
from jax_hopper_gemm.cubin import CubinError, compiler
from jax_hopper_gemm.cubin.manifest import Manifest
from jax_hopper_gemm.cubin.sass import SassFacts, disassemble, find_nvdisasm, parse_sass
from jax_hopper_gemm.gemm.spec import GemmSpec


def skip_without_compiler() -> None:
    """Skips the module that calls it where its kernels could not be compiled or read."""
    try:
        compiler.require_compiler()
        find_nvdisasm()
    except CubinError as error:
        pytest.skip(str(error), allow_module_level=True)


class Code(NamedTuple):
    """What a test reads of a compiled kernel."""

    manifest: Manifest
    facts: SassFacts
    text: str  # as nvdisasm prints it


def code_of(spec: GemmSpec, failures: Mapping[GemmSpec, str]) -> Code:
    """Returns a kernel's code, having checked that it compiled and does not spill.

    Args:
      failures: the fixture `built`.
    """
    assert spec not in failures, failures[spec]
    code = _code_of(spec)
    assert code.manifest.stack_bytes == code.facts.local_accesses == 0, "the kernel spills"
    return code


@cache
def _code_of(spec: GemmSpec) -> Code:
    compiled = cubin.get(spec)
    text = disassemble(compiled.cubin)
    return Code(compiled.manifest, parse_sass(text), text)
