"""Programs and kernels of another version of this package."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.cubin_samples import (
    SPEC,
    sample_cubin,
    sample_manifest,
)
from support.cubin_store import DIGEST

from jax_hopper_gemm import cubin
from jax_hopper_gemm.cubin import CubinError, lookup, store

pytestmark = [pytest.mark.pure, pytest.mark.usefixtures("folders")]


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
    entries = cubin.user_cache().entries()
    assert [(d, e.manifest.name) for d, e in entries.items()] == [("a" * 64, manifest.entry)]
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
