"""From a compiled kernel to one that can be launched, with cuda-python.

One `cuLibraryLoadData` serves every GPU of the process. What is loaded stays loaded: launches may
be under way, and a kernel is some 50 kB.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .compiler import held_over_forks
from .digest import CubinError
from .lookup import resolve
from .manifest import Manifest
from .store import Compiled

_COMPUTE_CAPABILITY = (9, 0)

_loaded: dict[str, LoadedKernel] = {}
_loading = held_over_forks()


@dataclass(frozen=True)
class LoadedKernel:
    """A live kernel, good on every GPU of this process."""

    handle: int  # the `CUkernel`
    name: str  # of the spec
    manifest: Manifest  # its facts, confirmed by the driver


def load(digest: str, spec_json: str) -> LoadedKernel:
    """Returns the kernel that a lowered program names, as in `resolve`, loaded once a process.

    Raises:
      CubinError: it cannot be found, compiled or loaded.
    """
    if digest not in _loaded:
        with _loading:
            if digest not in _loaded:
                _loaded[digest] = load_compiled(resolve(digest, spec_json), _driver())
    return _loaded[digest]


def load_compiled(compiled: Compiled, driver: Any) -> LoadedKernel:
    """Returns `compiled` loaded through `driver` (`cuda.bindings.driver`), checked.

    Raises:
      CubinError: no driver, no Hopper GPU, a CUDA error, or code that does not fit its manifest.
    """
    manifest = compiled.manifest
    cuda = _Calls(driver, manifest)
    devices = _hopper_devices(cuda)
    library = cuda("cuLibraryLoadData", compiled.cubin, [], [], 0, [], [], 0)
    kernel = cuda("cuLibraryGetKernel", library, manifest.entry.encode())
    differences = _differences(cuda, kernel, devices[0])
    if differences:
        raise CubinError(
            f"{manifest.name}: the loaded kernel differs from its manifest: "
            f"{'; '.join(differences)}. It came from: {compiled.origin}. Delete it there and "
            "build it again (`python -m jax_hopper_gemm cache clear` empties the cache)."
        )
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    for device in devices:
        cuda("cuKernelSetAttribute", limit, manifest.dynamic_smem_bytes, kernel, device)
    return LoadedKernel(int(kernel), manifest.name, manifest)


def _driver() -> ModuleType:
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    return driver


class _Calls:
    """Calls of the driver that raise, naming kernel, call and error, when they do not succeed."""

    def __init__(self, driver: Any, manifest: Manifest):
        self.driver = driver
        self.manifest = manifest

    def __call__(self, function: str, *args: Any) -> Any:
        """Returns the call's one result, or None."""
        status, *results = self.attempt(function, *args)
        self.check(function, status)
        return results[0] if results else None

    def check(self, function: str, status: Any) -> None:
        if status != self.driver.CUresult.CUDA_SUCCESS:
            advice = self._advice(status.name)
            raise CubinError(f"{self.manifest.name}: {function} gave {status.name}{advice}")

    def attempt(self, function: str, *args: Any) -> tuple:
        """Returns the status and the results."""
        try:
            return getattr(self.driver, function)(*args)
        except RuntimeError as error:  # cuda-python did not find libcuda.so.1, or the call in it
            why = (
                "no CUDA driver on this machine. Kernels run where an NVIDIA driver is installed; "
                'elsewhere use implementation="xla"'
                if function == "cuInit"
                else f"this CUDA driver has no {function}; CUDA 12.4 or newer has"
            )
            raise CubinError(f"{self.manifest.name}: {why} ({error})") from error

    def _advice(self, status: str) -> str:
        if status == "CUDA_ERROR_OUT_OF_MEMORY":
            return (
                ": no GPU memory is left for the kernel's code. JAX takes 75 % of it at the start; "
                "leave more with XLA_PYTHON_CLIENT_MEM_FRACTION, or end other programs on this GPU"
            )
        major, minor = self.manifest.toolkit
        if status in ("CUDA_ERROR_NO_BINARY_FOR_GPU", "CUDA_ERROR_INVALID_IMAGE"):
            return (
                f": the driver refuses the cubin, which is for {self.manifest.target} and was "
                f"compiled by CUDA {major}.{minor}. The driver must be for CUDA {major} or newer"
            )
        if status == "CUDA_ERROR_NO_DEVICE":
            return ": no GPU is visible. Does CUDA_VISIBLE_DEVICES hide it?"
        return ""


def _hopper_devices(cuda: _Calls) -> list[Any]:
    """Returns the visible devices that run sm_90a code; at least one."""
    cuda("cuInit", 0)
    attribute = cuda.driver.CUdevice_attribute
    found, others = [], []
    for index in range(cuda("cuDeviceGetCount")):
        device = cuda("cuDeviceGet", index)
        capability = tuple(
            cuda("cuDeviceGetAttribute", part, device)
            for part in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        if capability == _COMPUTE_CAPABILITY:
            found.append(device)
        else:
            others.append("GPU {} has {}.{}".format(index, *capability))
    if not found:
        raise CubinError(
            f"{cuda.manifest.name} is for {cuda.manifest.target}: H100, H200 and others of compute "
            f"capability 9.0. {', '.join(others) or 'No GPU is visible'}."
        )
    return found


def _differences(cuda: _Calls, kernel: Any, device: Any) -> list[str]:
    """Returns how the loaded code differs from the manifest it travelled with."""
    manifest, attribute = cuda.manifest, cuda.driver.CUfunction_attribute
    found = []
    places = _parameter_places(cuda, kernel)
    expected = [(offset, size) for _, offset, size in manifest.parameters]
    if places != expected:
        found.append(f"its parameters have (offset, bytes) {places}, not {expected}")
    registers = cuda("cuKernelGetAttribute", attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, kernel, device)
    if registers != manifest.registers:
        found.append(f"a thread has {registers} registers, not {manifest.registers}")
    largest_block = attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
    threads = cuda("cuKernelGetAttribute", largest_block, kernel, device)
    if threads < manifest.threads:
        found.append(f"a block has at most {threads} threads, not {manifest.threads}")
    return found


def _parameter_places(cuda: _Calls, kernel: Any) -> list[tuple[int, int]]:
    """Returns (offset, size) of each parameter; the driver refuses the index past the last."""
    places = []
    while True:
        function, index = "cuKernelGetParamInfo", len(places)
        status, *place = cuda.attempt(function, kernel, index)
        if status == cuda.driver.CUresult.CUDA_ERROR_INVALID_VALUE:
            return places
        cuda.check(function, status)
        places.append(tuple(place))
