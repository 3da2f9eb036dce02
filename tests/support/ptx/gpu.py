"""A stand-in for `support.gpu.Gpu` that runs kernels' PTX on the CPU.

It has the methods that `support.trial` and `support.outcome` use, so what checks a kernel on a GPU
checks it here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from support.direct import WORKSPACE_GUARD
from support.ptx.decode import decode
from support.ptx.machine import Kernel, Launch
from support.ptx.memory import GlobalMemory
from support.ptx.parse import PtxError, parse
from support.ptx.tensor import Map

from jax_hopper_gemm.dispatch import H200
from jax_hopper_gemm.gemm.kernel_params import KernelSpec
from jax_hopper_gemm.launch.plan import LaunchPlan, Pointer, TensorMap

PARAMS = 0x1000_0000  # address of a kernel's first parameter


@lru_cache(maxsize=64)
def ptx_of(spec: KernelSpec) -> str:
    """Returns the PTX that CuTeDSL makes of `spec`'s kernel, on the way to its cubin."""
    from jax_hopper_gemm.kernels import compile as compiling

    kernel = compiling._kernel_of(spec)
    kernel.kernel.set_name_prefix(spec.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    with tempfile.TemporaryDirectory() as folder:
        compiling.cute.compile(
            kernel(spec).launch, compiling.example_args(spec),
            compiling.cute.runtime.make_fake_stream(),
            options=f"--gpu-arch sm_90a --keep-ptx --dump-dir {folder}",
        )  # fmt: skip
        (path,) = Path(folder).rglob("*.ptx")
        return path.read_text()


@lru_cache(maxsize=64)
def kernel_of(text: str) -> Kernel:
    """Returns the kernel in PTX's text, decoded."""
    return decode(parse(text))


class PtxBuffer:
    """Memory of a `PtxGpu`."""

    def __init__(self, gpu: PtxGpu, nbytes: int):
        self.address = gpu.memory.allocate(nbytes)
        self.bytes = gpu.memory.buffer(self.address, nbytes)

    def fill(self, byte: int) -> None:
        self.bytes[:] = byte

    def write(self, array: np.ndarray) -> None:
        given = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.bytes[: given.size] = given

    def download(self, dtype: Any) -> np.ndarray:
        size = jnp.dtype(dtype).itemsize
        return self.bytes[: self.bytes.size // size * size].copy().view(jnp.dtype(dtype))

    def part(self, offset: int) -> PtxPart:
        return PtxPart(self.address + offset)


class PtxPart:
    """A buffer from some byte on."""

    def __init__(self, address: int):
        self.address = address


class PtxGpu:
    """Runs kernels' PTX.

    Args:
      edit: what to run in the place of a kernel's PTX; tests of the tests spoil it so.
    """

    device = H200

    def __init__(self, edit: Any = lambda text: text):
        self.memory, self.edit = GlobalMemory(), edit

    def allocate(self, nbytes: int) -> PtxBuffer:
        return PtxBuffer(self, nbytes)

    def upload(self, array: np.ndarray) -> PtxBuffer:
        buffer = PtxBuffer(self, array.nbytes)
        buffer.write(array)
        return buffer

    def synchronize(self) -> None:
        pass

    def launch(self, spec: KernelSpec, plan: LaunchPlan, buffers: Sequence[Any]) -> PtxLaunch:
        """Returns the launch of `spec`'s kernel by `plan`, whose buffers but workspaces these are.

        Raises:
          PtxError: the kernel has an instruction that is not known, or the plan does not fit it.
        """
        return PtxLaunch(self, spec, plan, buffers)


class PtxLaunch:
    """One kernel with its arguments, as `direct.Launch`."""

    def __init__(self, gpu: PtxGpu, spec: KernelSpec, plan: LaunchPlan, buffers: Sequence[Any]):
        self.plan, kernel = plan, kernel_of(gpu.edit(ptx_of(spec)))
        self.workspaces = [gpu.allocate(nbytes + WORKSPACE_GUARD) for nbytes in plan.workspaces]
        addresses = [buffer.address for buffer in (*buffers, *self.workspaces)]
        names = kernel.program.params
        if len(names) != len(plan.params):
            raise PtxError(f"the kernel has {len(names)} parameters, the plan {len(plan.params)}")
        where = {name: PARAMS + 128 * i for i, name in enumerate(names)}
        values: dict[str, int] = {}
        maps: dict[int, Map] = {}
        for name, param in zip(names, plan.params, strict=True):
            if isinstance(param, TensorMap):
                maps[where[name]] = Map(param, addresses[param.buffer])
            else:
                values[name] = (
                    addresses[param.buffer] if isinstance(param, Pointer) else param.value
                )
        self._launch = Launch(
            kernel, plan.grid, plan.cluster, plan.threads, plan.smem_bytes, gpu.memory, where,
            values, maps,
        )  # fmt: skip

    def __call__(self) -> None:
        self._launch.run()
