"""Runs the FFI library in XLA's CPU runtime, over a stand-in of the CUDA driver."""

from __future__ import annotations

import ctypes
import importlib.metadata
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jax_hopper_gemm.launch import ffi_library
from jax_hopper_gemm.launch.plan import Int32, LaunchPlan, Pointer, TensorMap

SOURCES = Path(__file__).parent
NAME = "jhg_gemm_test 64x32x16"  # what every call says it is
FAKE_STREAM = 0x57EA  # as stream_shim.cc has it
PARAM_BYTES = {TensorMap: 128, Int32: 4, Pointer: 8}


class Launcher:
    """A private copy of the library, registered with XLA's CPU runtime under its own target.

    Or under the target of programs for CUDA, so that these run on the CPU.
    """

    serial = itertools.count()

    def __init__(
        self,
        folder: Path,
        libcuda: Path | str,
        target: str | None = None,
        library: Path | None = None,
    ):
        self.target = target or f"jax_hopper_gemm_test_{next(self.serial)}"
        self.libcuda = libcuda
        self.library = self._private(library or ffi_library.library_path(), folder)
        self.shim = self._private(folder / "stream_shim.so", folder)
        self.resolved: list[tuple[str, str]] = []
        self.resolve: Callable[[str, str], int] | None = None
        self._callback = ffi_library._Resolver(self._answer)
        self.library.jhg_set_resolver(self._callback)
        self.shim.shim_set_handler(self.library.JhgLaunchExecute)
        self.shim.shim_nanoseconds.restype = ctypes.c_double
        for accessor in (self.library.JhgLaunchTypeId, self.library.JhgLaunchTypeInfo):
            accessor.restype = ctypes.c_void_p
        jax.devices("cpu")  # on the CPU, types can be registered once the backend lives
        jax.ffi.register_ffi_type(
            f"{self.target}_state",
            {
                "type_id": jax.ffi.pycapsule(self.library.JhgLaunchTypeId()),
                "type_info": jax.ffi.pycapsule(self.library.JhgLaunchTypeInfo()),
            },
            platform="cpu",
        )
        jax.ffi.register_ffi_target(
            self.target,
            {
                "instantiate": jax.ffi.pycapsule(self.library.JhgLaunchInstantiate),
                "execute": jax.ffi.pycapsule(self.shim.ShimExecute),
            },
            platform="cpu",
        )

    def _private(self, path: Path, folder: Path) -> ctypes.CDLL:
        copy = folder / f"{self.target}_{os.getpid()}_{path.name}"  # no other process writes it
        return ctypes.CDLL(str(shutil.copy(path, copy)))

    def _answer(self, digest, spec, kernel_out, error_out, capacity) -> int:
        self.resolved.append((digest.decode(), spec.decode()))
        try:
            assert self.resolve is not None
            kernel_out[0] = self.resolve(*self.resolved[-1])
        except Exception as error:
            text = str(error).encode()[: capacity - 1] + b"\0"
            ctypes.memmove(error_out, text, len(text))
            return 1
        return 0

    def call(
        self, words: Sequence[int], digest: str, results: Sequence[jax.ShapeDtypeStruct]
    ) -> Any:
        """Returns a jitted function that makes one FFI call."""
        attributes = dict(digest=digest, spec='{"tile_m":64}', name=NAME)
        plan = np.array(words, np.int64)

        @jax.jit
        def run(*operands):
            return jax.ffi.ffi_call(self.target, tuple(results))(*operands, plan=plan, **attributes)

        return run

    def load(
        self,
        words: Sequence[int],
        digest: str,
        operands: Sequence[jax.Array],
        results: Sequence[jax.ShapeDtypeStruct],
    ) -> Any:
        """Returns the program of one call, loaded: its instantiate stage has run."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("JAX_HOPPER_GEMM_LIBCUDA", str(self.libcuda))
            return self.call(words, digest, results).lower(*operands).compile()


class Driver:
    """The stand-in of the CUDA driver."""

    def __init__(self, path: Path):
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.fake_log.restype = ctypes.c_char_p
        self._handles = itertools.count(0x1000, 16)

    def reset(self) -> None:
        self._library.fake_reset()

    def stop_recording(self) -> None:
        self._library.fake_stop_recording()

    def fail(self, call: str, result: int) -> None:
        self._library.fake_fail(call.encode(), result)

    def fail_after(self, calls: int, result: int) -> None:
        """Makes one call fail, after so many others."""
        self._library.fake_fail_after(calls, result)

    def push_context(self, context: int | None) -> None:
        """Makes a context current on this thread, or none."""
        self._library.cuCtxPushCurrent_v2(ctypes.c_void_p(context))

    def add_kernel(self, plan: LaunchPlan) -> int:
        """Returns the handle of a kernel that takes the plan's parameters."""
        return self.add_kernel_of([PARAM_BYTES[type(param)] for param in plan.params])

    def add_kernel_of(self, param_bytes: Sequence[int]) -> int:
        handle = next(self._handles)
        sizes = (ctypes.c_size_t * len(param_bytes))(*param_bytes)
        self._library.fake_add_kernel(ctypes.c_uint64(handle), sizes, len(sizes))
        return handle

    def calls(self, name: str | None = None) -> list[dict]:
        """Returns the calls of a name, or all."""
        lines = map(json.loads, self._library.fake_log().decode().splitlines())
        return [line for line in lines if name in (None, line["call"])]


def build_fakes(folder: Path) -> None:
    """Compiles `fake_cuda.so` and `stream_shim.so` into the folder."""
    compile_library(folder, SOURCES / "fake_cuda.cc")
    compile_library(folder, SOURCES / "stream_shim.cc")


def compile_library(
    folder: Path, source: Path, options: Sequence[str] = ("-O2",), shared: bool = True
) -> Path:
    """Returns a library, or else a program, of the name of its source."""
    output = folder / f"{source.stem}{'.so' * shared}"
    cuda = importlib.metadata.distribution("nvidia-cuda-runtime-cu12")
    includes = cuda.locate_file("nvidia/cuda_runtime/include"), jax.ffi.include_dir()
    flags = ["-std=c++17", "-Wall", "-Wextra", *["-shared", "-fPIC"] * shared, *options]
    flags += os.environ.get("CXXFLAGS", "").split()
    flags += [word for include in includes for word in ("-isystem", str(include))]
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *flags, str(source), "-o", str(output)], check=True)
    return output
