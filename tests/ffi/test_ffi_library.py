"""Finding and binding the FFI library."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from support.program_inspection import run_fresh

import jax_hopper_gemm as jhg
from jax_hopper_gemm.launch import ffi_library, ffi_target


@pytest.fixture
def unloaded(monkeypatch):
    """Forgets the loaded library for the length of a test."""
    monkeypatch.setattr(ffi_library, "_library", None)


def resolve(digest: str, spec_json: str, capacity: int = 256) -> tuple[int, int, str]:
    """Calls the resolver as C++ does; returns its status, the kernel and the message."""
    kernel = ctypes.c_uint64()
    message = ctypes.create_string_buffer(capacity)
    status = ffi_library._resolve(digest.encode(), spec_json.encode(), kernel, message, capacity)
    return status, kernel.value, message.value.decode()


def fake_cubin(monkeypatch, load) -> None:
    monkeypatch.setattr(ffi_library, "_process_with_kernels", None)
    module = SimpleNamespace(load=load)
    monkeypatch.setitem(sys.modules, "jax_hopper_gemm.cubin", module)
    monkeypatch.setattr("jax_hopper_gemm.cubin", module, raising=False)


def test_the_library_is_loaded_once_and_exports_its_entry_points():
    library = ffi_library.library()
    assert library is ffi_library.library()
    assert ctypes.cast(library.JhgLaunchInstantiate, ctypes.c_void_p).value
    assert ctypes.cast(library.JhgLaunchExecute, ctypes.c_void_p).value
    assert library.JhgLaunchTypeId() and library.JhgLaunchTypeInfo()


@pytest.mark.slow
def test_the_library_loads_without_a_driver_and_without_cuda_python():
    program = (
        "import sys; from jax_hopper_gemm.launch import ffi_library; ffi_library.library(); "
        "print([name for name in ('cutlass', 'cuda') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "JAX_HOPPER_GEMM_LIBCUDA": "/nonexistent"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_the_environment_names_the_library(monkeypatch, tmp_path):
    other = tmp_path / "other.so"
    other.write_bytes(ffi_library.library_path().read_bytes())
    monkeypatch.setenv("JAX_HOPPER_GEMM_LIBRARY", str(other))
    assert ffi_library.library_path() == other


def test_a_relative_path_of_the_library_is_one_from_here(monkeypatch, tmp_path, unloaded):
    tmp_path.joinpath("here.so").write_bytes(ffi_library.library_path().read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_HOPPER_GEMM_LIBRARY", "here.so")
    assert ffi_library.library_path() == tmp_path / "here.so"
    assert ffi_library.library().JhgLaunchTypeId()


def test_a_library_that_the_environment_names_in_vain_is_warned_of(monkeypatch, unloaded, caplog):
    monkeypatch.setenv("JAX_HOPPER_GEMM_LIBRARY", "nowhere.so")
    ffi_target._register()
    assert "JAX_HOPPER_GEMM_LIBRARY is 'nowhere.so', and /" in caplog.text
    assert "/nowhere.so is no file; expected a libjax_hopper_gemm.so. Name one, or" in caplog.text


def test_lowering_for_a_gpu_refuses_a_library_that_is_not_there(monkeypatch, unloaded):
    monkeypatch.setenv("JAX_HOPPER_GEMM_LIBRARY", "nowhere.so")
    x = jax.ShapeDtypeStruct((256, 256), "bfloat16")
    with pytest.raises(ffi_library.NativeLibraryError, match="nowhere.so is no file"):
        jax.jit(jhg.matmul).trace(x, x).lower(lowering_platforms=("cuda",))
    jax.jit(jhg.matmul).trace(x, x).lower(lowering_platforms=("cpu",))


def test_an_installed_library_is_found_where_pip_put_it(monkeypatch, tmp_path):
    installed = tmp_path / "jax_hopper_gemm" / "_lib" / ffi_library.FILE_NAME
    installed.parent.mkdir(parents=True)
    installed.touch()
    sources = tmp_path / "sources" / "launch" / "ffi_library.py"
    monkeypatch.delenv("JAX_HOPPER_GEMM_LIBRARY", raising=False)
    monkeypatch.setattr(ffi_library, "__file__", str(sources))
    distribution = SimpleNamespace(locate_file=lambda path: tmp_path / path)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: distribution)
    assert ffi_library.library_path() == installed


def test_a_missing_library_says_where_it_was_looked_for_and_how_to_build_it(
    monkeypatch, tmp_path, unloaded
):
    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.delenv("JAX_HOPPER_GEMM_LIBRARY", raising=False)
    monkeypatch.setattr(ffi_library, "__file__", str(tmp_path / "launch" / "ffi_library.py"))
    monkeypatch.setattr(importlib.metadata, "distribution", not_installed)
    with pytest.raises(ffi_library.NativeLibraryError) as caught:
        ffi_library.library()
    assert str(tmp_path / "_lib" / ffi_library.FILE_NAME) in str(caught.value)
    assert "cmake -S ffi -B build/ffi" in str(caught.value)


def test_a_file_that_is_no_library_is_named(monkeypatch, tmp_path, unloaded):
    broken = tmp_path / ffi_library.FILE_NAME
    broken.write_bytes(b"not a shared library")
    monkeypatch.setenv("JAX_HOPPER_GEMM_LIBRARY", str(broken))
    with pytest.raises(ffi_library.NativeLibraryError, match="cannot be used") as caught:
        ffi_library.library()
    assert str(broken) in str(caught.value)


def test_the_resolver_answers_with_the_kernel_that_cubin_loads(monkeypatch):
    asked = []

    def load(digest, spec_json):
        asked.append((digest, spec_json))
        return SimpleNamespace(handle=0xFEDCBA9876543210)

    fake_cubin(monkeypatch, load)
    assert resolve("abc", "{}") == (0, 0xFEDCBA9876543210, "")
    assert asked == [("abc", "{}")]


@pytest.mark.parametrize("error", [RuntimeError("no such kernel"), KeyboardInterrupt()])
def test_the_resolver_turns_any_exception_into_a_message(monkeypatch, error):
    def load(digest, spec_json):
        raise error

    fake_cubin(monkeypatch, load)
    assert resolve("abc", "{}") == (1, 0, str(error) or "KeyboardInterrupt")


def test_the_resolver_cuts_a_long_message_to_what_fits(monkeypatch):
    def load(digest, spec_json):
        raise RuntimeError(1000 * "x")

    fake_cubin(monkeypatch, load)
    assert resolve("abc", "{}", capacity=16) == (1, 0, 15 * "x")


@pytest.mark.parametrize("capacity", range(1, 9))
def test_the_resolver_cuts_between_characters(monkeypatch, capacity):
    def load(digest, spec_json):
        raise RuntimeError("aäö€")

    fake_cubin(monkeypatch, load)
    text = {1: "", 2: "a", 3: "a", 4: "aä", 5: "aä", 6: "aäö", 7: "aäö", 8: "aäö"}
    assert resolve("abc", "{}", capacity) == (1, 0, text[capacity])


def test_the_resolver_names_an_error_that_has_no_text(monkeypatch):
    class Mute(Exception):
        def __str__(self):
            raise ValueError("no text")

    def load(digest, spec_json):
        raise Mute

    fake_cubin(monkeypatch, load)
    assert resolve("abc", "{}") == (1, 0, "Mute")


@pytest.mark.parametrize("digest", [b"../../x", b"/etc/x", b"", b"\xff\xfe", b"9" * 5000])
def test_the_resolver_refuses_what_is_no_digest(monkeypatch, digest):
    monkeypatch.setattr(ffi_library, "_process_with_kernels", None)
    message = ctypes.create_string_buffer(4096)
    assert ffi_library._resolve(digest, b"{}", ctypes.c_uint64(), message, 4096) == 1
    assert message.value.decode().startswith("a kernel is named by 64 hexadecimal digits, not by ")


def test_the_resolver_says_what_no_text_can_hold(monkeypatch):
    """Half of a surrogate pair, which JSON may bring or a folder's name: it has no UTF-8."""

    def load(digest, spec_json):
        raise RuntimeError("no \ud800")

    fake_cubin(monkeypatch, load)
    assert resolve("abc", "{}") == (1, 0, r"no \ud800")


