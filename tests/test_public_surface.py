"""The package's public names, its version, and the types that a checker infers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.program_inspection import run_fresh

import jax_hopper_gemm as jhg

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]
USER = Path(__file__).parent / "data" / "typed_user.py"


def test_dir_lists_public_names_alone():
    names = dir(jhg)
    assert len(names) <= 25 and {"__version__", "nn", *jhg.__all__} == set(names)
    for name in jhg.__all__:
        assert getattr(jhg, name) is not None


@pytest.mark.slow
def test_dir_has_no_inner_module_though_it_can_be_imported():
    source = (
        "import jax_hopper_gemm as jhg\n"
        "import jax_hopper_gemm.gemm.spec, jax_hopper_gemm.dispatch, jax_hopper_gemm.lowering\n"
        "inner = {'gemm', 'dispatch', 'lowering', 'ops', 'importlib', 'annotations', 'Any'}\n"
        "print(jhg.gemm.spec.GemmSpec.__name__, inner & set(dir(jhg)))\n"
    )
    assert run_fresh(source) == "GemmSpec set()\n"


@pytest.mark.slow
def test_layers_are_imported_when_asked_for():
    source = (
        "import sys, jax_hopper_gemm as jhg\n"
        "there = lambda: [m in sys.modules for m in ('jax_hopper_gemm.moe', 'flax')]\n"
        "print(there()); jhg.moe.route; print(there()); jhg.nn.Linear; print(there())\n"
    )
    assert run_fresh(source) == "[False, False]\n[True, False]\n[True, True]\n"


@pytest.mark.slow
def test_star_import_and_version_need_no_flax():
    source = (
        "import sys; sys.modules['flax'] = None\n"
        "from jax_hopper_gemm import *\n"
        "import jax_hopper_gemm as jhg\n"
        "print(matmul is jhg.matmul, bool(jhg.__version__))\n"
        "try: jhg.nn\n"
        "except ModuleNotFoundError as error: print(error)\n"
    )
    out = run_fresh(source)
    assert out.startswith("True True\n") and "jax-hopper-gemm[flax]" in out


def test_version_is_that_of_the_project(monkeypatch):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {project}\n" in (ROOT / "CITATION.cff").read_text()
    monkeypatch.delitem(vars(jhg), "__version__", raising=False)

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert jhg.__version__ == project
    monkeypatch.delitem(vars(jhg), "__version__")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "7.8.9")
    assert jhg.__version__ == "7.8.9"
    monkeypatch.delitem(vars(jhg), "__version__")


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="'jax_hopper_gemm' has no attribute 'matmull'"):
        _ = jhg.matmull  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("pyright"), reason="pyright is in the extra dev")
def test_pyright_infers_the_types_of_a_users_file(tmp_path):
    wrong = tmp_path / "wrong.py"
    text = USER.read_text()
    wrong.write_text(
        text + "assert_type(jhg.matmul(x, w), float)\nfast(x)\njhg.matmul(x, w, b=w)\n"
    )
    right = tmp_path / "right.py"
    right.write_text(text)
    (tmp_path / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{ROOT}"]}}')
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    last = len(text.splitlines())
    errors = [line.split(" - ")[0] for line in done.stdout.splitlines() if " - error: " in line]
    lines = [int(error.split(":")[1]) for error in errors if "wrong.py" in error]
    assert lines == [last + 1, last + 2, last + 3] and len(errors) == 3, done.stdout + done.stderr
