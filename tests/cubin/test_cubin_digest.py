"""A digest names one kernel: the same everywhere, another for whatever changes the code."""

from __future__ import annotations

import ast
import re
import shutil
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest
from support.compiling import skip_without_compiler
from support.cubin_samples import HIDE_CUTLASS, OTHER_VALUES, SPEC, run_python

from jax_hopper_gemm.cubin import digest, digest_of

pytestmark = pytest.mark.pure

PACKAGE = Path(digest.__file__).parents[1]
COMPILED = (
    SPEC,
    replace(SPEC, tile_scheduler="dynamic", warp_schedule="pingpong", grouped="m", cluster_m=1),
)


def test_digest_is_64_hexadecimal_digits():
    assert re.fullmatch("[0-9a-f]{64}", digest_of(SPEC))


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "1"])
def test_other_processes_find_the_same_digest(seed):
    source = "from support.cubin_samples import SPEC; from jax_hopper_gemm.cubin import digest_of\n"
    assert run_python(source + "print(digest_of(SPEC))", PYTHONHASHSEED=seed).strip() == digest_of(
        SPEC
    )


@pytest.mark.slow
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


@pytest.mark.slow
def test_cubin_imports_neither_cutlass_nor_cuda_nor_jax():
    source = """
    import sys
    import jax_hopper_gemm.gemm.spec
    before = set(sys.modules)
    import jax_hopper_gemm.cubin
    print(sorted({name.split(".")[0] for name in set(sys.modules) - before}))
    """
    imported = run_python(source)
    assert not {"cutlass", "cuda", "jax", "rich"} & set(re.findall(r"\w+", imported))


@pytest.mark.parametrize("field", [field.name for field in fields(SPEC)])
def test_each_field_of_the_spec_changes_the_digest(field):
    assert digest_of(replace(SPEC, **{field: OTHER_VALUES[field]})) != digest_of(SPEC)


@pytest.mark.parametrize("constant", ["CUTLASS_DSL_VERSION", "TARGET"])
def test_compiler_and_target_change_the_digest(monkeypatch, constant):
    before = digest_of(SPEC)
    monkeypatch.setattr(digest, constant, "another")
    assert digest_of(SPEC) != before


# What decides the digest of the sources, in a package of three files.

