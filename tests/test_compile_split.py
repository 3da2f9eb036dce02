"""The machine code of kernels whose clusters, or their CTAs, share the k-tiles of a tile."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.compiling import code_of, skip_without_compiler
from support.policies import compiled_specs

from jax_hopper_gemm.gemm.legality import MATH_REGISTERS, OTHER_REGISTERS
from jax_hopper_gemm.gemm.spec import GemmSpec

skip_without_compiler()

pytestmark = pytest.mark.compile

LARGE = GemmSpec("bfloat16", "bfloat16", "bfloat16", "k", "n", 128, 256, epi_stages=2)
SPLIT = [
    replace(LARGE, split_k=True, cluster_m=2),
    replace(LARGE, split_k=True, tile_n=128, warp_schedule="pingpong"),
    *[spec for spec in compiled_specs() if spec.split_k][::2],
]
SHARED = [spec for spec in compiled_specs() if spec.cluster_k > 1]
WHOLE = {spec: replace(spec, split_k=False) for spec in SPLIT}
SPECS = [*WHOLE, *WHOLE.values(), *SHARED]


@pytest.mark.parametrize("spec", SPLIT, ids=lambda spec: spec.name)
def test_partial_sums_travel_in_vectors_and_wgmma_waits_for_nothing_more(spec, built):
    (_, facts, split), (_, of_whole, whole) = (code_of(x, built) for x in (spec, WHOLE[spec]))
    assert (facts.wgmma, facts.tma_loads) == (of_whole.wgmma, of_whole.tma_loads)
    assert waits(split) == waits(whole), "of a divergent loop ptxas makes a wait for each wgmma"
    vectors = spec.tile_registers // 4
    assert len(re.findall(r"\bSTG\.E\.128", split)) - len(re.findall(r"\bSTG\.E\.128", whole)) == (
        vectors
    )
    free = MATH_REGISTERS[spec.math_warpgroups] - OTHER_REGISTERS
    runs_ahead = 3 * spec.tile_registers <= free  # then a slot is loaded ahead of the loop, too
    assert len(re.findall(r"\bLDG\.E\.128", split)) == vectors * (1 + runs_ahead)
    assert "MEMBAR.ALL.GPU" in split
    assert len(re.findall(r"\bSTG\.E\.64\.STRONG\.GPU", split)) == 1, "one release of a flag"
    assert len(re.findall(r"\bLDG\.E\.64\.STRONG\.GPU", split)) == 1, "one wait for it"


@pytest.mark.parametrize("spec", SHARED, ids=lambda spec: spec.name)
def test_sums_of_a_cluster_stay_in_shared_memory(spec, built):
    *_, code = code_of(spec, built)
    assert len(re.findall(r"\bSTAS\.128", code)) == spec.tile_registers // 4, "a CTA sends its sums"
    of_slice = spec.tile_registers // spec.slices // 4
    assert len(re.findall(r"\bLDS\.128", code)) == spec.cluster_k * of_slice, "and reads a slice"
    assert len(re.findall(r"\bUCGABAR_ARV", code)) == 1, "barriers are made before any CTA sends"
    assert "MEMBAR.ALL.GPU" not in code


def waits(code: str) -> int:
    """Returns the instructions that wait for wgmma."""
    return len(re.findall(r"\bWARPGROUP\.DEPBAR", code))
