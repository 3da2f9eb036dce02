"""The record of verified kernels."""

from __future__ import annotations

import pytest
from support import verified

pytestmark = pytest.mark.pure


def test_verified_merges_and_sorts(tmp_path):
    path = tmp_path / "verified.json"
    a, b, c, d = (2 * digit * verified.DIGITS for digit in "abcd")
    verified.merge(path, {b: "kernel_b", c: "kernel_a"}, "H100")
    verified.merge(path, {b: "kernel_b", a: "kernel_a", d: "kernel_0"}, "H200")
    verified.merge(path, {d: "kernel_0"}, "a GPU with nothing new")
    first, second = verified.read(path).values()
    assert [*first.items()] == [
        (c[: verified.DIGITS], "kernel_a"),
        (b[: verified.DIGITS], "kernel_b"),
    ]
    assert [*second.values()] == ["kernel_0", "kernel_a"], "only what no earlier run has; by name"
    assert [name.split(",")[0] for name in verified.read(path)] == ["H100", "H200"]
    other = a[: verified.DIGITS - 1] + "0" + a[verified.DIGITS :]
    assert verified.missing(path, [a, other]) == [other]
    assert len(path.read_text().splitlines()) == 4 + 2 * 2 + 2, "a kernel a line"