SAMPLE = {
    "kernels/__init__.py": "from .compile import compile_cubin\n",
    "kernels/compile.py": '''"""Compiles."""
import cutlass
from .. import tables
from ..spec import Spec, side

LIMIT = 3


def compile_cubin(spec: Spec, n: cutlass.Constexpr):
    """Returns a cubin."""
    assert spec.size < LIMIT, f"{spec.size} is too much"
    if n == "static":
        raise ValueError(f"{n} is not served") from None
    return tables.ROW * spec.size + side(n)
''',
    "spec.py": '''"""What is compiled."""
from dataclasses import dataclass
from math import sqrt
from .tables import COLUMN as column, WIDTH

UNUSED = 10
DEEP = 20
STEPS = {}
STEPS["a"] = 30


@dataclass
class Spec:
    """A kernel."""

    size: int = 40

    def legal(self) -> bool:
        return self.size < 50


def side(x: int) -> float:
    name = f"side_{x!r:>{column}}_{'' if x else None}"
    return sqrt(x + column) + deep(name)


def deep(x):
    y: int = 60  # a comment
    return -x * DEEP + y


def violations(spec):
    return [UNUSED, WIDTH, len(STEPS)]
''',
    "tables.py": "ROW = 70\nCOLUMN = 80\nWIDTH: int = 90\n",
}
IDLE_EDITS = [
    ("kernels/compile.py", '"""Compiles."""', '"""Compiles a kernel."""'),
    ("kernels/compile.py", '"""Returns a cubin."""', ""),
    ("kernels/compile.py", "is too much", "exceeds the limit"),
    ("kernels/compile.py", "is not served", "is not served; use another"),
    ("kernels/compile.py", "spec.size + side(n)", "(spec.size) + side(\n        n)"),
    ("kernels/compile.py", '"static"', "'static'"),
    ("kernels/compile.py", "3", "0x3"),
    ("spec.py", '"""A kernel."""', '"""One kernel."""'),
    ("spec.py", "# a comment", "# another"),
    ("spec.py", "x: int", "x: float"),
    ("spec.py", "-> float", "-> int"),
    ("spec.py", "size: int", "size: float"),
    ("spec.py", "y: int", "y: float"),
    ("spec.py", "10", "11"),
    ("spec.py", "UNUSED, WIDTH", "WIDTH, UNUSED"),
]
DECIDING_EDITS = [
    ("kernels/compile.py", "LIMIT = 3", "LIMIT = 4"),
    ("kernels/compile.py", "<", "<="),
    ("kernels/compile.py", "static", "dynamic"),
    ("kernels/compile.py", "cutlass.Constexpr", "cutlass.Int32"),
    ("kernels/compile.py", "tables.ROW * spec.size", "spec.size * tables.ROW"),
    ("spec.py", "20", "21"),
    ("spec.py", "30", "31"),
    ("spec.py", "40", "41"),
    ("spec.py", "50", "51"),
    ("spec.py", "60", "61"),
    ("spec.py", "-x", "x"),
    ("spec.py", "20", "20.0"),
    ("spec.py", "math import sqrt", "math import exp as sqrt"),
    ("spec.py", "COLUMN as", "ROW as"),
    ("spec.py", "@dataclass", "@dataclass(frozen=True)"),
    ("tables.py", "70", "71"),
    ("tables.py", "80", "81"),
]


@pytest.fixture
def sample(tmp_path) -> Path:
    for name, text in SAMPLE.items():
        path = tmp_path / "sample" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "sample"


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_every_python_finds_the_same_digest(sample):
    """Their syntax trees differ; a kernel that was built under one serves the others."""
    expected = "a2fafd81a86305144305dce5d2cddc2bbcf39a9e029ce2287bb4b9e0e6a19916"
    assert digest.source_digest(sample) == expected


@pytest.mark.parametrize("name, old, new", IDLE_EDITS)
def test_what_decides_no_byte_keeps_the_digest(sample, name, old, new):
    before = digest.source_digest(sample)
    edit(sample / name, old, new)
    assert digest.source_digest(sample) == before


@pytest.mark.parametrize("name, old, new", DECIDING_EDITS)
def test_what_may_decide_a_byte_changes_the_digest(sample, name, old, new):
    before = digest.source_digest(sample)
    edit(sample / name, old, new)
    assert digest.source_digest(sample) != before


def test_a_whole_module_counts_where_its_name_is_imported(sample):
    """`from .. import tables`: any of its names may be read by attribute."""
    before = digest.source_digest(sample)
    edit(sample / "tables.py", "90", "91")
    assert digest.source_digest(sample) != before


# The same of this package.


@pytest.fixture
def package(tmp_path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "_lib", "_cubins")
    return Path(shutil.copytree(PACKAGE, tmp_path / "jax_hopper_gemm", ignore=ignored))


class Rewording(ast.NodeTransformer):
    """Changes docstrings and the messages of errors."""

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return ast.Expr(ast.Constant("Another text."))
        return self.generic_visit(node)

    def visit_Assert(self, node):
        return ast.Assert(self.visit(node.test), ast.Constant("other words"))

    def visit_Raise(self, node):
        if isinstance(node.exc, ast.Call):
            return ast.Raise(ast.Call(node.exc.func, [ast.Constant("other words")], []))
        return node


class Increment(ast.NodeTransformer):
    """Adds 1 to every number."""

    def visit_Constant(self, node):
        if isinstance(node.value, int | float) and not isinstance(node.value, bool):
            return ast.Constant(node.value + 1)
        return node


