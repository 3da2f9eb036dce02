"""The identity of a kernel: one digest of everything that decides its machine code.

Neither CuTeDSL nor a GPU is needed: where only prebuilt kernels are installed, the same digest
comes out as on the machine that built them. Source code is read as syntax trees, from `kernels/`
along its imports. Modules of `kernels/` count whole. Of the others count the definitions that are
mentioned from there, those that these mention, and so on, and every statement that defines nothing.
Docstrings, comments, formatting and messages of errors do not count; annotations only in
`kernels/`, where CuTeDSL reads them.

NOTE: a definition is found by its name. One that takes effect unnamed, as by a decorator that
registers it, belongs in `kernels/`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..gemm.kernel_params import KernelSpec

CUTLASS_DSL_VERSION = "4.8.1"  # of nvidia-cutlass-dsl, which pyproject.toml pins as well
TARGET = "sm_90a"

# Fields of syntax trees that decide nothing: `ctx` follows from the place, `msg` is an assert's.
_IDLE = frozenset({"ctx", "kind", "msg", "type_comment"})
_ANNOTATIONS = frozenset({"annotation", "returns"})


class CubinError(RuntimeError):
    """A kernel could not be found, compiled or loaded; the message names it and the way out."""


def digest_of(spec: KernelSpec) -> str:
    """Returns the name of `spec`'s kernel in every cache: 64 hexadecimal digits."""
    return digest_of_json(spec.to_json())


def digest_of_json(spec_json: str) -> str:
    """Returns the same of the kernel whose `to_json` this is."""
    identity = (spec_json, kernel_source_digest(), CUTLASS_DSL_VERSION, TARGET)
    return hashlib.sha256("\0".join(identity).encode()).hexdigest()


@functools.cache
def kernel_source_digest() -> str:
    """Returns the digest of this package's kernels, computed once: it takes some 60 ms."""
    return source_digest(Path(__file__).resolve().parents[1])


def is_digest(text: str) -> bool:
    """Whether `text` is what `digest_of` returns, so that it is safe as a file's name."""
    return re.fullmatch("[0-9a-f]{64}", text) is not None


def check_digest(text: str) -> None:
    """Raises a CubinError where a program or a caller names a kernel by what is no digest."""
    if not is_digest(text):
        raise CubinError(
            f"a kernel is named by 64 hexadecimal digits, not by {text[:100]!r}. The program that "
            "asks for it is damaged; trace and lower it again."
        )


class Statement(NamedTuple):
    """A statement at the top of a module."""

    name: str | None  # what it defines; None where it does anything else
    text: str  # its syntax tree as text, without what decides nothing
    uses: set[tuple[str, str]]  # module and name of each definition that it may use


def source_digest(package: Path) -> str:
    """Returns a digest of what decides kernels' bytes in the package of this folder."""
    deciding = deciding_statements(package)
    text = "\0".join(f"{module}\0{deciding[module, i].text}" for module, i in sorted(deciding))
    return hashlib.sha256(text.encode()).hexdigest()


def deciding_statements(package: Path) -> dict[tuple[str, int], Statement]:
    """Returns the statements that `kernels` consists of and uses, by module and place in it."""
    read = functools.cache(lambda module: list(_read(package, module)))
    deciding: dict[tuple[str, int], Statement] = {}
    wanted = [("kernels", "*")]
    seen = set(wanted)
    while wanted:
        module, name = wanted.pop()
        whole = _in_kernels(module) or name == "*"
        for i, statement in enumerate(read(module)):
            if (module, i) not in deciding and (whole or statement.name in (None, name)):
                deciding[module, i] = statement
                wanted += statement.uses - seen
                seen |= statement.uses
    return deciding


def _in_kernels(module: str) -> bool:
    return module.split(".")[0] == "kernels"


def _read(package: Path, module: str) -> Iterator[Statement]:
    for name, node in _definitions(ast.parse(file_of(package, module).read_bytes())):
        tree = _Tree(_IDLE if _in_kernels(module) else _IDLE | _ANNOTATIONS)
        text = tree.text(node)
        uses = {use for each in tree.imports for use in _imported(package, module, each)}
        yield Statement(name, text, uses | {(module, mentioned) for mentioned in tree.names})


def _definitions(module: ast.Module) -> Iterator[tuple[str | None, ast.stmt]]:
    """Yields the module's statements, an import for each name, with what each defines."""
    for node in module.body:
        match node:
            case ast.Import(names=aliases):
                for alias in aliases:
                    yield alias.asname or alias.name.split(".")[0], ast.Import([alias])
            case ast.ImportFrom(names=aliases):
                for alias in aliases:
                    name = None if alias.name == "*" else alias.asname or alias.name
                    yield name, ast.ImportFrom(node.module, [alias], node.level)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node
            case _ if not _is_string(node):
                yield None, node


def _imported(package: Path, module: str, node: ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Yields module and name of what a relative import in `module` names."""
    parts = module.split(".")
    up = node.level - (file_of(package, module).name == "__init__.py")
    source = parts[: len(parts) - up] + (node.module.split(".") if node.module else [])
    for alias in node.names:
        inner = ".".join([*source, alias.name])
        yield (inner, "*") if file_of(package, inner).exists() else (".".join(source), alias.name)


def file_of(package: Path, module: str) -> Path:
    """Returns the file of a module, or where it would lie."""
    path = package.joinpath(*module.split("."))
    inside = path / "__init__.py"  # a folder without one may be left of an older version
    return inside if inside.is_file() else path.with_suffix(".py")


class _Tree:
    """Writes syntax trees as text and gathers what they mention.

    The text is this module's own: that of `ast.dump` differs between versions of Python.
    """

    def __init__(self, ignored: frozenset[str]):
        self.ignored = ignored  # fields that are passed over
        self.names: set[str] = set()  # of variables
        self.imports: list[ast.ImportFrom] = []  # the relative ones

    def text(self, node: Any) -> str:
        """Returns the text of a node, a list or a leaf; of statements that decide something."""
        if not isinstance(node, ast.AST | list):
            return ascii(node)
        if isinstance(node, list):
            return f"[{','.join([self.text(item) for item in node if not _is_string(item)])}]"
        if isinstance(node, ast.Name):
            self.names.add(node.id)
        elif isinstance(node, ast.ImportFrom) and node.level:
            self.imports.append(node)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            return f"Raise({self.text(node.exc.func)})"
        elif isinstance(node, ast.JoinedStr):  # Python 3.12 ends some with an empty string
            values = [value for value in node.values if getattr(value, "value", None) != ""]
            return f"JoinedStr({self.text(values)})"
        text = type(node).__name__ + "("
        for name in node._fields:
            if name not in self.ignored:
                value = getattr(node, name, None)
                if value is not None and value != []:
                    text += f"{name}={self.text(value)},"
        return text + ")"


def _is_string(node: Any) -> bool:
    """Whether a statement is a string alone, as docstrings are."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