def test_the_resolver_refuses_in_a_fork_of_a_process_that_has_kernels(monkeypatch):
    fake_cubin(monkeypatch, lambda digest, spec_json: SimpleNamespace(handle=1))
    assert resolve("abc", "{}")[0] == 0
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    status, _, message = resolve("def", "{}", capacity=4096)
    assert status == 1
    assert f"({parent + 1}) was forked from one ({parent})" in message and "'spawn'" in message


FORKS = """
import os, sys, warnings
import jax, jax.numpy as jnp
import numpy as np
from jax_hopper_gemm import matmul
from jax_hopper_gemm.launch import ffi_library

ffi_library.library = lambda: None
a = np.ones((256, 256), jnp.bfloat16)

def lowered():
    function = jax.jit(lambda a: matmul(a, a, implementation="hopper"))
    try:
        text = function.trace(a).lower(lowering_platforms=("cuda",)).as_text()
    except ffi_library.ForkedError as error:
        return str(error)
    return "launch" if "v1.launch" in text else "no launch"

def in_fork(function):
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            os.write(writer, function().encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.wait()
    return os.read(reader, 4096).decode()

def run():
    return str(jax.jit(matmul)(a, a)[0, 0])

print(in_fork(lowered))
print(in_fork(run))
ffi_library._process_with_kernels = os.getpid()  # as if one had been loaded
print(in_fork(lowered))
print(lowered())
print(run())
"""


@pytest.mark.slow
def test_workers_are_forked_before_kernels_are_loaded_or_told_so():
    before, ran, after, here, parent = run_fresh(FORKS).splitlines()
    assert before == here == "launch"
    assert ran == parent == "256"
    assert "was forked from one" in after
