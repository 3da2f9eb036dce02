"""Kernels that convert B compile without a spill, to wgmma that reads it from registers.

Of all that run on a GPU as many are compiled as it takes for every pair of traits.
"""

from __future__ import annotations

import re

import pytest
from support import policies
from support.compiling import code_of, skip_without_compiler

from jax_hopper_gemm.gemm.dtypes import DTYPES
from jax_hopper_gemm.gemm.smem import SMEM_LIMIT

skip_without_compiler()

pytestmark = pytest.mark.compile

SPECS = policies.compiled_weights()
NAMES = {"bfloat16": ".BF16", "float16": ""}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_kernel_multiplies_what_it_converts_from_registers(spec, built):
    manifest, facts, text = code_of(spec, built)
    assert manifest.dynamic_smem_bytes <= SMEM_LIMIT

    multiplies = re.findall(r"\b(HGMMA\.[\w.]+) (R\d+), (\w+)", text)
    shape = f"HGMMA.64x{spec.tile_m}x16.F32{NAMES[spec.a_dtype]}"
    assert {name for name, _, _ in multiplies} == {shape}
    assert all(operand.startswith("R") for _, _, operand in multiplies), "B is not in registers"
    blocks = spec.converted_columns // 64
    assert len(multiplies) >= blocks * spec.tile_k // 16

    narrow = DTYPES[spec.b_dtype]
    by_ldmatrix = "LDSM.16.MT88" in text  # transposed: an epilogue's are not
    assert by_ldmatrix == (spec.b_major == "n"), f"{narrow.name} along {spec.b_major}"
    assert (facts.multicast_loads > 0) == (spec.cluster_m * spec.cluster_n > 1)
    by_tma = 2 + (spec.graph.accumulators - 1) - (spec.gathered is not None)
    assert facts.tma_loads >= by_tma + (spec.k_group > 0)
