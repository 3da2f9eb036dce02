"""Prebuilt, cache, compiler: the order, and what happens where one of them is broken."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import math
import os
import re
import shutil
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support.cubin_samples import (
    FAKE_COMPILER,
    HIDE_CUTLASS,
    SPEC,
    places_of,
    run_python,
    sample_cubin,
    sample_manifest,
    start_python,
)

from jax_hopper_gemm import cubin
from jax_hopper_gemm.cubin import CubinError, compiler, digest_of, lookup, store
from jax_hopper_gemm.cubin.store import Store
from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph, Node, Result

pytestmark = pytest.mark.pure

DIGEST = digest_of(SPEC)


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Gives each test an empty cache, no prebuilt kernels and a process that knows none."""
    monkeypatch.setenv("JAX_HOPPER_GEMM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "prebuilt").mkdir()
    monkeypatch.setenv("JAX_HOPPER_GEMM_CUBINS", str(tmp_path / "prebuilt"))
    forget(monkeypatch)
    monkeypatch.setattr(lookup, "_told_of_unwritable_cache", False)


def forget(monkeypatch):
    """Makes this process as ignorant as a fresh one."""
    monkeypatch.setattr(lookup, "_known", {})


@pytest.fixture
def compiles(monkeypatch):
    """Replaces kernels/; returns the list of specs that were compiled."""
    compiled = []

    def compile_cubin(spec, workdir):
        compiled.append(spec)
        time.sleep(0.05)
        return sample_cubin(threads=spec.threads, places=places_of(spec))

    kernels = types.SimpleNamespace(compile_cubin=compile_cubin)
    monkeypatch.setitem(sys.modules, "jax_hopper_gemm.kernels", kernels)
    monkeypatch.setattr("jax_hopper_gemm.kernels", kernels, raising=False)
    monkeypatch.setattr(compiler, "require_compiler", lambda: None)
    return compiled


@pytest.fixture
def no_compiler(monkeypatch):
    def refuse():
        raise CubinError("nvidia-cutlass-dsl is not installed; run pip")

    monkeypatch.setattr(compiler, "require_compiler", refuse)


def write_entry(kind: str, code: bytes) -> bytes:
    """Puts a kernel for SPEC into the prebuilt folder or the cache; returns the cubin."""
    content = sample_cubin(code=code)
    target = lookup.prebuilt() if kind == "prebuilt" else lookup.user_cache()
    target.write(DIGEST, content, sample_manifest(cubin=content))
    return content


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


def _flip_a_byte(cubin_path, manifest_path):
    content = bytearray(cubin_path.read_bytes())
    content[100] ^= 1
    cubin_path.write_bytes(content)


def _change_a_fact(cubin_path, manifest_path):
    entry = json.loads(manifest_path.read_text())
    entry["manifest"]["dynamic_smem_bytes"] += 1024
    manifest_path.write_text(json.dumps(entry))


DAMAGE = {
    "byte flipped": _flip_a_byte,
    "fact changed": _change_a_fact,
    "cubin cut short": lambda code, facts: code.write_bytes(code.read_bytes()[:-10]),
    "cubin empty": lambda code, facts: code.write_bytes(b""),
    "cubin gone": lambda code, facts: code.unlink(),
    "manifest cut short": lambda code, facts: facts.write_text(facts.read_text()[:-10]),
    "manifest binary": lambda code, facts: facts.write_bytes(b"\xff\xfe\x00"),
    "manifest a list": lambda code, facts: facts.write_text("[]"),
    "manifest deep": lambda code, facts: facts.write_text('{"manifest":' + 100_000 * "["),
    "manifest no object": lambda code, facts: facts.write_text('{"manifest": "spec"}'),
    "manifest of another version": lambda code, facts: facts.write_text('{"manifest": {"x": 1}}'),
    "manifest gone": lambda code, facts: facts.unlink(),
    "cubin a folder": lambda code, facts: (code.unlink(), code.mkdir(), (code / "x").touch()),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_entry_is_built_again(compiles, monkeypatch, damage):
    intact = cubin.get(SPEC)
    damage(cubin.cache_dir() / f"{DIGEST}.cubin", cubin.cache_dir() / f"{DIGEST}.json")
    forget(monkeypatch)
    again = cubin.get(SPEC)
    assert again.origin == "compiled"
    assert (again.cubin, again.manifest) == (intact.cubin, intact.manifest)
    assert compiles == [SPEC, SPEC]


def test_a_rebuilt_entry_serves_the_next_process(compiles, monkeypatch):
    cubin.get(SPEC)
    _flip_a_byte(cubin.cache_dir() / f"{DIGEST}.cubin", None)
    for origin in ("compiled", f"cache {cubin.cache_dir()}"):
        forget(monkeypatch)
        assert cubin.get(SPEC).origin == origin


def test_a_damaged_prebuilt_kernel_is_reported_and_passed_over(compiles, caplog):
    write_entry("prebuilt", b"prebuilt".ljust(64))
    _flip_a_byte(cubin.prebuilt().folder / f"{DIGEST}.cubin", None)
    assert cubin.get(SPEC).origin == "compiled"
    assert f"{DIGEST} is damaged" in caplog.text
    assert str(cubin.prebuilt().folder) in caplog.text


def copy_entry(folder: Path, source: str, target: str) -> None:
    for suffix in ("cubin", "json"):
        shutil.copy(folder / f"{source}.{suffix}", folder / f"{target}.{suffix}")


OTHERS = [
    replace(SPEC, a_dtype="float16", b_dtype="float16"),
    replace(SPEC, a_major="m"),
    replace(SPEC, tile_m=64),
    replace(SPEC, tile_n=64),
]


@pytest.mark.parametrize("other", OTHERS, ids=lambda spec: spec.name)
def test_another_kernels_files_under_this_name_are_passed_over(
    compiles, monkeypatch, caplog, other
):
    cubin.get(other)
    copy_entry(cubin.cache_dir(), digest_of(other), DIGEST)
    forget(monkeypatch)
    for ask in (lambda: cubin.get(SPEC), lambda: lookup.resolve(DIGEST, SPEC.to_json())):
        found = ask()
        assert (found.origin, found.manifest.spec) == ("compiled", SPEC.to_json())
    assert compiles == [other, SPEC]
    assert f"{DIGEST} is damaged" in caplog.text


def test_an_entry_of_another_spec_is_reported_and_passed_over(compiles, monkeypatch, caplog):
    """One whose checksum is right, as a faulty tool could write it."""
    other = replace(SPEC, a_dtype="float16", b_dtype="float16")
    lookup.user_cache().write(DIGEST, sample_cubin(), sample_manifest(other))
    with pytest.raises(CubinError, match="another version"):
        lookup.resolve(DIGEST, '{"field_of_tomorrow": 1}')
    assert cubin.get(SPEC).origin == "compiled"
    assert cubin.get(SPEC).manifest.spec == SPEC.to_json()
    for part in (str(cubin.cache_dir()), f"{DIGEST} is of", other.to_json(), SPEC.to_json()):
        assert part in caplog.text


def test_a_kernel_of_this_process_is_not_given_for_another_spec(compiles):
    cubin.get(SPEC)
    with pytest.raises(CubinError, match="another version"):
        lookup.resolve(DIGEST, replace(SPEC, a_dtype="float16", b_dtype="float16").to_json())
    assert lookup.resolve(DIGEST, json.dumps(json.loads(SPEC.to_json()), indent=1)) is cubin.get(
        SPEC
    )


@pytest.mark.parametrize("constant", [math.nan, math.inf, -0.0])
def test_specs_are_told_apart_by_every_number_and_equal_to_themselves(constant):
    def spec(value: float):
        graph = EpilogueGraph(nodes=(Node("constant", (), (value,)),), results=(Result("max", 1),))
        return replace(SPEC, epilogue=graph)

    store = Store(cubin.cache_dir(), "cache")
    store.write(DIGEST, sample_cubin(), sample_manifest(spec(constant)))
    assert store.read(DIGEST, spec(constant).to_json())
    assert store.read(DIGEST, spec(0.0).to_json()) is None


NO_DIGESTS = ["", "a" * 63, "A" * 64, "a" * 64 + "\n", "é" * 64, "../" + "a" * 64, "{absolute}"]


@pytest.mark.parametrize("named", NO_DIGESTS)
def test_what_is_no_digest_names_no_file(compiles, tmp_path, named):
    """A program brings the name; an entry that lies there is not loaded, and none is written."""
    lookup.user_cache().write("a" * 64, sample_cubin(), sample_manifest())
    copy_entry(tmp_path, f"cache/{'a' * 64}", "a" * 64)
    named = named.replace("{absolute}", str(tmp_path / ("a" * 64)))
    expected = re.escape(f"64 hexadecimal digits, not by {named!r}"[:100])
    store = lookup.user_cache()
    with pytest.raises(CubinError, match=expected):
        lookup.resolve(named, SPEC.to_json())
    with pytest.raises(CubinError, match=expected):
        store.write(named, sample_cubin(), sample_manifest())
    with pytest.raises(CubinError, match=expected), store.locked(named):
        pass
    assert sorted(path.stem for path in store.folder.iterdir()) == 2 * ["a" * 64]


def test_other_files_in_the_folder_are_no_entries(compiles):
    cubin.get(SPEC)
    (cubin.cache_dir() / "notes.json").write_text("{}")
    assert [entry.digest for entry in cubin.cache_entries()] == [DIGEST]


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


def test_a_lowered_program_finds_its_kernel(compiles):
    assert lookup.resolve(DIGEST, SPEC.to_json()) is cubin.get(SPEC)
    assert compiles == [SPEC]


def test_a_program_of_another_version_runs_while_a_cache_has_its_kernel(no_compiler):
    content = sample_cubin()
    lookup.user_cache().write("a" * 64, content, sample_manifest())
    assert lookup.resolve("a" * 64, SPEC.to_json()).cubin == content


def with_field_of_tomorrow(text: str) -> str:
    return json.dumps(json.loads(text) | {"field_of_tomorrow": 1})


def test_a_kernel_of_another_version_is_found_and_listed(no_compiler):
    """Its spec has a field that this version does not know, and so has its manifest."""
    content, theirs = sample_cubin(), with_field_of_tomorrow(SPEC.to_json())
    manifest = replace(sample_manifest(), spec=theirs)
    cache = lookup.user_cache()
    cache.write("a" * 64, content, manifest)
    path = cache.folder / f"{'a' * 64}.json"
    entry = json.loads(path.read_text())
    entry["manifest"] = json.loads(with_field_of_tomorrow(manifest.to_json()))
    entry["checksum"] = store._checksum("a" * 64, content, store.as_text(entry["manifest"]))
    path.write_text(json.dumps(entry))
    found = lookup.resolve("a" * 64, theirs)
    assert (found.cubin, found.manifest) == (content, manifest)
    assert [(e.digest, e.name) for e in cubin.cache_entries()] == [("a" * 64, manifest.entry)]
    entry["manifest"]["field_of_tomorrow"] = 2
    path.write_text(json.dumps(entry))
    assert cache.read("a" * 64) is None  # the checksum covers what this version does not know


@pytest.mark.parametrize(
    "spec_json",
    [SPEC.to_json(), '{"field_of_tomorrow": 1}', '{"epilogue": {"x": 1}}', "[1]", "not json"],
)
def test_a_program_of_another_version_is_refused_where_no_cache_has_its_kernel(compiles, spec_json):
    with pytest.raises(CubinError, match="another version of jax_hopper_gemm.*lower the program"):
        lookup.resolve("b" * 64, spec_json)
    assert compiles == []


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
    assert cubin.cache_entries() == [] and cubin.clear_cache() == 0


def test_cache_lists_its_kernels_and_clears_only_them(compiles):
    assert cubin.cache_entries() == []
    assert cubin.clear_cache() == 0
    other = replace(SPEC, tile_n=64)
    for spec in (SPEC, other):
        cubin.get(spec)
    entries = cubin.cache_entries()
    assert {(e.digest, e.name) for e in entries} == {(digest_of(s), s.name) for s in (SPEC, other)}
    assert entries[0].nbytes == len(cubin.get(SPEC).cubin)

    (cubin.cache_dir() / f"{DIGEST}.cubin.0123456789abcdef.tmp").touch()  # of a killed process
    (cubin.cache_dir() / "mine.txt").touch()
    assert cubin.clear_cache() > 2 * entries[0].nbytes
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
