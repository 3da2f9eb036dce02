"""Kernels that quantize compile without a spill, and divide and round as they should."""

from __future__ import annotations

import re

import pytest
from support import quantization
from support.compiling import skip_without_compiler
from support.covering import ALL, covering_subset
from support.policies import pairs_of

from jax_hopper_gemm import cubin
from jax_hopper_gemm.cubin.sass import disassemble, parse_sass
from jax_hopper_gemm.gemm.quantization import CELL, QuantizeSpec

skip_without_compiler()

pytestmark = pytest.mark.compile

ALL_SPECS = [x for x in quantization.specs() if isinstance(x, QuantizeSpec)]
SPECS = ALL_SPECS if ALL else covering_subset(ALL_SPECS, lambda spec: pairs_of(vars(spec)))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_kernel_compiles_without_a_spill(spec, built):
    assert spec not in built, built[spec]
    compiled = cubin.get(spec)
    text = disassemble(compiled.cubin)
    assert compiled.manifest.stack_bytes == parse_sass(text).local_accesses == 0, "it spills"
    assert compiled.manifest.registers <= (80 if spec.dtype != "float32" else 128)
    ways = sum(way > 0 for way in spec.ways)
    assert len(re.findall(r"\bF2FP\.SATFINITE", text)) == ways * CELL * CELL // 2
    assert len(re.findall(r"\bSTG\.E\.64", text)) == ways * CELL
    loads = CELL * (2 if spec.dtype == "float32" else 1)
    assert len(re.findall(r"\bLDG\.E\.128", text)) == loads
    assert not re.search(r"\bF(FMA|MUL)\.FTZ", text), "a quotient underflows"
