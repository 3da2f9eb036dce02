"""Facts are counted from disassembly as nvdisasm prints it."""

from __future__ import annotations

import pytest

from jax_hopper_gemm.cubin import CubinError, sass

pytestmark = pytest.mark.pure

LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 USETMAXREG.DEALLOC.CTAPOOL 0x28 ;
        /*0020*/               @P1 UTMALDG.3D.MULTICAST [UR8], [UR6], UR4, desc[URZ] ;
        /*0030*/              @UP2 UTMALDG.3D [UR8], [UR6], desc[URZ] ;
        /*0040*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8 ;
.L_x_2:
        /*0050*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0060*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0070*/               @P0 STL [R1+0x4], R201 ;
        /*0080*/                   LDL.64 R2, [R1] ;
        /*0090*/                   STSM.16.MT88.4 [R13], R4 ;
        /*00a0*/                   UTMASTG.3D [UR4], [UR6] ;
        /*10b0*/                   EXIT ;
"""


def test_instructions_are_counted_with_and_without_predicates():
    assert sass.parse_sass(LISTING) == sass.SassFacts(
        wgmma=2, tma_loads=2, multicast_loads=1, tma_stores=1, matrix_stores=1,
        register_budgets=(40, 232), local_accesses=2, highest_register=201, instructions=12,
    )  # fmt: skip


def test_no_code_has_no_facts():
    assert sass.parse_sass("") == sass.SassFacts(0, 0, 0, 0, 0, (), 0, 0, 0)


def test_a_missing_disassembler_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(sass.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(CubinError, match="pip install nvidia-cuda-nvdisasm"):
        sass.find_nvdisasm()


def test_an_installed_toolkit_has_the_disassembler(monkeypatch, tmp_path):
    program = tmp_path / "bin" / "nvdisasm"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sass.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert sass.find_nvdisasm() == program


def test_what_is_no_cubin_cannot_be_disassembled():
    try:
        sass.find_nvdisasm()
    except CubinError as error:
        pytest.skip(str(error))
    with pytest.raises(CubinError, match="nvdisasm cannot read"):
        sass.disassemble(b"not a cubin")
