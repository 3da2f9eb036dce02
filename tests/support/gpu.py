"""A GPU and its memory through the CUDA driver alone: no XLA.

Tests and the memory checker use it where jax would stand between them and the kernel.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_hopper_gemm.dispatch import Device, gpu_of


class CudaError(RuntimeError):
    """A CUDA driver call failed."""


class Buffer:
    """Device memory, freed with the object.

    Attributes:
      address: device address, aligned to 256 bytes.
      nbytes: size.
    """

    def __init__(self, gpu: Gpu, nbytes: int):
        self.gpu, self.nbytes = gpu, nbytes
        self.address = int(gpu.call("cuMemAlloc", max(nbytes, 1)))

    def fill(self, byte: int) -> None:
        """Sets every byte; 0xFF makes a NaN of every float."""
        self.gpu.call("cuMemsetD8", self.address, byte, self.nbytes)

    def write(self, array: np.ndarray) -> None:
        array = np.ascontiguousarray(array)
        if array.nbytes > self.nbytes:
            raise ValueError(f"{array.nbytes} bytes do not fit in {self.nbytes}")
        self.gpu.call("cuMemcpyHtoD", self.address, array.ctypes.data, array.nbytes)

    def download(self, dtype: str | np.dtype) -> np.ndarray:
        """Returns a flat copy on the host."""
        array = np.empty(self.nbytes // jnp.dtype(dtype).itemsize, jnp.dtype(dtype))
        self.gpu.call("cuMemcpyDtoH", array.ctypes.data, self.address, array.nbytes)
        return array

    def part(self, offset: int) -> Part:
        return Part(self, offset)

    def __del__(self):
        # Not if it was never allocated; and as Python exits, the driver's module goes first.
        if hasattr(self, "address") and not sys.is_finalizing():
            self.gpu.driver.cuMemFree(self.address)


@dataclass(frozen=True)
class Part:
    """A buffer from some byte on; it keeps the buffer alive."""

    buffer: Buffer
    offset: int

    @property
    def address(self) -> int:
        return self.buffer.address + self.offset


class Gpu:
    """One GPU, used through its primary context, which jax uses too.

    Attributes:
      driver: `cuda.bindings.driver`.
      handle: the `CUdevice`.
      context: the `CUcontext`, current in the thread that made the object.

    Raises:
      CudaError: there is no driver, or no such GPU.
    """

    def __init__(self, ordinal: int = 0, driver: Any = None):
        self.driver: Any = driver or _import_driver()
        try:
            self.call("cuInit", 0)
        except RuntimeError as error:  # cuda-python's own, where libcuda.so.1 is missing
            raise CudaError(f"no CUDA driver: {error}") from error
        self.handle = self.call("cuDeviceGet", ordinal)
        self.context = self.call("cuDevicePrimaryCtxRetain", self.handle)
        self.call("cuCtxSetCurrent", self.context)

    def call(self, name: str, *args: Any) -> Any:
        """Returns the value of a driver call, or its tuple of values.

        Raises:
          CudaError: the call failed; it names the call and CUDA's reason.
        """
        error, *values = getattr(self.driver, name)(*args)
        if int(error):
            _, text = self.driver.cuGetErrorString(error)
            raise CudaError(f"{name}: {error.name}: {(text or b'').decode()}")
        return values[0] if len(values) == 1 else tuple(values)

    @cached_property
    def device(self) -> Device:
        """What dispatch asks of a GPU."""
        major, minor, sms = (
            self._attribute(name)
            for name in (
                "COMPUTE_CAPABILITY_MAJOR",
                "COMPUTE_CAPABILITY_MINOR",
                "MULTIPROCESSOR_COUNT",
            )
        )
        return Device((major, minor), sms, gpu=gpu_of(self.name))

    @cached_property
    def name(self) -> str:
        return self.call("cuDeviceGetName", 128, self.handle).split(b"\0")[0].decode()

    def allocate(self, nbytes: int) -> Buffer:
        return Buffer(self, nbytes)

    def upload(self, array: np.ndarray) -> Buffer:
        buffer = Buffer(self, array.nbytes)
        buffer.write(array)
        return buffer

    def synchronize(self) -> None:
        """Waits for all work.

        Raises:
          CudaError: a kernel failed.
        """
        self.call("cuCtxSynchronize")

    def _attribute(self, name: str) -> int:
        attribute = getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return self.call("cuDeviceGetAttribute", attribute, self.handle)


def _import_driver() -> ModuleType:
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    return driver
