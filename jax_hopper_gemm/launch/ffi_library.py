"""Binds the FFI library `ffi/` with ctypes, and answers it when it meets an unknown kernel.

The library is looked for in `JAX_HOPPER_GEMM_LIBRARY`, then in the package's `_lib/`, then where
pip installed the package (an editable install keeps its sources elsewhere).
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import threading
from pathlib import Path

FILE_NAME = "libjax_hopper_gemm.so"
LIBRARY_VARIABLE = "JAX_HOPPER_GEMM_LIBRARY"

# int resolver(digest, spec_json, uint64_t* kernel_out, char* error_out, size_t error_capacity)
_Resolver = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_char),
    ctypes.c_size_t,
)


class NativeLibraryError(RuntimeError):
    """The FFI library is missing or cannot be loaded."""


class ForkedError(RuntimeError):
    """The process was forked from one that had kernels loaded."""


def library() -> ctypes.CDLL:
    """Returns the FFI library, loaded and given its resolver once a process.

    Its symbols are `JhgLaunchInstantiate` and `JhgLaunchExecute`, the stages of the launch, and
    `JhgLaunchTypeId()` and `JhgLaunchTypeInfo()`, which return the addresses that
    `jax.ffi.register_ffi_type` wants for the launch's state.

    Raises:
      NativeLibraryError: it is missing, or not a library of this package.
    """
    global _library
    with _loading:
        if _library is None:
            _library = _load(library_path())
        return _library


_library: ctypes.CDLL | None = None
_loading = threading.Lock()


def library_path() -> Path:
    """Returns where the FFI library lies; NativeLibraryError: nowhere."""
    override = os.environ.get(LIBRARY_VARIABLE)
    # NOTE: absolute, since dlopen looks for a bare name among the system's libraries alone.
    candidates = [Path(override).absolute()] if override else _candidates()
    for path in candidates:
        if path.is_file():
            return path
    if override:
        raise NativeLibraryError(
            f"{LIBRARY_VARIABLE} is {override!r}, and {candidates[0]} is no file; expected a "
            f"{FILE_NAME}. Name one, or unset the variable to use the installed one."
        )
    raise NativeLibraryError(
        f"{FILE_NAME} is at none of: {', '.join(map(str, candidates))}. Install the package "
        "(python -m pip install .), or build the library into the source tree: "
        "cmake -S ffi -B build/ffi && cmake --build build/ffi && cmake --install build/ffi "
        f"--prefix . Or name the file in {LIBRARY_VARIABLE}."
    )


def _candidates() -> list[Path]:
    beside = Path(__file__).parents[1] / "_lib" / FILE_NAME
    try:
        installed = importlib.metadata.distribution("jax-hopper-gemm")
    except importlib.metadata.PackageNotFoundError:
        return [beside]
    return [beside, Path(str(installed.locate_file(f"jax_hopper_gemm/_lib/{FILE_NAME}")))]


def _load(path: Path) -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(str(path))
        for accessor in (loaded.JhgLaunchTypeId, loaded.JhgLaunchTypeInfo):
            accessor.argtypes = ()
            accessor.restype = ctypes.c_void_p
        loaded.jhg_set_resolver.argtypes = (_Resolver,)
        loaded.jhg_set_resolver.restype = None
    except (OSError, AttributeError) as error:
        way_out = "Build it again (python -m pip install .)."
        if override := os.environ.get(LIBRARY_VARIABLE):
            way_out = (
                f"{LIBRARY_VARIABLE} is {override!r}; expected a {FILE_NAME} of this version. "
                "Name one, or unset the variable to use the installed one."
            )
        raise NativeLibraryError(f"{path} cannot be used: {error}. {way_out}") from error
    loaded.jhg_set_resolver(_resolve)
    return loaded


_process_with_kernels: int | None = None


def refuse_fork() -> None:
    """Raises ForkedError if kernels were loaded in a process that this one was forked from.

    CUDA does not survive a fork: what XLA does in such a process fails or waits forever.
    """
    if _process_with_kernels not in (None, os.getpid()):
        raise ForkedError(
            f"this process ({os.getpid()}) was forked from one ({_process_with_kernels}) that had "
            "loaded kernels, and CUDA does not work in forks of a process that uses it. Start "
            "workers with multiprocessing.get_context('spawn') or 'forkserver', or fork them "
            "before the first product runs."
        )


@_Resolver
def _resolve(digest, spec_json, kernel_out, error_out, error_capacity) -> int:
    """Answers the library, on a thread of XLA's: 0 and a CUkernel, or 1 and a message."""
    global _process_with_kernels
    try:
        from .. import cubin

        refuse_fork()
        attributes = (text.decode(errors="backslashreplace") for text in (digest, spec_json))
        kernel_out[0] = cubin.load(*attributes).handle
        _process_with_kernels = os.getpid()
    except BaseException as error:  # nothing may unwind into C++
        try:
            message = str(error)
        except BaseException:
            message = ""
        text = (message or type(error).__name__).encode(errors="backslashreplace")
        whole = text[: error_capacity - 1].decode(errors="ignore").encode()  # no half character
        ctypes.memmove(error_out, whole + b"\0", len(whole) + 1)
        return 1
    return 0
