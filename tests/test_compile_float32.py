"""Kernels of float32 operands compile without a spill, to the instructions of their arithmetic."""

from __future__ import annotations

import re

import pytest
from support import cutting, float32, sgemm
from support.compiling import code_of, skip_without_compiler
from support.covering import ALL, covering_subset
from support.policies import pairs_of, parts_specs, stored_parts_specs, tf32_specs
from support.traits import shown_by_code, traits_of

from jax_hopper_gemm import cubin
from jax_hopper_gemm.cubin.sass import disassemble, parse_sass
from jax_hopper_gemm.dispatch import H200, choose
from jax_hopper_gemm.gemm import simt
from jax_hopper_gemm.gemm.cutting import LINES
from jax_hopper_gemm.gemm.problem import GemmProblem

skip_without_compiler()

pytestmark = pytest.mark.compile

shown = shown_by_code if ALL else traits_of
LONG = [spec for spec, _ in float32.long_cases() if spec.bf16_terms < 9]
LARGE = [spec for spec in LONG if spec.cuts_operands]
PARTS = covering_subset([*LARGE, *parts_specs()], shown)
STORED = [spec for spec in LONG if spec.reads_parts]
STORED = covering_subset([*STORED, *stored_parts_specs()], traits_of)
PLAIN = GemmProblem.dense(4096, 4096, 4096, b_major="k", dtype="float32")
CHOSEN = choose(PLAIN, H200, kernel_only=True).spec
TF32 = list(dict.fromkeys((CHOSEN, *covering_subset(tf32_specs(), shown))))
SGEMM = covering_subset(
    sgemm.kernels()[:8] + sgemm.kernels()[-3:],
    lambda spec: pairs_of({f: getattr(spec, f) for f in ("a_major", "b_major", "simt_width")})
    | {spec.tile_k, spec.num_stages},
)
CUTS = list(dict.fromkeys(case.spec for case in cutting.CASES))
SPECS = [*PARTS, *STORED, *CUTS, *TF32, *SGEMM]


@pytest.mark.parametrize("spec", PARTS, ids=lambda spec: spec.name)
def test_kernel_compiles_to_products_of_parts_of_a_in_registers(spec, built):
    _, facts, text = code_of(spec, built)
    products = re.findall(r"HGMMA\.(\S+) R\d+, R\d+, gdesc", text)
    assert set(products) == {f"64x{spec.tile_n}x16.F32.BF16"}
    assert len(products) == facts.wgmma == 2 * spec.bf16_terms
    assert not re.search(r"\bF2F\.BF16", text), "numbers are rounded one by one"
    loads = set(re.findall(r"\bLDS\.?(\d*)", text))
    assert "128" in loads


@pytest.mark.parametrize("spec", STORED, ids=lambda spec: spec.name)
def test_kernel_that_reads_parts_compiles_to_products_in_shared_memory(spec, built):
    *_, text = code_of(spec, built)
    products = re.findall(r"HGMMA\.(\S+) R\d+, gdesc", text)
    assert {x.removesuffix(".tnspA").removesuffix(".tnspB") for x in products} == {
        f"64x{spec.tile_n}x16.F32.BF16"
    }


@pytest.mark.parametrize("spec", CUTS, ids=lambda spec: spec.name)
def test_kernel_cuts_vectors_without_a_spill(spec, built):
    assert spec not in built, built[spec]
    compiled = cubin.get(spec)
    text = disassemble(compiled.cubin)
    assert compiled.manifest.stack_bytes == parse_sass(text).local_accesses == 0, "it spills"
    assert compiled.manifest.registers <= 96
    assert len(re.findall(r"\bSTG\.E\.64", text)) == LINES * spec.parts
    assert len(re.findall(r"\bLDG\.E\.128", text)) == LINES * spec.aligned
    assert not re.search(r"\bF(ADD|MUL|FMA)\.FTZ", text), "a small part is lost"


@pytest.mark.parametrize("spec", TF32, ids=lambda spec: spec.name)
def test_kernel_compiles_to_tf32(spec, built):
    *_, text = code_of(spec, built)
    columns = spec.tile_m if spec.b_in_registers else spec.tile_n
    assert set(re.findall(r"HGMMA\.(\S+) ", text)) == {f"64x{columns}x8.F32.TF32"}


@pytest.mark.parametrize("spec", SGEMM, ids=lambda spec: spec.name)
def test_kernel_compiles_to_chains_of_fused_multiply_adds_and_asynchronous_copies(spec, built):
    *_, text = code_of(spec, built)
    accumulators = simt.THREAD_M * simt.THREAD_N
    unrolled = 2 * simt.block_k(spec)  # of K: the loop over blocks, and the last one
    assert len(re.findall(r"\bFFMA\b(?!\.FTZ)", text)) == accumulators * unrolled
    assert not re.search(r"\b(FMUL|FADD)\b|\.FTZ", text), "a product is rounded, or underflows"
    vectors = len(re.findall(r"\bLDS\.128", text))
    assert vectors == (unrolled + 1) * (simt.THREAD_M + simt.THREAD_N) // simt.VECTOR
    wide = spec.simt_width == simt.VECTOR
    never = accumulators // simt.VECTOR  # stores that no thread does
    assert len(re.findall(r"STG\.E\.128", text)) == never * (2 if wide else 1)
    assert share_of_conflicts(text) < 0.16
    boxes = simt.by_tma(spec, of_b=False) + simt.by_tma(spec, of_b=True)
    assert len(re.findall(r"\bUTMALDG\.3D", text)) == boxes * spec.num_stages
    assert bool(re.search(r"\bLDGSTS\.E \[", text)) == (boxes < 2)


def share_of_conflicts(text: str) -> float:
    """Returns which part of FFMAs read two registers of one bank that none before has kept."""
    operand = r"R(\d+)(\.reuse)?"
    kept: dict[int, str] = {}
    conflicts = []
    for found in re.finditer(rf"FFMA R\d+, {operand}, {operand}, {operand} ", text):
        read = {place: found[2 * place + 1] for place in range(3)}
        banks = [int(x) % 2 for x in {x for place, x in read.items() if kept.get(place) != x}]
        conflicts.append(len(banks) > len(set(banks)))
        kept = {place: x for place, x in read.items() if found[2 * place + 2]}
    return sum(conflicts) / len(conflicts)
