"""The wheel holds the package alone, and of `testing` what users and benchmarks need."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jax_hopper_gemm"
NEEDED = ("benchmark", "collectives", "lanes", "lowered", "results", "shapes", "timing")


def test_the_wheel_is_made_of_the_package_alone():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    assert settings["wheel"]["packages"] == [PACKAGE.name]


def test_the_package_holds_no_test():
    names = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    assert not [
        n for n in names if n.name.startswith(("test_", "conftest")) or "support" in n.parts
    ]
    modules = {path.stem for path in (PACKAGE / "testing").glob("*.py")}
    assert modules == {"__init__", *NEEDED}


def test_the_package_imports_nothing_of_the_tests():
    pattern = re.compile(r"^\s*(?:from|import) (?:pytest|support|tests|fake_driver)\b", re.M)
    assert not [path for path in PACKAGE.rglob("*.py") if pattern.search(path.read_text())]
