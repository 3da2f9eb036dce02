"""Launches a kernel with the CUDA driver alone: no XLA and no FFI library between.

It runs the same cubin under the same plan as a jitted program, but on memory that the caller
owns. So a test can poison the result, guard its borders and run any kernel in any raster order, and
a memory checker sees only our kernel.

    gpu = Gpu()
    a, b, d = gpu.upload(a_host), gpu.upload(b_host), gpu.allocate(nbytes)
    launch = prepare(gpu, problem, spec, raster_order, (a, b, d))
    launch()
    gpu.synchronize()
    d.download("bfloat16")
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from support.gpu import Buffer, CudaError, Gpu, Part

from jax_hopper_gemm.cubin import digest_of, load
from jax_hopper_gemm.gemm.kernel_params import PARAM_BYTES, KernelSpec
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.launch.params import TENSOR_MAP_SWIZZLE
from jax_hopper_gemm.launch.plan import LaunchPlan, Param, Pointer, TensorMap, make_plan

TENSOR_MAP_BYTES = PARAM_BYTES["tensor_map"]
TENSOR_MAP_ALIGNMENT = 64

WORKSPACE_GUARD = 4096  # bytes behind each workspace

_ENCODE_SINCE = 12000  # the CUDA version that brought cuTensorMapEncodeTiled
_L2_PROMOTION_128B = 2  # CUtensorMapL2promotion, as the FFI library sets it


def prepare(
    gpu: Gpu,
    problem: GemmProblem,
    spec: GemmSpec,
    raster_order: RasterOrder,
    buffers: Sequence[Buffer | Part],
    num_sms: int | None = None,
) -> Launch:
    """Returns the launch of `spec`'s kernel on `problem`; the kernel is built if need be.

    Args:
      buffers: those of `plan.LaunchPlan` without workspaces, laid out as `problem` says: A, B and
        D of a plain product.
      num_sms: SMs that a persistent grid fills; None for all that the GPU has.
    """
    plan = make_plan(problem, spec, raster_order, num_sms or gpu.device.num_sms)
    return planned(gpu, spec, plan, buffers)


def planned(
    gpu: Gpu, spec: KernelSpec, plan: LaunchPlan, buffers: Sequence[Buffer | Part]
) -> Launch:
    """Returns a launch of `spec`'s kernel; it is built if need be.

    Args:
      buffers: those of the plan without workspaces.
    """
    if stand_in := getattr(gpu, "launch", None):  # `support.ptx` runs kernels itself
        return stand_in(spec, plan, buffers)
    return Launch(gpu, load(digest_of(spec), spec.to_json()).handle, plan, buffers)


class Launch:
    """One kernel with its arguments in place: encoded once, launched any number of times.

    Attributes:
      plan: what is launched.
      workspaces: the plan's, with `WORKSPACE_GUARD` bytes behind each.
      buffers: those given and the plan's workspaces; kept alive.

    Raises:
      ValueError: the kernel's parameters are not the plan's.
    """

    def __init__(self, gpu: Gpu, kernel: int, plan: LaunchPlan, buffers: Sequence[Buffer | Part]):
        self.gpu, self.plan = gpu, plan
        sizes = (nbytes + WORKSPACE_GUARD for nbytes in plan.workspaces)
        self.workspaces = [gpu.allocate(nbytes) for nbytes in sizes]
        self.buffers = [*buffers, *self.workspaces]
        self._kernel = gpu.driver.CUkernel(kernel)
        self._check_parameters()
        self._arguments = [self._argument(param) for param in plan.params]
        addresses = (ctypes.addressof(argument) for argument in self._arguments)
        self._addresses = (ctypes.c_void_p * len(plan.params))(*addresses)
        self._config = _launch_config(gpu, plan)
        limit = gpu.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        gpu.call("cuKernelSetAttribute", limit, plan.smem_bytes, self._kernel, gpu.handle)

    def __call__(self, stream: int = 0) -> None:
        """Enqueues the kernel."""
        self._config.hStream = self.gpu.driver.CUstream(stream)
        addresses = ctypes.addressof(self._addresses)
        self.gpu.call("cuLaunchKernelEx", self._config, self._kernel, addresses, 0)

    def _argument(self, param: Param) -> Any:
        if isinstance(param, TensorMap):
            address = self.buffers[param.buffer].address + param.offset
            return encode_tensor_map(self.gpu, param, address)
        if isinstance(param, Pointer):
            return ctypes.c_uint64(self.buffers[param.buffer].address)
        return ctypes.c_int32(param.value)

    def _check_parameters(self) -> None:
        planned = [PARAM_BYTES[param.kind] for param in self.plan.params]
        compiled = _parameter_sizes(self.gpu, self._kernel)
        if compiled != planned:
            raise ValueError(
                f"the kernel's parameters have {compiled} bytes, the plan's {planned}; "
                "was the cubin built by another version?"
            )


def encode_tensor_map(gpu: Gpu, param: TensorMap, address: int) -> ctypes.Array:
    """Returns the 128 bytes of the `CUtensorMap` over the buffer at `address`, aligned to 64.

    It calls the driver's entry point itself: cuda-python keeps a `CUtensorMap` where Python's
    allocator puts it, which is not always aligned (NVIDIA/cuda-python#1692).
    """
    rank = len(param.dims)
    storage = (ctypes.c_uint8 * (TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT))()
    offset = -ctypes.addressof(storage) % TENSOR_MAP_ALIGNMENT
    encoded = (ctypes.c_uint8 * TENSOR_MAP_BYTES).from_buffer(storage, offset)
    error = _encode_tiled(gpu)(
        ctypes.addressof(encoded),
        param.data_type,
        rank,
        address,
        (ctypes.c_uint64 * rank)(*param.dims),
        (ctypes.c_uint64 * (rank - 1))(*param.strides),
        (ctypes.c_uint32 * rank)(*param.box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # no interleave
        TENSOR_MAP_SWIZZLE[param.swizzle],
        _L2_PROMOTION_128B,
        0,  # elements outside read as zero
    )
    if error:
        raise CudaError(f"cuTensorMapEncodeTiled: CUDA error {error} for {param}")
    return encoded


def _encode_tiled(gpu: Gpu) -> Any:
    """Returns `cuTensorMapEncodeTiled` as the driver exports it."""
    address, _ = gpu.call("cuGetProcAddress", b"cuTensorMapEncodeTiled", _ENCODE_SINCE, 0)
    u32, u64, pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
    enums = (u32, u32, u32, u32)
    signature = (pointer, u32, u32, u64, pointer, pointer, pointer, pointer, *enums)
    return ctypes.CFUNCTYPE(u32, *signature)(address)


def _launch_config(gpu: Gpu, plan: LaunchPlan) -> Any:
    """Returns the `CUlaunchConfig` of a plan, all but the stream."""
    config, cluster = gpu.driver.CUlaunchConfig(), gpu.driver.CUlaunchAttribute()
    config.gridDimX, config.gridDimY, config.gridDimZ = plan.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = plan.threads, 1, 1
    config.sharedMemBytes = plan.smem_bytes
    cluster.id = gpu.driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    dims = cluster.value.clusterDim
    dims.x, dims.y, dims.z = plan.cluster
    config.attrs, config.numAttrs = [cluster], 1
    return config


def _parameter_sizes(gpu: Gpu, kernel: Any) -> list[int]:
    """Returns the bytes of each of a kernel's parameters."""
    sizes: list[int] = []
    while True:  # until an index past the last: not every cuda-python can count them
        error, _, size = gpu.driver.cuKernelGetParamInfo(kernel, len(sizes))
        if int(error):
            return sizes
        sizes.append(size)
