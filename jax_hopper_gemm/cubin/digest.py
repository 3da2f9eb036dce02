"""The identity of a kernel: one digest for everything that determines its machine code.

Neither CuTeDSL nor a GPU is needed: where only prebuilt kernels are installed, the same digest
comes out as on the machine that built them.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from ..gemm.spec import GemmSpec

CUTLASS_DSL_VERSION = "4.8.1"  # of nvidia-cutlass-dsl, which pyproject.toml pins as well
TARGET = "sm_90a"

# What `kernels/` imports from this package, and what that imports.
CONSTANTS = (
    "gemm/epilogue_arithmetic.py", "gemm/epilogue_graph.py", "gemm/wgmma_fragment.py",
    "gemm/group_search.py", "gemm/groups.py", "gemm/problem.py", "gemm/raster.py", "gemm/spec.py",
    "gemm/subscripts.py",
)  # fmt: skip

_PACKAGE = Path(__file__).resolve().parents[1]


def digest_of(spec: GemmSpec) -> str:
    """Returns the name of `spec`'s kernel in every cache: 64 hexadecimal digits."""
    identity = (spec.to_json(), kernel_source_digest(), CUTLASS_DSL_VERSION, TARGET)
    return hashlib.sha256("\0".join(identity).encode()).hexdigest()


@functools.cache
def kernel_source_digest() -> str:
    """Returns a digest over the sources that the machine code is a function of."""
    return source_digest(_PACKAGE)


def source_digest(package: Path) -> str:
    """Returns a digest over `kernels/` and the modules it takes constants from.

    Args:
      package: the folder of the package.
    """
    found = hashlib.sha256()
    sources = [package / name for name in CONSTANTS] + list((package / "kernels").rglob("*.py"))
    for path in sorted(sources):
        content = path.read_bytes()
        found.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode())
        found.update(content)
    return found.hexdigest()


class CubinError(RuntimeError):
    """A kernel could not be found, compiled or loaded; the message names it and the way out."""
