"""From a spec or a digest to a compiled kernel: the one lookup order.

This process, then kernels built ahead of time, then the user's cache, then the compiler.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ..gemm.kernel_params import KernelSpec, spec_from_json
from .compiler import compile_spec, held_over_forks
from .digest import CubinError, digest_of
from .store import Compiled, Store, user_cache

_log = logging.getLogger(__name__)

_known: dict[str, Compiled] = {}
_looking = held_over_forks()
_told_of_unwritable_cache = False


def get(spec: KernelSpec) -> Compiled:
    """Returns the kernel of `spec`; compiles it where no cache has it.

    Raises:
      CubinError: no cache has it and it cannot be compiled.
    """
    digest = digest_of(spec)
    if digest not in _known:
        with _looking:
            if digest not in _known:
                _known[digest] = _find(digest, spec.to_json()) or _compile(spec, digest)
    return _known[digest]


def resolve(digest: str, spec_json: str) -> Compiled:
    """Returns the kernel that a lowered program names.

    The program may stem from another process or another version of this library, whose kernel
    serves as long as a cache still holds it.

    Args:
      digest: `digest_of` the spec, when the program was lowered.
      spec_json: `to_json()` of the spec.

    Raises:
      CubinError: `digest` is none, or no cache has the kernel, and it cannot be compiled or would
        be another kernel today.
    """
    known = _known.get(digest)
    if known and known.manifest.is_of(spec_json):
        return known
    if found := _find(digest, spec_json):
        _known[digest] = found
        return found
    if spec := spec_of(digest, spec_json):
        return get(spec)
    raise CubinError(
        f"the kernel {digest[:16]} of spec {spec_json} belongs to another version of "
        f"jax_hopper_gemm, and neither {prebuilt()} nor {user_cache()} has it. Trace and lower "
        "the program again with this version, or point JAX_HOPPER_GEMM_CUBINS at the kernels "
        "built with the other one."
    )


def spec_of(digest: str, spec_json: str) -> KernelSpec | None:
    """Returns the spec of a kernel that a program names, if this version makes the same one."""
    try:
        spec = spec_from_json(spec_json)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # of another version
        return None
    return spec if digest_of(spec) == digest else None


def prebuilt() -> Store:
    """Returns the folder of kernels built ahead: `JAX_HOPPER_GEMM_CUBINS`, else the package's.

    Raises:
      CubinError: the variable names no folder.
    """
    chosen = os.environ.get("JAX_HOPPER_GEMM_CUBINS")
    if chosen and not os.path.isdir(chosen):
        raise CubinError(
            f"JAX_HOPPER_GEMM_CUBINS is {chosen!r}, which is no folder; expected one of kernels, "
            "as `python -m jax_hopper_gemm build --out FOLDER` makes it. Name such a folder, or "
            "unset the variable."
        )
    folder = Path(chosen) if chosen else Path(__file__).resolve().parents[1] / "_cubins"
    return Store(folder, "prebuilt")


def _find(digest: str, spec_json: str) -> Compiled | None:
    return prebuilt().read(digest, spec_json) or user_cache().read(digest, spec_json)


def _compile(spec: KernelSpec, digest: str) -> Compiled:
    """Compiles under the cache's lock, so of several processes one does the work."""
    cache = user_cache()
    with cache.locked(digest):
        if found := cache.read(digest, spec.to_json()):
            return found
        try:
            compiled = compile_spec(spec)
        except CubinError as error:
            raise CubinError(
                f"no cubin of {spec.name} (digest {digest[:16]}) in {prebuilt()} or {cache}, and "
                f"it cannot be compiled here: {error}. `python -m jax_hopper_gemm build` builds "
                "the kernels of the dispatch table; it needs no GPU, so it can run elsewhere and "
                f"JAX_HOPPER_GEMM_CUBINS name the result. Spec: {spec.to_json()}"
            ) from error
        try:
            cache.write(digest, compiled.cubin, compiled.manifest)
        except OSError as error:
            _tell_of_unwritable_cache(error)
        return compiled


def _tell_of_unwritable_cache(error: OSError) -> None:
    """Warns once a process; the kernels it compiles live as long as it does."""
    global _told_of_unwritable_cache
    if not _told_of_unwritable_cache:
        _told_of_unwritable_cache = True
        _log.warning(
            "compiled kernels cannot be kept: %s. Each process will compile its own; set "
            "JAX_HOPPER_GEMM_CACHE to a folder that can be written.",
            error,
        )
