"""Kernels of float32 operands as they are compile without a spill, to TF32 instructions."""

from __future__ import annotations

import re

import pytest
from support.compiling import code_of, skip_without_compiler
from support.policies import tf32_specs

from jax_hopper_gemm.dispatch import H200, choose
from jax_hopper_gemm.gemm.problem import GemmProblem

skip_without_compiler()

pytestmark = pytest.mark.compile

LARGE = GemmProblem.dense(4096, 4096, 4096, b_major="k", dtype="float32")
SPECS = [choose(LARGE, H200, kernel_only=True).spec, *tf32_specs()[:: len(tf32_specs()) // 8]]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_kernel_compiles_to_tf32(spec, built):
    *_, text = code_of(spec, built)
    assert set(re.findall(r"HGMMA\.(\S+) ", text)) == {f"64x{spec.tile_n}x8.F32.TF32"}
