"""`build` compiles in processes, keeps what is there, and reports what failed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.cubin_samples import HIDE_CUTLASS, SPEC, run_python
from support.cubin_store import forget

from jax_hopper_gemm import cubin
from jax_hopper_gemm.cubin import CubinError, compiler, digest_of, lookup

pytestmark = [pytest.mark.pure, pytest.mark.usefixtures("folders")]

try:
    compiler.require_compiler()
except CubinError as error:
    pytest.skip(str(error), allow_module_level=True)

OTHER = replace(SPEC, warp_schedule="pingpong", tile_scheduler="dynamic")
ILLEGAL = replace(SPEC, tile_n=24)


@pytest.mark.slow
def test_build_fills_a_folder_and_lists_failures_at_the_end(capfd, tmp_path):
    """And the folder serves a machine without CuTeDSL."""
    folder = tmp_path / "shipped"
    report = cubin.build([SPEC, ILLEGAL, OTHER, SPEC], jobs=2, folder=folder)
    assert (report.compiled, report.reused) == ((SPEC, OTHER), ())
    assert list(report.failures) == [ILLEGAL]
    assert "tile_n 24" in report.failures[ILLEGAL]
    assert str(report).splitlines()[-1].startswith(f"FAILED {ILLEGAL.name}: ")
    entries = cubin.user_cache().entries().values()
    assert {entry.manifest.name for entry in entries} == {SPEC.name, OTHER.name}
    assert "3/3" in capfd.readouterr().err  # the progress bar

    again = cubin.build([SPEC, OTHER], jobs=1, progress=False, folder=folder)
    assert (again.compiled, again.reused) == ((), (SPEC, OTHER))
    assert capfd.readouterr().err == ""

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


def test_the_cache_is_filled_and_one_that_cannot_be_written_is_a_failure(
    compiles, in_this_process, tmp_path, monkeypatch
):
    assert cubin.build([SPEC], progress=False).compiled == (SPEC,)
    forget(monkeypatch)
    assert cubin.build([SPEC], progress=False).reused == tuple(compiles) == (SPEC,)
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAX_HOPPER_GEMM_CACHE", str(tmp_path / "file" / "cache"))
    forget(monkeypatch)
    report = cubin.build([SPEC], progress=False)
    assert "cannot be written" in report.failures[SPEC]


def test_nothing_to_build_is_no_error():
    assert cubin.build([], progress=False).failures == {}
