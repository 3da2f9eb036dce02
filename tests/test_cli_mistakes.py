"""Mistakes at the command line: each is one line on stderr, a nonzero status, and no traceback."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jax_hopper_gemm
from jax_hopper_gemm import cubin, dispatch
from jax_hopper_gemm.cli import main, tune
from jax_hopper_gemm.cubin import CubinError, lookup
from jax_hopper_gemm.dispatch import table
from jax_hopper_gemm.launch import ffi_library
from jax_hopper_gemm.testing import benchmark

pytestmark = pytest.mark.pure

# What is typed, and what stderr must say. Names in braces are the paths that `places` makes.
WRONG_ARGUMENTS = [
    ("launch", "invalid choice: 'launch'"),
    ("--verbose", "unrecognized arguments: --verbose"),
    ("explain", "the following arguments are required: M, N, K"),
    ("explain 64 64", "the following arguments are required: K"),
    ("explain 64 64 64 64", "unrecognized arguments: 64"),
    ("explain 0 64 64", "'0' is not a positive number"),
    ("explain -64 64 64", "-64"),
    ("explain 64.5 64 64", "'64.5' is not a positive number"),
    ("explain 64x64x64", "'64x64x64' is not a positive number"),
    ("explain m n k", "'m' is not a positive number"),
    ("explain 64 64 64 --dtype bf16", "'bf16' is no dtype of numbers, as bfloat16"),
    ("explain 64 64 64 --dtype object", "'object' is no dtype of numbers"),
    ("explain 64 64 64 --dtype bool", "'bool' is no dtype of numbers"),
    ("explain 64 64 64 --dtype sum", "'sum' is no dtype of numbers"),
    ("explain 64 64 64 --dtype a,b", "'a,b' is no dtype of numbers"),
    ("explain 64 64 64 --dtype float64", "'float64' needs JAX_ENABLE_X64=1"),
    ("explain 64 64 64 --dtype", "expected one argument"),
    ("explain 64 64 64 --result-dtype int8", "invalid choice: 'int8'"),
    ("explain 64 64 64 --a-major n", "invalid choice: 'n'"),
    ("explain 64 64 64 --b-major m", "invalid choice: 'm'"),
    ("explain 64 64 64 --batch 0", "'0' is not a positive number"),
    ("explain 64 64 64 --groups none", "'none' is not a positive number"),
    ("explain 64 64 64 --groups 2 --a-major m", "--groups takes A stored (M, K)"),
    ("explain 64 64 64 --implementation cuda", "invalid choice: 'cuda'"),
    ("build --dtype float32", "invalid choice: 'float32'"),
    ("build --result-dtype int8", "invalid choice: 'int8'"),
    ("build --jobs 0", "'0' is not a positive number"),
    ("build --sms many", "'many' is not a positive number"),
    ("build --program", "expected at least one argument"),
    ("tune 64x64", "'64x64' is not MxNxK"),
    ("tune 64x64x0", "'64x64x0' is not MxNxK"),
    ("tune 64x64x64 --count 0", "'0' is not a positive number"),
    ("tune 64x64x64 --dtype half_precision", "is no dtype of numbers"),
    ("bench --regime fast", "invalid choice: 'fast'"),
    ("bench --rounds few", "invalid int value: 'few'"),
    ("cache", "the following arguments are required: ACTION"),
    ("cache drop", "invalid choice: 'drop'"),
]
FAILURES = [
    ("build --out {file}", "--out {file} cannot be written: it is a file. Name another folder"),
    ("build --out {file}/in", "--out {file}/in cannot be written: Not a directory"),
    ("build --out /proc/none", "--out /proc/none cannot be written: No such file or directory"),
    ("build --program {absent}", "no kernels can be read from it: FileNotFoundError"),
    ("build --program {folder}", "no kernels can be read from it: IsADirectoryError"),
    ("build --program {file}", "no kernels can be read from it"),
    ("build --program {junk}", "no kernels can be read from it"),
    ("build --program {plain}", "it launches no kernel of this library"),
    ("tune", "name products, as 4096x4096x4096, or --suite of"),
    ("tune --suite small", "no suite 'small'; there are bars"),
    ("tune 64x64x64 --build-only {file}", "--build-only {file} cannot be written: it is a file"),
    (
        "tune 64x64x64 --dtype uint8 --build-only {folder}",
        "there is no candidate to build: A and B",
    ),
    ("tune 64x64x63 --build-only {folder}", "there is no candidate to build: "),
    ("tune 64x64x64 --out {folder}", "--out {folder} cannot be written: it is a folder"),
    ("tune 64x64x64 --out {absent}/t", "cannot be written: there is no folder {absent}"),
    ("tune 64x64x64", "timing needs a Hopper GPU"),
    ("bench", "timing needs a Hopper GPU"),
    ("bench small", "no suite 'small'; there are bars"),
    ("bench --rounds 0", "--rounds is 0; expected at least 1"),
    ("bench --without cublas", "no candidate is called 'cublas'; there are hopper, auto, xla"),
    ("bench --without hopper auto xla pallas", "leaves out every candidate"),
    ("bench --json {folder}", "--json {folder} cannot be written: it is a folder"),
    ("bench --plot {absent}/p.png", "cannot be written: there is no folder {absent}"),
]
# Variables of the environment: their name, their value, what is typed, what stderr must say.
VARIABLES = [
    ("TABLE", "{absent}", "explain 64 64 64", "table {absent}: [Errno 2] No such file"),
    ("TABLE", "{folder}", "explain 64 64 64", "Is a directory"),
    ("TABLE", "{junk}", "explain 64 64 64", "JAX_HOPPER_GEMM_TABLE"),
    ("TABLE", "{old}", "explain 64 64 64", "version is 0, this library reads 1: tune again"),
    ("CACHE", "{file}", "cache show", "JAX_HOPPER_GEMM_CACHE is '{file}', which is no folder"),
    ("CACHE", "{file}", "cache clear", "JAX_HOPPER_GEMM_CACHE is '{file}', which is no folder"),
    ("CACHE", "{file}", "build", "JAX_HOPPER_GEMM_CACHE is '{file}', which is no folder"),
    ("CACHE", "{file}/in", "build", "the cache {file}/in cannot be written: Not a directory"),
    ("CUBINS", "{absent}", "build", "JAX_HOPPER_GEMM_CUBINS is '{absent}', which is no folder"),
    ("CUBINS", "{absent}", "", "JAX_HOPPER_GEMM_CUBINS is '{absent}', which is no folder"),
]


@pytest.fixture
def places(tmp_path, monkeypatch) -> dict[str, Path]:
    """Files and folders that are none of what a command wants."""
    names = ("file", "folder", "absent", "junk", "old", "plain")
    paths = {name: tmp_path / name for name in names}
    paths["file"].touch()
    paths["folder"].mkdir()
    paths["junk"].write_text("{[")
    paths["old"].write_text('{"version": 0, "device": {}, "entries": []}')
    plain = jax.export.export(jax.jit(jnp.sin))(jax.ShapeDtypeStruct((8,), jnp.float32))
    paths["plain"].write_bytes(plain.serialize())
    monkeypatch.setenv("JAX_HOPPER_GEMM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JAX_HOPPER_GEMM_CUBINS", raising=False)
    monkeypatch.setattr(lookup, "_known", {})
    monkeypatch.setattr(table, "_tables", table.UserTables())
    monkeypatch.chdir(tmp_path)
    return paths


def error_of(capsys, *words: str, status: int = 1) -> str:
    """Returns the one line on stderr of a command that fails."""
    try:
        assert main(words) == status
    except SystemExit as refused:
        assert refused.code == status
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and error.endswith("\n")
    return error


@pytest.mark.parametrize(("typed", "message"), WRONG_ARGUMENTS)
def test_wrong_arguments_are_one_line(capsys, typed, message):
    error = error_of(capsys, *typed.split(), status=2)
    assert message in error and "--help" in error


@pytest.mark.parametrize(("typed", "message"), FAILURES)
def test_failures_are_one_line(capsys, places, typed, message):
    words = [word.format(**places) for word in typed.split()]
    assert message.format(**places) in error_of(capsys, *words)


@pytest.mark.parametrize(("name", "value", "typed", "message"), VARIABLES)
def test_unusable_variables_are_one_line(capsys, places, monkeypatch, name, value, typed, message):
    monkeypatch.setenv(f"JAX_HOPPER_GEMM_{name}", value.format(**places))
    assert message.format(**places) in error_of(capsys, *typed.split())


@pytest.fixture
def on_h200(places, monkeypatch):
    """A GPU whose kernels all fail to be built."""
    monkeypatch.setattr(benchmark, "this_device", lambda: dispatch.H200)
    monkeypatch.setattr(ffi_library, "library", lambda: None)
    monkeypatch.setattr(cubin, "build", lambda specs: None)
    timers = (lambda spec, order: math.inf), (lambda: 5.0)
    monkeypatch.setattr(tune, "timers", lambda device, problem: timers)
    return places


def test_tune_on_a_gpu_without_compiler_is_one_line(capsys, on_h200, monkeypatch):
    monkeypatch.setattr(tune, "show_progress", lambda candidate, microseconds: None)
    error = error_of(capsys, "tune", "512x512x512", "--count", "2", "--out", "t.json")
    assert "none of 2 candidates could run M=512 N=512 K=512" in error
    assert not Path("t.json").exists()


@pytest.mark.parametrize("text", ["{[", '{"version": 1}', "[]"])
def test_tune_refuses_a_damaged_table_in_one_line(capsys, on_h200, text):
    on_h200["file"].write_text(text)
    out = str(on_h200["file"])
    assert f"table {out}" in error_of(capsys, "tune", "512x512x512", "--out", out)
    assert on_h200["file"].read_text() == text


def test_tune_without_the_library_is_one_line(capsys, on_h200, monkeypatch):
    def missing():
        raise ffi_library.NativeLibraryError("libjax_hopper_gemm.so is at none of: /x")

    monkeypatch.setattr(ffi_library, "library", missing)
    assert "is at none of: /x" in error_of(capsys, "tune", "512x512x512", "--out", "t.json")


@pytest.mark.parametrize("typed", ["build", "tune 64x64x64 --build-only {folder}"])
def test_kernels_that_cannot_be_built_are_counted_in_one_line(capsys, places, monkeypatch, typed):
    def build(specs, folder=None, **options):
        return cubin.BuildReport(folder, (), (), dict.fromkeys(specs, "no\ncompiler"))

    monkeypatch.setattr(cubin, "build", build)
    words = [word.format(**places) for word in typed.split()]
    error = error_of(capsys, *words)
    assert "kernels could not be built. The first reason: no compiler" in error


def test_the_demo_without_compiler_shows_the_machine_then_one_line(capsys, places, monkeypatch):
    def refuse(spec):
        raise CubinError("nvidia-cutlass-dsl is not installed")

    monkeypatch.setattr(lookup, "_compile", lambda spec, digest: refuse(spec))
    assert main([]) == 1
    said = capsys.readouterr()
    assert said.err == "error: nvidia-cutlass-dsl is not installed\n"
    assert "jaxlib" in said.out and "against float64" in said.out


def test_a_cache_that_cannot_be_cleared_is_one_line(capsys, places, monkeypatch):
    cubin.cache_dir().mkdir()
    (cubin.cache_dir() / f"{'a' * 64}.cubin").touch()

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    assert "Permission denied" in error_of(capsys, "cache", "clear")


def test_interrupting_is_one_line(capsys, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(cubin, "cache_entries", interrupt)
    assert "interrupted" in error_of(capsys, "cache", "show", status=130)


@pytest.mark.slow
def test_a_reader_that_leaves_early_gets_no_traceback(places):
    command = f"{sys.executable} -m jax_hopper_gemm explain 4096 4096 4096 | true"
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"jax-hopper-gemm {jax_hopper_gemm.__version__}\n"


def test_a_mistake_of_the_package_itself_keeps_its_traceback(monkeypatch):
    def broken():
        raise KeyError("a bug")

    monkeypatch.setattr(cubin, "cache_entries", broken)
    with pytest.raises(KeyError):
        main(["cache", "show"])
