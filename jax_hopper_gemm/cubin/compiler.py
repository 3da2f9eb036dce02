"""Compiles a kernel with CuTeDSL. Needs no GPU; nothing else here imports `cutlass`."""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
import threading
from pathlib import Path

from ..gemm.kernel_params import KernelSpec
from ..gemm.legality import violations
from ..gemm.spec import GemmSpec
from .digest import CUTLASS_DSL_VERSION, CubinError
from .manifest import derive_manifest
from .store import Compiled


def held_over_forks() -> threading.RLock:
    """Returns a lock that forks wait for: the child finds it free, and whole what it guards.

    NOTE: forks acquire the lock that was made last first, so make the inner one of two before the
    outer one.
    """
    lock = threading.RLock()
    os.register_at_fork(
        before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
    )
    return lock


_compiling = held_over_forks()  # CuTeDSL keeps global state while it traces


def compile_spec(spec: KernelSpec) -> Compiled:
    """Returns the kernel of `spec`, freshly compiled: 0.4 to 2 s.

    Raises:
      CubinError: `spec` is not legal, the compiler is missing, of another version, or fails.
    """
    if isinstance(spec, GemmSpec) and (reasons := violations(spec)):
        raise CubinError(f"no kernel can be compiled for {spec}: {'; '.join(reasons)}")
    require_compiler()
    with _compiling:
        try:
            from .. import kernels

            with tempfile.TemporaryDirectory(prefix="jax_hopper_gemm-") as workdir:
                cubin = kernels.compile_cubin(spec, Path(workdir))
        except Exception as error:  # whatever the compiler raises is news of this spec
            raise CubinError(f"compiling {spec.name} failed: {error}") from error
    return Compiled(cubin, derive_manifest(spec, cubin), "compiled")


def require_compiler() -> None:
    """Raises a CubinError unless CuTeDSL is installed, in the version that digests stand for."""
    install = f'python -m pip install "nvidia-cutlass-dsl=={CUTLASS_DSL_VERSION}"'
    try:
        installed = importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        raise CubinError(f"nvidia-cutlass-dsl is not installed; run {install}") from None
    if installed != CUTLASS_DSL_VERSION:
        raise CubinError(
            f"nvidia-cutlass-dsl is {installed}, but kernels are built with "
            f"{CUTLASS_DSL_VERSION} only; run {install}"
        )
