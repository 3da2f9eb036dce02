"""A CUDA driver that records what it is asked, and a kernel to ask it for."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

from jax_hopper_gemm.gemm.kernel_params import PARAM_BYTES
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.launch.plan import make_plan

SPEC = GemmSpec(
    "bfloat16",
    "bfloat16",
    "float32",
    "k",
    "n",
    128,
    64,
    cluster_m=2,
    tile_scheduler="dynamic",
    epi_stages=2,
)
PROBLEM = GemmProblem.dense(1000, 520, 256, 3, d_dtype="float32")
PLAN = make_plan(PROBLEM, SPEC, RasterOrder("n", 4), num_sms=132)
SIZES = [PARAM_BYTES[param.kind] for param in PLAN.params]


class FakeDriver:
    """Stands in for `cuda.bindings.driver`: its types are real, its calls are recorded."""

    ENCODE = ctypes.CFUNCTYPE(
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_uint32,
        ctypes.c_uint64,
        *[ctypes.c_void_p] * 4,
        *[ctypes.c_uint32] * 4,
    )

    def __init__(self, parameter_sizes):
        self.parameter_sizes = parameter_sizes
        self.calls = []
        self.maps = []
        self.launched = []
        self.failing = ""
        self._encode = self.ENCODE(self._encode_tiled)
        self._next = 1 << 20

    def __getattr__(self, name):
        from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

        if not name.startswith("cu"):
            return getattr(driver, name)

        def call(*args):
            self.calls.append((name, *args))
            if name == self.failing:
                return (driver.CUresult.CUDA_ERROR_LAUNCH_FAILED, *[None] * 1)
            return (driver.CUresult.CUDA_SUCCESS, *self._answer(name, args))

        return call

    def _answer(self, name, args):
        if name == "cuMemAlloc":
            self._next += -(-args[0] // 256) * 256
            return (self._next,)
        if name == "cuDeviceGetAttribute":
            return (132,)
        if name == "cuGetProcAddress":
            return ctypes.cast(self._encode, ctypes.c_void_p).value, 0
        if name == "cuGetErrorString":
            return (b"it failed",)
        if name == "cuLaunchKernelEx":
            self.launched.append(self._arguments(*args))
        return (0,) if name in ("cuDeviceGet", "cuDevicePrimaryCtxRetain") else ()

    def cuKernelGetParamInfo(self, kernel, index):  # noqa: N802
        from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

        if index >= len(self.parameter_sizes):
            return driver.CUresult.CUDA_ERROR_INVALID_VALUE, None, None
        return driver.CUresult.CUDA_SUCCESS, 0, self.parameter_sizes[index]

    def _arguments(self, config, kernel, addresses, extra):
        """What the kernel would read: the bytes behind each pointer."""
        pointers = (ctypes.c_void_p * len(self.parameter_sizes)).from_address(addresses)
        values = [
            ctypes.string_at(pointer, size)
            for pointer, size in zip(pointers, self.parameter_sizes, strict=True)
        ]
        cluster = config.attrs[0].value.clusterDim
        return SimpleNamespace(
            kernel=int(kernel),
            grid=(config.gridDimX, config.gridDimY, config.gridDimZ),
            cluster=(cluster.x, cluster.y, cluster.z),
            threads=config.blockDimX,
            smem=config.sharedMemBytes,
            stream=int(config.hStream),
            values=values,
        )

    def _encode_tiled(self, out, dtype, rank, address, dims, strides, box, steps, *enums):
        def read(kind, pointer, count):
            return tuple((kind * count).from_address(pointer))

        self.maps.append(
            SimpleNamespace(
                aligned=out % 64 == 0,
                dtype=dtype,
                address=address,
                dims=read(ctypes.c_uint64, dims, rank),
                strides=read(ctypes.c_uint64, strides, rank - 1),
                box=read(ctypes.c_uint32, box, rank),
                steps=read(ctypes.c_uint32, steps, rank),
                swizzle=enums[1],
            )
        )
        ctypes.memset(out, len(self.maps), 128)
        return 0
