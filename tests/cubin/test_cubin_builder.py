"""`build` compiles in processes, keeps what is there, and reports what failed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.cubin_samples import HIDE_CUTLASS, SPEC, run_python

from jax_hopper_gemm import cubin
from jax_hopper_gemm.cubin import CubinError, compiler, digest_of, lookup

pytestmark = pytest.mark.pure

try:
    compiler.require_compiler()
except CubinError as error:
    pytest.skip(str(error), allow_module_level=True)

OTHER = replace(SPEC, warp_schedule="pingpong", tile_scheduler="dynamic")
ILLEGAL = replace(SPEC, tile_n=24)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_HOPPER_GEMM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "none").mkdir()
    monkeypatch.setenv("JAX_HOPPER_GEMM_CUBINS", str(tmp_path / "none"))
    monkeypatch.setattr(lookup, "_known", {})


@pytest.mark.slow
def test_build_fills_the_cache_and_lists_failures_at_the_end(capfd):
    report = cubin.build([SPEC, ILLEGAL, OTHER, SPEC], jobs=2)
    assert (report.compiled, report.reused) == ((SPEC, OTHER), ())
    assert list(report.failures) == [ILLEGAL]
    assert "tile_n 24" in report.failures[ILLEGAL]
    assert str(report).splitlines()[-1].startswith(f"FAILED {ILLEGAL.name}: ")
    assert {entry.name for entry in cubin.cache_entries()} == {SPEC.name, OTHER.name}
    assert "3/3" in capfd.readouterr().err  # the progress bar

    again = cubin.build([SPEC, OTHER], jobs=1, progress=False)
    assert (again.compiled, again.reused) == ((), (SPEC, OTHER))
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_built_folder_serves_a_machine_without_cutlass(tmp_path):
    folder = tmp_path / "shipped"
    assert cubin.build([SPEC], folder=folder, progress=False).compiled == (SPEC,)
    source = (
        HIDE_CUTLASS
        + """
    from support.cubin_samples import SPEC
    from jax_hopper_gemm import cubin
    compiled = cubin.get(SPEC)
    print(compiled.origin, compiled.manifest.cubin_sha256)
    """
    )
    printed = run_python(
        source,
        JAX_HOPPER_GEMM_CUBINS=str(folder),
        JAX_HOPPER_GEMM_CACHE=str(tmp_path / "elsewhere"),
    )
    built = lookup.Store(folder, "prebuilt").read(digest_of(SPEC))
    assert built is not None
    assert printed.split() == ["prebuilt", str(folder), built.manifest.cubin_sha256]

    again = cubin.build([SPEC], folder=folder, progress=False)
    assert again.reused == (SPEC,)


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_a_failure_of_build(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAX_HOPPER_GEMM_CACHE", str(tmp_path / "file" / "cache"))
    report = cubin.build([SPEC], progress=False)
    assert "cannot be written" in report.failures[SPEC]


def test_nothing_to_build_is_no_error():
    assert cubin.build([], progress=False).failures == {}
