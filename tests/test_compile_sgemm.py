"""Kernels for FMA units compile to fused multiply-adds and asynchronous copies, without a spill."""

from __future__ import annotations

import re

import pytest
from support import sgemm
from support.compiling import code_of, skip_without_compiler

from jax_hopper_gemm.gemm import simt

skip_without_compiler()

pytestmark = pytest.mark.compile

SPECS = sgemm.kernels()[:8] + sgemm.kernels()[-3:]
ACCUMULATORS = simt.THREAD_M * simt.THREAD_N


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_kernel_compiles_to_chains(spec, built):
    *_, text = code_of(spec, built)
    assert len(re.findall(r"\bFFMA\b(?!\.FTZ)", text)) == ACCUMULATORS * spec.tile_k
    assert not re.search(r"\b(FMUL|FADD)\b|\.FTZ", text), "a product is rounded, or underflows"
    vectors = len(re.findall(r"\bLDS\.128", text))
    assert vectors == (spec.tile_k + 1) * (simt.THREAD_M + simt.THREAD_N) // simt.VECTOR
    wide = spec.simt_width == simt.VECTOR
    assert bool(re.search(r"STG\.E\.128", text)) == wide
    across = "k" != spec.a_major or "k" != spec.b_major
    assert bool(re.search(r"LDGSTS\.E\.BYPASS\.128", text)) == (wide and across)
    assert bool(re.search(r"LDGSTS\.E \[", text)) == (
        not wide or "k" in spec.a_major + spec.b_major
    )
