"""Kernels of bfloat16 parts compile without a spill, to instructions that read A in registers."""

from __future__ import annotations

import re

import pytest
from support import float32
from support.compiling import code_of, skip_without_compiler
from support.policies import parts_specs

skip_without_compiler()

pytestmark = pytest.mark.compile

LARGE = [spec for spec, _ in float32.long_cases() if spec.bf16_terms < 9]
SPECS = [*LARGE, *parts_specs()[:: len(parts_specs()) // 9]]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_kernel_compiles_to_products_of_parts(spec, built):
    _, facts, text = code_of(spec, built)
    products = re.findall(r"HGMMA\.(\S+) R\d+, R\d+, gdesc", text)  # A is in registers
    assert set(products) == {f"64x{spec.tile_n}x16.F32.BF16"}
    assert len(products) == facts.wgmma == 2 * spec.bf16_terms
    assert not re.search(r"\bF2F\.BF16", text), "numbers are rounded one by one"
    loads = set(re.findall(r"\bLDS\.?(\d*)", text))
    assert "128" in loads