def rewrite(package: Path, module: str, transformer: ast.NodeTransformer) -> None:
    """Writes a module anew, without its comments and its formatting."""
    path = digest.file_of(package, module)
    tree = transformer.visit(ast.parse(path.read_text()))
    path.write_text(ast.unparse(ast.fix_missing_locations(tree)))


def reword(package: Path) -> None:
    for module in {module for module, _ in digest.deciding_statements(package)}:
        rewrite(package, module, Rewording())


def test_other_words_in_this_package_keep_its_digest(package):
    reword(package)
    assert digest.source_digest(package) == digest.kernel_source_digest()


def test_other_numbers_in_any_module_of_this_package_change_its_digest(package, monkeypatch):
    read = digest._read

    @cache  # of 90 packages, which differ in a module each
    def statements(module: str, source: bytes) -> list[digest.Statement]:
        return list(read(package, module))

    def read_once(package: Path, module: str) -> list[digest.Statement]:
        return statements(module, digest.file_of(package, module).read_bytes())

    monkeypatch.setattr(digest, "_read", read_once)
    found = digest.deciding_statements(package)
    modules = {module for (module, _), each in found.items() if re.search(r"value=\d", each.text)}
    assert {"kernels.skeleton", "kernels.epilogue.reductions"} < modules
    for module in modules:
        path = digest.file_of(package, module)
        original = path.read_text()
        rewrite(package, module, Increment())
        assert digest.source_digest(package) != digest.kernel_source_digest(), module
        path.write_text(original)


def test_the_digest_covers_what_kernels_use_and_no_more():
    found = digest.deciding_statements(PACKAGE)
    assert {"kernels", "kernels.compile", "kernels.skeleton"} < {module for module, _ in found}
    names = {statement.name for statement in found.values()}
    assert {"GemmSpec", "EPI_TILE_M", "tile_at", "EpilogueGraph", "Arithmetic"} < names
    assert not {"violations", "max_accumulators", "epilogue_registers", "RasterOrder"} & names


def test_definitions_outside_of_kernels_take_effect_by_name_alone():
    """Else one that no kernel mentions could decide bytes, by a decorator or an absolute import."""
    modules = {module for module, _ in digest.deciding_statements(PACKAGE)}
    for module in modules:
        for node in ast.walk(ast.parse(digest.file_of(PACKAGE, module).read_text())):
            if isinstance(node, ast.Import):
                assert not [x for x in node.names if x.name.startswith(PACKAGE.name)], module
            elif isinstance(node, ast.ImportFrom) and not node.level:
                assert not str(node.module).startswith(PACKAGE.name), module
            elif isinstance(node, ast.ClassDef | ast.FunctionDef) and "kernels" not in module:
                decorators = {ast.unparse(each).split("(")[0] for each in node.decorator_list}
                assert decorators <= PLAIN_DECORATORS, f"{module}.{node.name}"


PLAIN_DECORATORS = {
    "cached_property", "classmethod", "dataclass", "functools.cache", "functools.lru_cache",
    "lru_cache", "property", "staticmethod",
}  # fmt: skip


@pytest.mark.compile
def test_other_words_keep_the_bytes_of_kernels(package):
    """What the digest passes over decides nothing, though CuTeDSL reads the sources, too."""
    skip_without_compiler()
    source = f"""
    import sys
    sys.path.insert(0, {str(package.parent)!r})
    from jax_hopper_gemm.cubin.compiler import compile_spec
    from jax_hopper_gemm import cubin
    from jax_hopper_gemm.gemm.spec import GemmSpec
    assert cubin.__file__.startswith({str(package)!r})
    for text in {[spec.to_json() for spec in COMPILED]!r}:
        print(compile_spec(GemmSpec.from_json(text)).manifest.cubin_sha256)
    """
    before = run_python(source)
    reword(package)
    assert run_python(source) == before
