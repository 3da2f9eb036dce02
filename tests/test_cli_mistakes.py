"""Mistakes at the command line: each is one line on stderr, a nonzero status, and no traceback."""

from __future__ import annotations

import json
import math
import os
import re
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
from jax_hopper_gemm.launch import ffi_library
from jax_hopper_gemm.testing import benchmark

pytestmark = pytest.mark.pure

DOCUMENT = (Path(__file__).parents[1] / "docs" / "command_line.md").read_text()
# The exit status, what is typed, what stderr must say; names in braces are `places`.
MISTAKES = [
    (int(status), typed.replace("\\|", "|"), message.replace("\\|", "|"))
    for status, typed, message in re.findall(r"^\| (\d) \| `(.*?)` \| `(.*?)` \|$", DOCUMENT, re.M)
]


def test_the_document_lists_mistakes():
    assert len(MISTAKES) >= 80 and len({typed for _, typed, _ in MISTAKES}) == len(MISTAKES)


@pytest.fixture
def places(tmp_path, monkeypatch, use_table) -> dict[str, Path]:
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
    monkeypatch.chdir(tmp_path)
    return paths


def error_of(capsys, *words: str, status: int = 1) -> str:
    """Returns the one line on stderr of a command that fails."""
    assert main(words) == status
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and error.endswith("\n")
    return error


@pytest.mark.parametrize(("status", "typed", "message"), MISTAKES)
def test_mistakes_are_one_line(capsys, places, monkeypatch, status, typed, message):
    words = [word.format(**places) for word in typed.split()]
    if words[0].startswith("JAX_HOPPER_GEMM_"):
        monkeypatch.setenv(*words.pop(0).split("="))
    error = error_of(capsys, *words, status=status)
    assert message.format(**places) in error
    assert status == 1 or re.search(r"\. See python -m jax_hopper_gemm.* --help\n$", error)


@pytest.mark.parametrize("typed", ["explain 64x64 --json", "--json launch", "tune 64x64x64 --json"])
def test_json_tells_of_mistakes_too(capsys, typed):
    status = main(typed.split())
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert [*found] == ["schema", "version", "command", "status", "error", "result"]
    assert (found["schema"], found["status"], found["result"]) == (1, status, None)
    assert status > 0 and said.err == f"error: {found['error']}\n"


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

    monkeypatch.setattr(cubin, "user_cache", interrupt)
    assert "interrupted" in error_of(capsys, "cache", "show", status=130)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", "--json"])
@pytest.mark.parametrize(
    ("reader", "said"),
    [("| true", ""), ("> /dev/full", "error: [Errno 28] No space left on device\n")],
)
def test_a_reader_that_leaves_early_and_a_full_disk_get_no_traceback(places, words, reader, said):
    command = f"{sys.executable} -m jax_hopper_gemm explain 4096x4096x4096 {words} {reader}"
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True)
    assert done.stderr == said


def test_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jax-hopper-gemm {jax_hopper_gemm.__version__}\n"


def test_a_mistake_of_the_package_itself_keeps_its_traceback(monkeypatch):
    def broken():
        raise KeyError("a bug")

    monkeypatch.setattr(cubin, "user_cache", broken)
    with pytest.raises(KeyError):
        main(["cache", "show"])
