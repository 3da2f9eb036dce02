"""The identity of a kernel: one digest of everything that decides its machine code.

Neither CuTeDSL nor a GPU is needed: where only prebuilt kernels are installed, the same digest
comes out as on the machine that built them.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from ..gemm.spec import GemmSpec
from .sources import source_digest

CUTLASS_DSL_VERSION = "4.8.1"  # of nvidia-cutlass-dsl, which pyproject.toml pins as well
TARGET = "sm_90a"


class CubinError(RuntimeError):
    """A kernel could not be found, compiled or loaded; the message names it and the way out."""


def digest_of(spec: GemmSpec) -> str:
    """Returns the name of `spec`'s kernel in every cache: 64 hexadecimal digits."""
    identity = (spec.to_json(), kernel_source_digest(), CUTLASS_DSL_VERSION, TARGET)
    return hashlib.sha256("\0".join(identity).encode()).hexdigest()


@functools.cache
def kernel_source_digest() -> str:
    """Returns the digest of this package's kernels, computed once: it takes some 60 ms."""
    return source_digest(Path(__file__).resolve().parents[1])


def is_digest(text: str) -> bool:
    """Whether `text` is what `digest_of` returns, so that it is safe as a file's name."""
    return re.fullmatch("[0-9a-f]{64}", text) is not None


def check_digest(text: str) -> None:
    """Checks what a program or a caller names a kernel by.

    Raises:
      CubinError: it is no digest.
    """
    if not is_digest(text):
        raise CubinError(
            f"a kernel is named by 64 hexadecimal digits, not by {text[:100]!r}. The program that "
            "asks for it is damaged; trace and lower it again."
        )
