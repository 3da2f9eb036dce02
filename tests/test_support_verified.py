"""The record of verified kernels."""

from __future__ import annotations

import pytest
from support import verified

pytestmark = pytest.mark.pure


def test_verified_merges_and_sorts(tmp_path):
    path = tmp_path / "verified.json"
    verified.merge(path, {"bb": "kernel_b", "cc": "kernel_a"}, "H100")
    verified.merge(path, {"bb": "kernel_b", "aa": "kernel_a"}, "H200")
    entries = verified.read(path)
    assert list(entries) == ["aa", "cc", "bb"]  # by name, then digest
    assert [entries[key]["device"] for key in entries] == ["H200", "H100", "H200"]
    assert verified.missing(path, ["aa", "dd"]) == ["dd"]
    assert len(path.read_text().splitlines()) == len(entries) + 2, "an entry a line"
