"""Variables that name nothing usable: errors that say what came, what was expected, the way out."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.cubin_samples import SPEC

from jax_hopper_gemm import cubin, dispatch
from jax_hopper_gemm.cubin import CubinError, lookup
from jax_hopper_gemm.dispatch import TableError
from jax_hopper_gemm.dispatch import table as tables
from jax_hopper_gemm.launch import ffi_library
from jax_hopper_gemm.lowering import fallback

pytestmark = pytest.mark.pure


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.touch()
    return path


def load_a_kernel(monkeypatch):
    monkeypatch.setattr(lookup, "_known", {})
    cubin.get(SPEC)


def read_tables(monkeypatch):
    tables._environment_tables.cache_clear()
    dispatch.tables_of(dispatch.H200)


CASES = {
    "CUBINS, absent": ("CUBINS", "absent", load_a_kernel, CubinError, "is no folder; expected one"),
    "CUBINS, a file": ("CUBINS", "file", load_a_kernel, CubinError, "unset the variable"),
    "CACHE, a file": ("CACHE", "file", load_a_kernel, CubinError, "expected a folder, which need"),
    "TABLE, absent": ("TABLE", "absent", read_tables, TableError, "jax_hopper_gemm tune"),
    "TABLE, a folder": ("TABLE", ".", read_tables, TableError, "from JAX_HOPPER_GEMM_TABLE"),
    "TABLE, no table": ("TABLE", "file", read_tables, TableError, "jax_hopper_gemm tune"),
    "LIBRARY, absent": (
        "LIBRARY", "absent", lambda _: ffi_library.library_path(), ffi_library.NativeLibraryError,
        "is no file; expected a libjax_hopper_gemm.so",
    ),
    "LIBRARY, no library": (
        "LIBRARY", "file", lambda _: ffi_library._load(ffi_library.library_path()),
        ffi_library.NativeLibraryError, "expected a libjax_hopper_gemm.so of this version",
    ),
    "GPU": ("GPU", "B200", lambda _: dispatch.absent_device(), ValueError, "one of H100, H200"),
    "ON_FALLBACK": (
        "ON_FALLBACK", "loud", lambda _: fallback.policy_now(), ValueError,
        "expected one of silent, warn, error",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_variable_with_an_unusable_value_is_an_error(case, monkeypatch, tmp_path, file):
    name, value, act, error, expected = CASES[case]
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("JAX_HOPPER_GEMM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JAX_HOPPER_GEMM_CUBINS", raising=False)
    came = value if name in ("GPU", "ON_FALLBACK") else str(tmp_path / value)
    monkeypatch.setenv(f"JAX_HOPPER_GEMM_{name}", came)
    with pytest.raises(error) as raised:
        act(monkeypatch)
    message = str(raised.value)
    assert f"JAX_HOPPER_GEMM_{name}" in message and came in message and expected in message


def test_a_folder_that_build_is_to_fill_may_be_named_already(monkeypatch, tmp_path):
    folder = tmp_path / "new" / "cubins"
    monkeypatch.setenv("JAX_HOPPER_GEMM_CUBINS", str(folder))
    assert cubin.build([], folder=folder, progress=False).failures == {}
    assert cubin.prebuilt().folder == folder


def test_empty_variables_count_as_unset(monkeypatch):
    for name in ("CUBINS", "CACHE", "LIBRARY", "TABLE", "GPU"):
        monkeypatch.setenv(f"JAX_HOPPER_GEMM_{name}", "")
    assert cubin.prebuilt().folder.name == "_cubins"
    assert cubin.cache_dir().name == "jax_hopper_gemm"
    read_tables(monkeypatch)
    ffi_library.library_path()
    assert dispatch.absent_device() == dispatch.H200


@pytest.mark.slow
def test_wrong_variables_do_not_disturb_the_import(tmp_path):
    names = ("CUBINS", "CACHE", "TABLE")
    done = subprocess.run(
        [sys.executable, "-c", "import jax_hopper_gemm"],
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path)}
        | {f"JAX_HOPPER_GEMM_{name}": str(tmp_path / "absent") for name in names},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
