"""The FFI target of the launcher, registered with JAX when this module is imported."""

from __future__ import annotations

import logging
import os
from typing import Any

import jax

from . import ffi_library

_log = logging.getLogger(__name__)

TARGET = "jax_hopper_gemm.v1.launch"


def launcher_violation() -> str | None:
    """Returns why this process can launch no kernel.

    Raises:
      NativeLibraryError: JAX_HOPPER_GEMM_LIBRARY names a library that cannot be loaded.
    """
    try:
        ffi_library.library()
    except ffi_library.NativeLibraryError as error:
        if os.environ.get(ffi_library.LIBRARY_VARIABLE):
            raise
        return str(error)
    return None


def _register() -> None:
    """Makes the FFI target known to JAX, so that saved executables find it in a new process."""
    try:
        if launcher_violation():  # lowering gives it too, where a kernel is wanted
            return
    except ffi_library.NativeLibraryError as error:  # lowering for a GPU raises it
        _log.warning("%s", error)
        return
    library = ffi_library.library()
    state: Any = {
        "type_id": jax.ffi.pycapsule(library.JhgLaunchTypeId()),
        "type_info": jax.ffi.pycapsule(library.JhgLaunchTypeInfo()),
    }
    handlers = {
        "instantiate": jax.ffi.pycapsule(library.JhgLaunchInstantiate),
        "execute": jax.ffi.pycapsule(library.JhgLaunchExecute),
    }
    jax.ffi.register_ffi_type(f"{TARGET}_state", state, platform="CUDA")
    jax.ffi.register_ffi_target(TARGET, handlers, platform="CUDA")


_register()
