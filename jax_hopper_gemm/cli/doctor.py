"""Facts of this machine: GPU, driver, jax, FFI library, compiler, kernels."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable
from typing import Any

from .. import cubin
from ..cubin.store import Store
from ..launch import ffi_library


def machine_facts() -> dict[str, Any]:
    """Returns available and missing components as JSON data; never raises."""
    import jax

    return {
        "version": _version("jax-hopper-gemm"),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": _version("jaxlib"),
        "devices": [_device_facts(device) for device in jax.local_devices()],
        "driver": _driver(),
        "ffi_library": _ffi_library(),
        "compiler": _version("nvidia-cutlass-dsl"),
        "prebuilt": _kernels(cubin.prebuilt),
        "cache": _kernels(cubin.user_cache),
    }


def described(facts: dict[str, Any]) -> dict[str, str]:
    """Returns `machine_facts` as lines of text."""
    hopper = [device for device in facts["devices"] if device["runs_kernels"]]
    devices = ", ".join(device["text"] for device in facts["devices"])
    driver, library = facts["driver"], facts["ffi_library"]
    return {
        "Python": facts["python"],
        "jax, jaxlib": f"{facts['jax']}, {facts['jaxlib']}",
        "devices": devices if hopper else f"{devices}; no Hopper GPU, so products run on XLA",
        "driver": f"CUDA {driver['cuda']}" if driver["cuda"] else "none",
        "FFI library": library["path"] or f"not loaded: {library['error']}",
        "compiler": f"nvidia-cutlass-dsl {facts['compiler']}" if facts["compiler"] else "none",
        **{
            name: facts[name]["error"] or "{kernels} kernels in {folder}".format(**facts[name])
            for name in ("prebuilt", "cache")
        },
    }


def _device_facts(device: Any) -> dict[str, Any]:
    if device.platform != "gpu":
        return {"text": device.device_kind, "platform": device.platform, "runs_kernels": False}
    capability = str(device.compute_capability)
    return {
        "text": f"{device.device_kind} (compute capability {capability}, {device.core_count} SMs)",
        "platform": device.platform,
        "runs_kernels": capability == "9.0",
    }


def _driver() -> dict[str, str | None]:
    """Returns the CUDA version of the driver, or the error."""
    try:
        from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

        error, version = driver.cuDriverGetVersion()
    except (ImportError, RuntimeError) as failure:
        return {"cuda": None, "error": str(failure)}
    if int(error):
        return {"cuda": None, "error": error.name}
    return {"cuda": f"{version // 1000}.{version % 1000 // 10}", "error": None}


def _ffi_library() -> dict[str, str | None]:
    try:
        ffi_library.library()
        return {"path": str(ffi_library.library_path()), "error": None}
    except ffi_library.NativeLibraryError as error:
        return {"path": None, "error": str(error)}


def _kernels(store: Callable[[], Store]) -> dict[str, Any]:
    """Returns a folder and how many kernels it has, or the error."""
    try:
        folder = store()
        return {"folder": str(folder.folder), "kernels": len(folder.entries()), "error": None}
    except (cubin.CubinError, OSError) as error:
        return {"folder": None, "kernels": 0, "error": str(error)}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
