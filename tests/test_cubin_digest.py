"""A digest names one kernel: the same everywhere, another for whatever changes the code."""

from __future__ import annotations

import re
import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest
from support.cubin_samples import HIDE_CUTLASS, OTHER_VALUES, SPEC, run_python

from jax_hopper_gemm.cubin import digest, digest_of

PACKAGE = Path(digest.__file__).parents[1]


def test_digest_is_64_hexadecimal_digits():
    assert re.fullmatch("[0-9a-f]{64}", digest_of(SPEC))


@pytest.mark.parametrize("seed", ["0", "1"])
def test_other_processes_find_the_same_digest(seed):
    source = "from support.cubin_samples import SPEC; from jax_hopper_gemm.cubin import digest_of\n"
    assert run_python(source + "print(digest_of(SPEC))", PYTHONHASHSEED=seed).strip() == digest_of(
        SPEC
    )


def test_digest_needs_no_cutlass():
    source = (
        HIDE_CUTLASS
        + """
    from support.cubin_samples import SPEC
    from jax_hopper_gemm.cubin import digest_of
    print(digest_of(SPEC))
    """
    )
    assert run_python(source).strip() == digest_of(SPEC)


def test_cubin_imports_neither_cutlass_nor_cuda_nor_jax():
    source = """
    import sys
    import jax_hopper_gemm.gemm.spec
    before = set(sys.modules)
    import jax_hopper_gemm.cubin
    print(sorted({name.split(".")[0] for name in set(sys.modules) - before}))
    """
    imported = run_python(source)
    assert not {"cutlass", "cuda", "jax", "tqdm"} & set(re.findall(r"\w+", imported))


@pytest.mark.parametrize("field", [field.name for field in fields(SPEC)])
def test_each_field_of_the_spec_changes_the_digest(field):
    assert digest_of(replace(SPEC, **{field: OTHER_VALUES[field]})) != digest_of(SPEC)


@pytest.mark.parametrize("constant", ["CUTLASS_DSL_VERSION", "TARGET"])
def test_compiler_and_target_change_the_digest(monkeypatch, constant):
    before = digest_of(SPEC)
    monkeypatch.setattr(digest, constant, "another")
    assert digest_of(SPEC) != before


def test_sources_of_the_kernels_change_the_digest(tmp_path):
    package = tmp_path / "package"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    original = digest.source_digest(package)
    assert original == digest.kernel_source_digest()

    seen = {original}
    for path in [package / "spec.py", package / "problem.py", package / "kernels" / "gemm.py"]:
        path.write_text(path.read_text() + "# changed\n")
        seen.add(digest.source_digest(package))
    (package / "kernels" / "mainloop").rename(package / "kernels" / "loop")
    seen.add(digest.source_digest(package))
    assert len(seen) == 5

    now = digest.source_digest(package)
    (package / "plan.py").write_text("# launches, compiles nothing\n")
    assert digest.source_digest(package) == now


def test_digest_covers_all_that_the_kernels_import():
    """Else a changed constant would find the cubin that was built with the old one."""
    sources = [*(PACKAGE / "kernels").rglob("*.py"), *(PACKAGE / name for name in digest.CONSTANTS)]
    imported = set()
    for path in sources:
        up = "." * len(path.relative_to(PACKAGE).parts)
        imported |= set(re.findall(rf"^from {re.escape(up)}(\w+) import", path.read_text(), re.M))
    assert imported
    assert {f"{name}.py" for name in imported} <= set(digest.CONSTANTS)
