"""The folders of kernels: where they are, who may write them, what is listed and cleared."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from support.cubin_samples import (
    SPEC,
    sample_cubin,
    sample_manifest,
)
from support.cubin_store import DIGEST, forget

from jax_hopper_gemm import cubin
from jax_hopper_gemm.cubin import digest_of, store
from jax_hopper_gemm.cubin.store import Store

pytestmark = [pytest.mark.pure, pytest.mark.usefixtures("folders")]


def _under_a_file(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAX_HOPPER_GEMM_CACHE", str(tmp_path / "file" / "cache"))


def _read_only(tmp_path, monkeypatch):
    """Root may write everywhere, so the refusal is the file system's, not a mode's."""
    (tmp_path / "cache").mkdir()

    def refuse(path, content):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(store, "_replace", refuse)


@pytest.mark.parametrize("make_unwritable", [_under_a_file, _read_only])
def test_an_unwritable_cache_still_gives_kernels_and_warns_once(
    compiles, monkeypatch, caplog, tmp_path, make_unwritable
):
    make_unwritable(tmp_path, monkeypatch)
    other = replace(SPEC, tile_n=64)
    assert cubin.get(SPEC).origin == cubin.get(other).origin == "compiled"
    assert cubin.get(SPEC) is cubin.get(SPEC)
    assert compiles == [SPEC, other]
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 1
    assert "cannot be kept" in warned[0] and "JAX_HOPPER_GEMM_CACHE" in warned[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to a read-only folder")
def test_a_read_only_cache_still_serves_what_it_has(compiles, monkeypatch):
    cubin.get(SPEC)
    cubin.cache_dir().chmod(0o500)
    forget(monkeypatch)
    assert cubin.get(SPEC).origin == f"cache {cubin.cache_dir()}"
    assert cubin.get(replace(SPEC, tile_n=64)).origin == "compiled"
    cubin.cache_dir().chmod(0o700)


def test_a_failed_write_leaves_nothing_behind(compiles, monkeypatch, caplog):
    def fail(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", fail)
    assert cubin.get(SPEC).origin == "compiled"
    assert [path.suffix for path in cubin.cache_dir().iterdir()] == [".lock"]
    assert "No space left" in caplog.text


def test_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("JAX_HOPPER_GEMM_CACHE", "/chosen")
    assert cubin.cache_dir() == Path("/chosen")
    monkeypatch.delenv("JAX_HOPPER_GEMM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cubin.cache_dir() == Path("/xdg/jax_hopper_gemm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/user")
    assert cubin.cache_dir() == Path("/home/user/.cache/jax_hopper_gemm")


def test_a_user_without_a_home_gets_kernels_and_a_warning(compiles, monkeypatch, caplog):
    for variable in ("JAX_HOPPER_GEMM_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert cubin.get(SPEC).origin == "compiled"
    assert "set JAX_HOPPER_GEMM_CACHE to a folder that can be written" in caplog.text
    assert cubin.user_cache().entries() == {} and cubin.clear_cache() == 0


def test_cache_lists_its_kernels_and_clears_only_them(compiles):
    assert cubin.user_cache().entries() == {}
    assert cubin.clear_cache() == 0
    other = replace(SPEC, tile_n=64)
    for spec in (SPEC, other):
        cubin.get(spec)
    entries = cubin.user_cache().entries()
    names = {digest: entry.manifest.name for digest, entry in entries.items()}
    assert names == {digest_of(s): s.name for s in (SPEC, other)}
    nbytes = len(cubin.get(SPEC).cubin)
    assert len(entries[digest_of(SPEC)].cubin) == nbytes

    (cubin.cache_dir() / f"{DIGEST}.cubin.0123456789abcdef.tmp").touch()  # of a killed process
    (cubin.cache_dir() / "mine.txt").touch()
    assert cubin.clear_cache() > 2 * nbytes
    assert [path.name for path in cubin.cache_dir().iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("gone", ["stat", "unlink"])
def test_entries_that_another_process_clears_are_passed_over(compiles, monkeypatch, gone):
    cubin.get(SPEC)
    call, sizes = getattr(Path, gone), []

    def of_another_process(path, *args, **kwargs):
        if path.suffix == ".cubin":
            sizes.append(os.path.getsize(path))
            os.unlink(path)
        return call(path, *args, **kwargs)

    total = sum(path.stat().st_size for path in cubin.cache_dir().iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(Path, gone, of_another_process)
        assert cubin.clear_cache() == total - sum(sizes)
    assert len(sizes) == 1 and not list(cubin.cache_dir().iterdir())


@pytest.mark.parametrize(
    ("mode", "owner", "writers"),
    [
        (0o755, (0, 0), ""),
        (0o775, (0, 0), ""),  # as the umask of a user with a group of their own leaves it
        (0o777, (0, 0), "everybody may write there"),
        (0o1777, (0, 0), "everybody may write there"),
        (0o775, (0, 1), "group {1} may write there"),
        (0o755, (1, 0), "user {0}, whose it is, may write there"),
        (0o777, (1, 1), "user {0}, whose it is, and group {1} and everybody may write there"),
    ],
)
@pytest.mark.parametrize("kind", ["cache", "prebuilt"])
def test_a_folder_that_others_may_write_is_warned_of_once(
    tmp_path, monkeypatch, caplog, mode, owner, writers, kind
):
    theirs = tmp_path / "theirs"
    Store(theirs, kind).write(DIGEST, sample_cubin(), sample_manifest())
    caplog.clear()
    status = os.stat_result((mode, 0, 0, 1, 1234 * owner[0], 1234 * owner[1], 0, 0, 0, 0))
    store._warn_of_writers.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", lambda path, **_: status)
        patch.setattr(os, "geteuid", lambda: 0)
        patch.setattr(os, "getegid", lambda: 0)
        for _ in range(2):
            assert Store(theirs, kind).read(DIGEST)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == bool(writers)
    for message in said:
        assert message.startswith(f"{kind} {theirs}: {writers.format(1234, 1234)}")


def test_files_of_an_entry_honour_the_umask(tmp_path):
    """A folder built by one user is read by others."""
    previous = os.umask(0o022)
    try:
        Store(tmp_path, "prebuilt").write(DIGEST, sample_cubin(), sample_manifest())
    finally:
        os.umask(previous)
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.glob(f"{DIGEST}.*")}
    assert modes == {0o644}
