"""Entries that are damaged, or another kernel's, count as absent; only a digest names a file."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.cubin_samples import (
    SPEC,
    sample_cubin,
    sample_manifest,
)
from support.cubin_store import DIGEST, forget, write_entry

from jax_hopper_gemm import cubin
from jax_hopper_gemm.cubin import CubinError, digest_of, lookup
from jax_hopper_gemm.cubin.store import Store
from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph, Node, Result

pytestmark = [pytest.mark.pure, pytest.mark.usefixtures("folders")]


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
    assert [*cubin.user_cache().entries()] == [DIGEST]
