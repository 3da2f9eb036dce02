"""`gpu/random_programs.py` without a GPU: a program that is right, and one that is not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from support.program_inspection import script_at

pytestmark = [pytest.mark.pure, pytest.mark.usefixtures("launcher")]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, all_fused: None) -> Any:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return script_at(Path(__file__).parent / "gpu" / "random_programs.py")


@pytest.mark.slow
def test_a_wrong_result_is_found(script, monkeypatch):
    seed, launched, wrong = script.outcome(3)
    assert seed == 3 and launched > 1 and not wrong

    def off(step: Any, **_: Any) -> Any:
        return lambda arguments: jax.tree.map(lambda x: x + 1, step(arguments))

    monkeypatch.setattr(script.jhg, "accelerate", off)
    assert "AssertionError" in script.outcome(3)[2]


@pytest.mark.slow
def test_kernels_of_a_portion_are_built(script, monkeypatch, tmp_path, capsys):
    built: list[Any] = []

    class Report:
        failures = ()

    def build(specs: Any, jobs: Any, folder: Path, progress: bool) -> Report:
        assert folder == tmp_path / "cubins"
        built.extend(specs)
        return Report()

    monkeypatch.setattr(script.cubin, "build", build)
    assert script.build(tmp_path, range(3, 5), None) == 0
    assert len(built) == len(set(built)) > 1 and "programs to 4" in capsys.readouterr().out
