"""Split-K and stream-K will need a first k-tile and a finish that the GPU decides: both compile."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.compiling import skip_without_compiler

from jax_hopper_gemm.cubin.sass import disassemble, parse_sass
from jax_hopper_gemm.gemm.legality import violations
from jax_hopper_gemm.gemm.spec import GemmSpec

skip_without_compiler()

pytestmark = pytest.mark.compile

DENSE = GemmSpec("bfloat16", "bfloat16", "bfloat16", "k", "n", 128, 128, epi_stages=2)
ROWS = replace(DENSE, grouped="m")
CONTRACTED = replace(DENSE, grouped="k", a_major="m")
SPECS = [
    replace(DENSE, cluster_m=2, warp_schedule="pingpong", tile_scheduler="dynamic"),
    replace(ROWS, cluster_m=2),
    replace(ROWS, gathered="a"),
    replace(CONTRACTED, gathered="b", num_stages=3),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_loads_may_begin_at_any_k_tile_and_some_ctas_store_nothing(spec, monkeypatch, tmp_path):
    assert violations(spec) == []
    kernels = pytest.importorskip("jax_hopper_gemm.kernels")
    from jax_hopper_gemm.kernels import finish, tile_coords

    class Parts(finish.NoFinish):
        def combine(self, acc, coords, warpgroup):
            acc[0] = acc[0] + 1.0
            return coords.k_first != 1

    coords_of = tile_coords.coords_of

    def some_of_k(spec, args, tile, cta):
        return coords_of(spec, args, tile, cta)._replace(k_first=cta.n + args.k_tiles % 3)

    whole = parse_sass(disassemble(kernels.compile_cubin(spec, tmp_path)))
    monkeypatch.setattr(tile_coords, "coords_of", some_of_k)
    monkeypatch.setitem(finish.FINISHES, "none", Parts)
    cubin = kernels.compile_cubin(spec, tmp_path)
    facts = parse_sass(disassemble(cubin))
    assert (facts.wgmma, facts.tma_loads) == (whole.wgmma, whole.tma_loads)
    assert facts.local_accesses == 0, "the kernel spills"
