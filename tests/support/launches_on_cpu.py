"""Programs for CUDA, run on the CPU: their launches reach a stand-in of the driver.

What they compute is not defined. All else is real up to the launch, but for the compiler.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from fake_driver.harness import Driver, Launcher
from jax import export
from support.cubin_samples import sample_cubin

from jax_hopper_gemm.cubin import compiler, lookup
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.launch import ffi_target
from jax_hopper_gemm.lowering.call import Launch

TENSOR_MAP, INT32, POINTER = range(3)  # kinds of parameters, as a plan has them


class LaunchesOnCpu:
    """Registers the target of launches for the CPU. NOTE: one a process, as XLA forgets no target.

    `JAX_HOPPER_GEMM_LIBCUDA` must name `fake_cuda.so` in `folder` when the first program is loaded.
    """

    def __init__(self, folder: Path):
        self.driver = Driver(folder / "fake_cuda.so")
        self.launcher = Launcher(folder, folder / "fake_cuda.so", target=ffi_target.TARGET)
        self.launcher.resolve = self.look_up

    def look_up(self, digest: str, spec_json: str) -> int:
        """Finds a kernel as on a GPU: the compiled code from a cache or the compiler."""
        manifest = lookup.resolve(digest, spec_json).manifest
        return self.driver.add_kernel_of([parameter.size for parameter in manifest.parameters])


def runnable(exported: export.Exported) -> export.Exported:
    """Returns an exported program for CUDA that may be called on the CPU."""
    checks = (*exported.disabled_safety_checks, export.DisabledSafetyCheck.platform())
    return replace(exported, disabled_safety_checks=checks)


def parameter_bytes(plan: Iterable[int]) -> list[int]:
    """Returns the size of each kernel parameter in an encoded launch plan."""
    words = iter(plan)

    def skip(count: int) -> None:
        list(itertools.islice(words, count))

    skip(9)  # version, grid, cluster, threads, shared memory
    skip(2 * next(words))  # cleared workspaces
    sizes = []
    for _ in range(next(words)):
        kind = next(words)
        if kind == TENSOR_MAP:
            skip(4)  # buffer, offset, dtype, swizzle
            skip(3 * next(words) - 1)  # extents, strides and box
        else:
            skip(1)
        sizes.append({TENSOR_MAP: 128, INT32: 4, POINTER: 8}[kind])
    assert not list(words)
    return sizes


def fake_kernels(launches: Iterable[Launch], compiled: list[GemmSpec]) -> ModuleType:
    """Returns what takes the place of `kernels/`: its cubins take the parameters of the launches.

    Args:
      compiled: gets each spec that is compiled.
    """
    sizes = {GemmSpec.from_json(x.spec): parameter_bytes(x.plan) for x in launches}

    def compile_cubin(spec: GemmSpec, workdir: Path) -> bytes:
        compiled.append(spec)
        ends = itertools.accumulate(sizes[spec], initial=0)
        places = tuple(zip(ends, sizes[spec], strict=False))
        return sample_cubin(entry=spec.name, threads=spec.threads, places=places)

    kernels = ModuleType("jax_hopper_gemm.kernels")
    vars(kernels).update(compile_cubin=compile_cubin)
    return kernels


def use_fake_kernels(kernels: ModuleType) -> None:
    """Makes this process compile with `kernels`, for good."""
    sys.modules["jax_hopper_gemm.kernels"] = kernels
    compiler.require_compiler = lambda: None
