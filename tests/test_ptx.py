"""The interpreter of PTX, and kernels of each kind that it runs in place of a GPU."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from support import cases, counters, cutting, outcome, panels, policies, random_operands
from support.compiling import skip_without_compiler
from support.ptx import arithmetic, quantization
from support.ptx.gpu import PtxGpu, kernel_of, ptx_of
from support.ptx.machine import Launch
from support.ptx.memory import GlobalMemory
from support.ptx.parse import PtxError
from support.quantization import Case

from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec

skip_without_compiler()

pytestmark = pytest.mark.compile

SMS = 4  # so that a persistent grid wraps around


def first(specs: Any, **wanted: object) -> GemmSpec:
    """Returns the first of specs whose fields have these values."""
    return next(s for s in specs if all(getattr(s, k) == v for k, v in wanted.items()))


PLAIN = first(policies.covering_specs(), tile_m=64, tile_n=112, warp_schedule="pingpong")
LOOSE = first(policies.loose_specs(), tile_n=16, cluster_n=2, tile_scheduler="static")
SCALED = [
    *(
        first(policies.block_specs(), tile_m=64, grouped=None, a_block=a_block, b_block=b_block)
        for a_block, b_block in ((1, 1), (1, 128), (128, 128))
    ),
    first(policies.block_specs(), k_in_turns=True, a_block=1, tile_scheduler="static"),
    first(policies.converted_specs(), k_in_turns=True, k_group=32),
]
# Of eight CTAs three store a slice of the first one's tiles; the second one has an epilogue; the
# last one converts B, and one CTA of each cluster stores.
ALONG_K = [
    first(policies.cluster_k_specs(), tile_m=64, tile_n=48, cluster_k=8),
    next(s for s in policies.cluster_k_specs() if s.graph.loaded and s.tile_m == 64),
    first(policies.converted_variants(), cluster_k=4, k_in_turns=True, k_group=0),
]
IN_TURNS = first(policies.block_specs(), k_in_turns=True, a_block=0, cluster_size=1)


def check(spec: GemmSpec, number: int = 1, edit: Any = lambda text: text) -> None:
    problem, raster_order = cases.edge_problems(spec, SMS)[number]
    outcome.check(PtxGpu(edit), spec, problem, raster_order, 0, SMS)  # type: ignore


@pytest.mark.parametrize("spec", [PLAIN, LOOSE, IN_TURNS, *ALONG_K], ids=lambda spec: spec.name)
def test_a_kernel_is_right_and_writes_nothing_else(spec):
    check(spec)


def test_each_panel_is_read_and_stored_by_its_own_tensor_map():
    spec = first(policies.panel_specs(), panels=3, tile_m=64, warp_schedule="pingpong")
    problem, raster_order = panels.panel_problems(spec, SMS)[1]
    outcome.check(PtxGpu(), spec, problem, raster_order, 0, SMS)  # type: ignore


@pytest.mark.parametrize("spec", SCALED, ids=lambda spec: spec.name)
def test_block_scales_are_multiplied_in(spec):
    problem, raster_order = cases.edge_problems(spec, SMS)[0]
    outcome.check_scaled(PtxGpu(), spec, problem, raster_order, 0, SMS)  # type: ignore


@pytest.mark.parametrize(
    "case",
    [Case((32, 144)), Case((144, 16), ways=(128, 128)), Case((144, 16), ways=(1, 128))],
    ids=str,
)
def test_a_kernel_that_quantizes_is_numpys_bit_for_bit(case):
    quantization.check(PtxGpu(), case)


@pytest.mark.parametrize("case", cutting.CASES, ids=str)
def test_a_kernel_that_cuts_float32_is_numpys_bit_for_bit(case):
    case.check(PtxGpu())


def test_one_wrong_number_in_the_code_is_found():
    def later(text: str) -> str:  # D is stored some elements off
        return re.sub(r"(st\.global\.b\d+ \[%rd\d+)\]", r"\1+4]", text)

    with pytest.raises((AssertionError, PtxError)):
        check(LOOSE, 0, later)

    def other_operand(text: str) -> str:  # the first wgmma multiplies B by itself
        at = text.index("wgmma.mma_async")
        a, b = re.findall(r"%rd\d+", text[at : text.index(";", at)])[:2]
        return text[:at] + text[at:].replace(f"{a}, {b}", f"{b}, {b}", 1)

    with pytest.raises(AssertionError, match="differ"):
        check(PLAIN, 0, other_operand)


def test_a_missing_arrival_ends_as_an_error_that_says_who_waits():
    def silent(text: str) -> str:
        return re.sub(r"mbarrier\.arrive\.shared::cluster\.b64[^;]*;", "", text)

    with pytest.raises(PtxError, match="nothing can go on: .*try_wait"):
        check(PLAIN, 1, silent)


def test_accesses_out_of_place_are_errors():
    with pytest.raises(PtxError, match="in no buffer"):
        run("ld.global.b32 %r1, [%rd1+4096];")
    with pytest.raises(PtxError, match="no multiple of 4"):
        run("ld.global.b32 %r1, [%rd1+2];")
    with pytest.raises(PtxError, match="shared memory"):
        run("mov.b32 %r1, __dynamic_shmem__0; ld.shared.b32 %r2, [%r1+256];")
    with pytest.raises(PtxError, match=r"unknown instruction frob\.b32"):
        run("frob.b32 %r1, %r2;")


def test_a_divergent_warp_meets_again():
    got = run("""
        mov.u32 %r1, %tid.x;  and.b32 %r2, %r1, 3;  mov.b32 %r3, 0;
      LOOP:
        setp.ge.u32 %p1, %r3, %r2;  @%p1 bra OUT;
        add.s32 %r3, %r3, 1;  bra.uni LOOP;
      OUT:
        shfl.sync.bfly.b32 %r4, %r3, 1, 31, -1;
        mad.lo.s32 %r3, %r4, 10, %r3;
        mul.wide.u32 %rd2, %r1, 4;  add.s64 %rd3, %rd1, %rd2;
        @!%p1 st.global.b32 [%rd3+4096], %r3;  @%p1 st.global.b32 [%rd3], %r3;
    """)
    lane = np.arange(64)
    np.testing.assert_array_equal(got, (lane ^ 1) % 4 * 10 + lane % 4)


def test_warps_wait_for_each_other_at_a_barrier():
    got = run("""
        mov.u32 %r1, %tid.x;  mov.b32 %r2, __dynamic_shmem__0;  shl.b32 %r3, %r1, 2;
        add.s32 %r4, %r2, %r3;  st.shared.b32 [%r4], %r1;  bar.sync 0;
        xor.b32 %r5, %r3, 128;  add.s32 %r4, %r2, %r5;  ld.shared.b32 %r6, [%r4];
        cvt.u64.u32 %rd2, %r3;  add.s64 %rd3, %rd1, %rd2;  st.global.b32 [%rd3], %r6;
    """)
    np.testing.assert_array_equal(got, np.arange(64) ^ 32)


def run(body: str) -> np.ndarray:
    """Returns 64 numbers in global memory at %rd1 after a block of 64 threads has run `body`."""
    kernel = kernel_of(
        ".visible .entry test( .param .u64 out ) { .reg .pred %p<4>; .reg .b32 %r<9>;"
        f".reg .b64 %rd<9>; ld.param.b64 %rd1, [out]; {body} ret; }}"
    )
    memory = GlobalMemory(1 << 20)
    out = memory.allocate(256)
    Launch(kernel, (1, 1, 1), (1, 1, 1), 64, 256, memory, {}, {"out": out}, {}).run()
    return memory.buffer(out, 256).view(np.uint32)


def test_a_fused_multiply_add_is_rounded_once():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 2000)).astype(np.float32)
    c = (-a * b * (1 + 2.0 ** -rng.integers(1, 40, 2000))).astype(np.float32)
    for x, y, z, got, down in zip(
        a, b, c, arithmetic.fma(a, b, c), arithmetic.fma(a, b, c, down=True), strict=True
    ):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        others = np.nextafter(got, np.array([-np.inf, np.inf], np.float32))
        error = abs(Fraction(float(got)) - exact)
        assert all(error <= abs(Fraction(float(other)) - exact) for other in others)
        assert Fraction(float(down)) <= exact < Fraction(float(np.nextafter(down, np.float32(9))))


def test_the_text_is_the_kernels_and_has_its_parameters():
    spec = PLAIN
    problem, _ = cases.edge_problems(spec, SMS)[0]
    assert spec.name in ptx_of(spec)
    with pytest.raises(PtxError, match="parameters"):
        other = ptx_of(LOOSE)
        gpu: Any = PtxGpu(lambda text: other)
        inputs = random_operands.integer_inputs(problem, 0)
        outcome.run_all(gpu, problem, spec, RasterOrder(), inputs)


@pytest.mark.parametrize("spec", counters.few_dynamic_specs(), ids=lambda spec: spec.name)
def test_a_launch_frees_the_counter_of_its_tiles(spec):
    counters.check(PtxGpu(), spec, SMS, launches=2)
