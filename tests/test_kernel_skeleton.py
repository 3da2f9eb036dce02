"""What holds of the sources of `kernels/`, so that a policy stays one class and one line."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import jax_hopper_gemm

pytestmark = pytest.mark.pure

KERNELS = Path(jax_hopper_gemm.__file__).parent / "kernels"
SOURCES = sorted(KERNELS.rglob("*.py"))
POLICIES = {  # fields and properties of a spec that stand for a policy
    "epilogue", "gathered", "grouped", "indexed", "paired", "tile_scheduler", "warp_schedule",
    "zero_fill_warp",
}  # fmt: skip


def attributes_of_spec(source: str) -> set[str]:
    """Returns the attributes that a module reads of `spec`, `self.spec` or `s`."""
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("spec", "self.spec", "s")
    }


def policies_tested(source: str) -> set[str]:
    """Returns the policies that a module asks for, but for those that it looks up in a table."""
    names = attributes_of_spec(source)
    looked_up = {
        node.slice.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Attribute)
    }
    return names & POLICIES - looked_up


def test_the_skeleton_asks_for_no_policy():
    assert policies_tested((KERNELS / "skeleton.py").read_text()) == set()


def test_a_policy_that_is_asked_for_is_found():
    assert policies_tested("def f(s):\n    if s.gathered == 'a': g()") == {"gathered"}
    assert policies_tested("x = TABLE[spec.warp_schedule](spec)") == set()


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_no_function_has_more_than_eight_parameters(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            args = node.args
            count = len(args.posonlyargs) + len(args.args) + len(args.kwonlyargs)
            assert count <= 8, f"{path.name}:{node.lineno} {node.name} has {count}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_every_named_barrier_is_in_the_list(path):
    """A number written elsewhere could meet another use's."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("NamedBarrier"):
            assert "BarrierId." in ast.unparse(node.args[0]), f"{path.name}:{node.lineno}"
