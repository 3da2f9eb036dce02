"""Fuzzers run for a moment; `python tests/fuzz.py` runs them for as long as one likes."""

from __future__ import annotations

import random

import fuzz
import pytest
from fuzz_files import damaged, tampered

pytestmark = pytest.mark.pure
# Of these, test_chip.py, ffi/test_launch_checks.py, test_tracing.py, test_accelerate_random.py and
# test_many_shapes.py run what is in the first trials.
ELSEWHERE = {"products", "calls", "epilogues", "programs", "shapes"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in fuzz.FUZZERS if name not in ELSEWHERE])
def test_fuzzers_find_nothing(name):
    assert fuzz.run(name, seconds=0.3) > 0


def test_a_failure_names_its_seed(monkeypatch):
    def trial(seed: int) -> None:
        assert seed < 7, "too much"

    monkeypatch.setitem(fuzz.FUZZERS, "seven", lambda folder, patch: trial)
    with pytest.raises(AssertionError, match="seven fails at --seed 7"):
        fuzz.run("seven", seconds=60, seed=2)


def test_what_is_damaged_differs_and_is_the_same_for_a_seed():
    document = {"a": [1, {"b": 2}], "c": "d"}
    found = [tampered(random.Random(seed), document) for seed in range(100)]
    assert sum(x != document for x in found) > 90 and document == {"a": [1, {"b": 2}], "c": "d"}
    again = [damaged(random.Random(seed), b"content") for seed in range(100)]
    assert again == [damaged(random.Random(seed), b"content") for seed in range(100)]
    assert sum(x != b"content" for x in again) > 90
