"""The imports of the package are those that docs/architecture.md grants."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]
PACKAGE = "jax_hopper_gemm"
SOURCES = sorted((ROOT / PACKAGE).rglob("*.py"))


@dataclass(frozen=True)
class Grant:
    """What one module (a row of the table) may import."""

    anywhere: frozenset[str]
    inside_functions: frozenset[str]


@dataclass(frozen=True)
class Import:
    """One name imported: a module of the package, or the top level of another package."""

    name: str
    line: int
    inside_function: bool


def read_table(text: str) -> dict[str, Grant]:
    """Returns the grants of the "Who may import whom" table, by module."""
    section = text.split("## Who may import whom")[1].split("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| `")]
    cells = [[frozenset(re.findall(r"`([\w/]+)`", cell)) for cell in row] for row in rows]
    return {next(iter(module)): Grant(ours | others, lazy) for module, ours, others, lazy in cells}


def module_of(path: Path) -> str:
    """Returns the row of the table that `path` (relative to the package) belongs to."""
    return path.with_suffix("").parts[0]


def imports_of(source: str, path: Path) -> list[Import]:
    """Returns what `source`, the text of `path` in the package, imports."""
    found: list[Import] = []
    here = (PACKAGE, *path.parts[:-1])

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return
        names: list[tuple[str, ...]] = []
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) + 1 - node.level] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            # `from . import x` names modules; of a folder they may be attributes, too.
            names = [(*base, a.name) for a in node.names]
        for name in dict.fromkeys(names):
            top = name[0]
            if top == PACKAGE:
                top = module_of(Path(*name[1:] or ["__init__"]))
            found.append(Import(top, getattr(node, "lineno", 0), inside))
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(source), False)
    return found


def breaches(source: str, path: Path, table: dict[str, Grant]) -> list[str]:
    """Returns the imports in `source` that `table` does not grant, as text."""
    module = module_of(path)
    grant = table[module]
    found = []
    for item in imports_of(source, path):
        allowed = grant.anywhere | (grant.inside_functions if item.inside_function else frozenset())
        if item.name not in allowed | sys.stdlib_module_names | {module}:
            where = "inside a function" if item.inside_function else "at the top"
            found.append(f"{path}:{item.line} imports {item.name} {where}")
    return found


TABLE = read_table((ROOT / "docs" / "architecture.md").read_text())


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / PACKAGE)))
def test_imports_are_granted_by_the_table(path: Path):
    assert breaches(path.read_text(), path.relative_to(ROOT / PACKAGE), TABLE) == []


def test_every_row_of_the_table_exists():
    present = {module_of(path.relative_to(ROOT / PACKAGE)) for path in SOURCES}
    assert set(TABLE) == present


def test_every_grant_is_used():
    unused = dict(TABLE)
    for path in SOURCES:
        relative = path.relative_to(ROOT / PACKAGE)
        module = module_of(relative)
        grant, imported = unused[module], imports_of(path.read_text(), relative)
        unused[module] = Grant(
            grant.anywhere - {item.name for item in imported if not item.inside_function},
            grant.inside_functions - {item.name for item in imported if item.inside_function},
        )
    assert {m: g for m, g in unused.items() if g.anywhere or g.inside_functions} == {}


def test_a_folder_imports_only_what_stands_above_it():
    """`__init__` is imported by nothing, so its row may stand anywhere."""
    rows = list(TABLE)
    for i, (module, grant) in enumerate(TABLE.items()):
        below = (grant.anywhere | grant.inside_functions) & set(rows[i:])
        assert not below, f"{module} may import {sorted(below)}, which stand below it"


def test_the_table_is_short_and_the_root_holds_folders_alone():
    assert len(TABLE) <= 20
    root = {path.name for path in (ROOT / PACKAGE).iterdir() if path.suffix in (".py", ".typed")}
    assert root == {"__init__.py", "__main__.py", "py.typed"}


MOST_PARAMETERS = 8

# What users call, in the image of JAX's and Flax's functions.
PUBLIC = {
    "collective/products.py": {"all_gather_matmul"},
    "moe/layer.py": {"mixture_of_experts", "grouped_mlp"},
    "moe/router.py": {"route_tokens"},
    "nn/layers.py": {"__init__"},
    "nn/moe.py": {"__init__", "run"},
    "ops/dense.py": {"matmul", "dot_general", "einsum"},
    "ops/gated.py": {"gated_linear_unit"},
    "ops/ragged.py": {"ragged_dot", "ragged_dot_general"},
}
# A kernel's parameters are what is launched; the tuner is told how to measure.
LONG = {
    "dispatch/tuner.py": {"tuned_entry"},
    "kernels/epilogue/driver.py": {"finish_subtile"},
    "kernels/skeleton.py": {"launch", "kernel"},
}


def functions_with_many_parameters(source: str) -> set[str]:
    """Returns the names of functions of more than `MOST_PARAMETERS`, `self` and `cls` aside."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parameters = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            if len([x for x in parameters if x.arg not in ("self", "cls")]) > MOST_PARAMETERS:
                names.add(node.name)
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / PACKAGE)))
def test_no_function_takes_more_than_eight_parameters(path: Path):
    name = path.relative_to(ROOT / PACKAGE).as_posix()
    allowed = PUBLIC.get(name, set()) | LONG.get(name, set())
    assert functions_with_many_parameters(path.read_text()) <= allowed


def test_parameters_are_counted():
    eight, nine = (", ".join(f"p{i}" for i in range(n)) for n in (8, 9))
    source = f"def f({eight}): ...\ndef g({nine}): ...\nclass A:\n    def h(self, {eight}): ..."
    assert functions_with_many_parameters(source) == {"g"}
    assert functions_with_many_parameters(f"def f(a, *, {eight}): ...") == {"f"}


@pytest.mark.parametrize(
    ("path", "source", "imported"),
    [
        ("dispatch/cost.py", "import jax.numpy as jnp", "jax at the top"),
        ("dispatch/cost.py", "from ..cubin import digest_of", "cubin at the top"),
        ("dispatch/cost.py", "from jax_hopper_gemm.cubin import digest_of", "cubin at the top"),
        ("launch/plan.py", "def f():\n    from .. import dispatch", "dispatch inside a function"),
        ("ops/dense.py", "def f():\n    from .. import kernels", "kernels inside a function"),
        ("cubin/compiler.py", "from .. import kernels", "kernels at the top"),
        ("kernels/skeleton.py", "import jax", "jax at the top"),
        ("primitives/dot.py", "import cutlass.cute as cute", "cutlass at the top"),
        ("gemm/problem.py", "from jax_hopper_gemm import ops", "ops at the top"),
        ("lowering/fallback.py", "import jax_hopper_gemm", "__init__ at the top"),
        ("sharding/custom_call.py", "from ..primitives.dot import f", "primitives at the top"),
        ("sharding/custom_call.py", "from .. import primitives", "primitives at the top"),
    ],
)
def test_a_breach_is_found(path: str, source: str, imported: str):
    (found,) = breaches(source, Path(path), TABLE)
    assert found.endswith(f"imports {imported}")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("dispatch/cost.py", "import math\nfrom ..gemm.spec import GemmSpec\nfrom . import table"),
        ("cubin/compiler.py", "def f():\n    from .. import kernels"),
        ("primitives/fused_dot.py", "from ..sharding.custom_call import emit\nfrom .dot import f"),
        ("ops/dense.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import flax"),
    ],
)
def test_a_granted_import_passes(path: str, source: str):
    assert breaches(source, Path(path), TABLE) == []
