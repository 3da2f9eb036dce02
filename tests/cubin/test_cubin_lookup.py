"""Prebuilt, cache, compiler: the order; kernels are compiled once, and where none can be, why."""

from __future__ import annotations

import importlib.metadata
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support.cubin_samples import (
    FAKE_COMPILER,
    HIDE_CUTLASS,
    SPEC,
    run_python,
    sample_manifest,
    start_python,
)
from support.cubin_store import forget, write_entry

from jax_hopper_gemm import cubin
from jax_hopper_gemm.cubin import CubinError, compiler

pytestmark = [pytest.mark.pure, pytest.mark.usefixtures("folders")]


def test_a_kernel_is_compiled_once_a_process(compiles, monkeypatch):
    first = cubin.get(SPEC)
    assert cubin.get(SPEC) is first
    assert first.origin == "compiled"
    forget(monkeypatch)
    assert cubin.get(SPEC).origin == f"cache {cubin.cache_dir()}"
    assert cubin.get(SPEC).cubin == first.cubin
    assert compiles == [SPEC]


def test_two_threads_compile_once(compiles):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(cubin.get, [SPEC] * 4))
    assert compiles == [SPEC]


def test_a_compilation_that_is_interrupted_leaves_no_lock(compiles, monkeypatch):
    fixed = sys.modules["jax_hopper_gemm.kernels"].compile_cubin

    def interrupted(spec, workdir):
        monkeypatch.setattr(sys.modules["jax_hopper_gemm.kernels"], "compile_cubin", fixed)
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["jax_hopper_gemm.kernels"], "compile_cubin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cubin.get(SPEC)
    found: list[str] = []
    other = threading.Thread(target=lambda: found.append(cubin.get(SPEC).origin), daemon=True)
    other.start()
    other.join(20)
    assert found == ["compiled"] and compiles == [SPEC]


@pytest.mark.slow
def test_processes_that_start_together_compile_once(tmp_path):
    source = (
        FAKE_COMPILER
        + """
    from support.cubin_samples import SPEC
    from jax_hopper_gemm import cubin
    print(cubin.get(SPEC).origin.split()[0])
    """
    )
    environment = {
        "JAX_HOPPER_GEMM_CACHE": str(tmp_path / "cache"),
        "COMPILES": str(tmp_path / "compiles"),
        "COMPILE_SECONDS": "2",
    }
    processes = [start_python(source, **environment) for _ in range(3)]
    results = [process.communicate(timeout=120) for process in processes]
    assert sorted(out.strip() for out, _ in results) == ["cache", "cache", "compiled"], results
    assert (tmp_path / "compiles").read_text().splitlines() == [SPEC.name]


FORKS = (
    FAKE_COMPILER
    + """
    import threading
    from dataclasses import replace
    from support.cubin_samples import SPEC
    from jax_hopper_gemm import cubin
    from jax_hopper_gemm.cubin import loader  # whose lock is the outermost

    thread = threading.Thread(target=cubin.get, args=(SPEC,))
    thread.start()
    while not os.path.exists(os.environ["COMPILES"]):
        time.sleep(0.01)
    if os.fork() == 0:
        import signal
        signal.alarm(20)
        with loader._loading:
            origins = [cubin.get(spec).origin for spec in (SPEC, replace(SPEC, tile_n=64))]
        print(*(origin.split()[0] for origin in origins), flush=True)
        os._exit(0)
    _, status = os.wait()
    thread.join()
    assert status == 0, status
"""
)


@pytest.mark.slow
def test_a_fork_while_a_thread_compiles_leaves_the_child_free_to_compile(tmp_path):
    folders = {
        "JAX_HOPPER_GEMM_CACHE": str(tmp_path / "cache"),
        "JAX_HOPPER_GEMM_CUBINS": str(tmp_path / "prebuilt"),
        "COMPILES": str(tmp_path / "compiles"),
    }
    said = run_python(FORKS, **folders, COMPILE_SECONDS="1")
    assert said.split() == ["compiled", "compiled"]


def test_prebuilt_comes_before_the_cache_and_the_cache_before_the_compiler(compiles, monkeypatch):
    cached = write_entry("cache", b"cached".ljust(64))
    assert cubin.get(SPEC).cubin == cached
    forget(monkeypatch)
    prebuilt = write_entry("prebuilt", b"prebuilt".ljust(64))
    assert cubin.get(SPEC).cubin == prebuilt
    assert cubin.get(SPEC).origin.startswith("prebuilt ")
    assert compiles == []


@pytest.mark.slow
def test_prebuilt_kernels_need_no_compiler_and_no_cache(tmp_path):
    content = write_entry("prebuilt", b"prebuilt".ljust(64))
    source = (
        HIDE_CUTLASS
        + """
    from support.cubin_samples import SPEC
    from jax_hopper_gemm import cubin
    print(cubin.get(SPEC).manifest.cubin_sha256)
    """
    )
    printed = run_python(
        source,
        JAX_HOPPER_GEMM_CUBINS=str(tmp_path / "prebuilt"),
        JAX_HOPPER_GEMM_CACHE="/proc/nowhere",
    )
    assert printed.strip() == sample_manifest(cubin=content).cubin_sha256


def test_prebuilt_folder_is_the_packages_own_unless_named(monkeypatch):
    monkeypatch.delenv("JAX_HOPPER_GEMM_CUBINS")
    assert cubin.prebuilt().folder == Path(cubin.__file__).parents[1] / "_cubins"


def test_an_error_without_compiler_names_kernel_places_and_command(no_compiler, tmp_path):
    with pytest.raises(CubinError) as raised:
        cubin.get(SPEC)
    message = str(raised.value)
    for part in (SPEC.name, SPEC.to_json(), str(tmp_path / "cache"), str(tmp_path / "prebuilt"),
                 "nvidia-cutlass-dsl is not installed", "python -m jax_hopper_gemm build",
                 "JAX_HOPPER_GEMM_CUBINS"):  # fmt: skip
        assert part in message


def test_a_missing_compiler_is_named_with_its_version(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(CubinError, match=r"not installed.*nvidia-cutlass-dsl==4\.8\.1"):
        compiler.require_compiler()


def test_another_version_of_the_compiler_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.9.0")
    with pytest.raises(CubinError, match=r"is 4\.9\.0, but kernels are built with 4\.8\.1 only"):
        compiler.require_compiler()


def test_an_illegal_spec_is_refused_with_every_reason():
    with pytest.raises(CubinError, match="tile_m 100.*tile_n 24"):
        cubin.get(replace(SPEC, tile_m=100, tile_n=24))


def test_a_compilers_failure_names_the_kernel(compiles, monkeypatch):
    def fail(spec, workdir):
        raise RuntimeError("ptxas: out of registers")

    monkeypatch.setattr(sys.modules["jax_hopper_gemm.kernels"], "compile_cubin", fail)
    with pytest.raises(CubinError, match=f"compiling {SPEC.name} failed: ptxas"):
        cubin.get(SPEC)
    assert not list(cubin.cache_dir().glob("*.cubin"))
