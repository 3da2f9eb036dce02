"""What runs under the memory checker: kernels of every policy, with inputs for all buffers."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
from chip import families
from support import trial
from support.program_inspection import script_at

pytestmark = pytest.mark.pure


@pytest.fixture
def sanitize(monkeypatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))  # to which it appends
    return script_at(Path(__file__).with_name("gpu") / "sanitize.py")


class Memory:
    """A GPU's, of which nothing is kept."""

    def __init__(self, nbytes: int = 0):
        self.nbytes = nbytes

    def allocate(self, nbytes: int) -> Memory:
        return Memory(nbytes)

    def upload(self, array) -> Memory:
        return Memory(array.nbytes)

    def part(self, offset: int) -> Memory:
        return self


def test_every_policy_and_arithmetic_is_run_with_all_its_inputs(sanitize, monkeypatch):
    specs = families.chosen_specs()
    few = sanitize.of_every_policy(specs)
    assert len(few) < 100

    def kinds(specs):
        return {(families.arithmetic_of(spec), spec.grouped) for spec in specs}

    assert kinds(few) == kinds(specs) and len(kinds(specs)) > 40
    for field in ("d_major", "nested", "indexed", "split_k", "short_boxes", "tile_scheduler"):
        chosen, all_of_it = ({getattr(spec, field) for spec in x} for x in (few, specs))
        assert chosen == all_of_it and len(chosen) > 1
    monkeypatch.setattr(trial, "prepare", lambda gpu, problem, spec, order, buffers, sms: buffers)
    for spec in few[::3]:
        problem, order, inputs, num_sms = next(sanitize.random_runs(spec))
        run: Any = trial.uploaded(cast(Any, Memory()), problem, spec, order, inputs, num_sms)
        assert len(run.launch) == len(run.inputs) + len(run.outputs)
