"""Direct launches, against a driver that records what it is asked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support import direct
from support.gpu import CudaError, Gpu
from support.recording_driver import PLAN, SIZES, FakeDriver

from jax_hopper_gemm.launch.plan import Int32, TensorMap

pytestmark = pytest.mark.pure


def launch_on(driver):
    gpu = Gpu(driver=driver)
    return direct.Launch(gpu, 77, PLAN, [gpu.allocate(1 << 20) for _ in range(3)])


def test_launch_passes_the_plan_to_the_driver():
    driver = FakeDriver(SIZES)
    launch = launch_on(driver)
    launch(stream=5)
    (seen,) = driver.launched
    assert seen.kernel == 77 and seen.stream == 5
    assert (seen.grid, seen.cluster) == (PLAN.grid, PLAN.cluster)
    assert (seen.threads, seen.smem) == (PLAN.threads, PLAN.smem_bytes)
    assert [value[0] for value in seen.values[:3]] == [1, 2, 3]  # the maps, in order
    scalars = [int.from_bytes(value, "little", signed=True) for value in seen.values[3:-1]]
    assert scalars == [param.value for param in PLAN.params if isinstance(param, Int32)]
    assert int.from_bytes(seen.values[-1], "little") == launch.buffers[3].address
    assert not any(call[0].startswith("cuMemset") for call in driver.calls)


def test_launch_encodes_tensor_maps_as_planned():
    driver = FakeDriver(SIZES)
    launch = launch_on(driver)
    planned = [param for param in PLAN.params if isinstance(param, TensorMap)]
    for seen, param in zip(driver.maps, planned, strict=True):
        assert seen.aligned
        assert seen.address == launch.buffers[param.buffer].address
        assert (seen.dims, seen.strides, seen.box) == (param.dims, param.strides, param.box)
        assert seen.steps == (1, 1, 1)
    assert [seen.dtype for seen in driver.maps] == [9, 9, 7]
    assert [seen.swizzle for seen in driver.maps] == [3, 3, 3]


def test_launch_raises_the_shared_memory_limit_before_it_runs():
    driver = FakeDriver(SIZES)
    launch_on(driver)
    ((_, _, nbytes, *_),) = (call for call in driver.calls if call[0] == "cuKernelSetAttribute")
    assert nbytes == PLAN.smem_bytes


def test_launch_refuses_a_kernel_with_other_parameters():
    with pytest.raises(ValueError, match=r"parameters have \[128, 128, 128, 4, .*another version"):
        launch_on(FakeDriver(SIZES[:-1]))


def test_failed_driver_calls_name_themselves():
    driver = FakeDriver(SIZES)
    launch = launch_on(driver)
    driver.failing = "cuLaunchKernelEx"
    with pytest.raises(CudaError, match="cuLaunchKernelEx: CUDA_ERROR_LAUNCH_FAILED: it failed"):
        launch()


def test_a_missing_driver_is_said():
    def missing(*args):
        raise RuntimeError("libcuda.so.1 not found")

    with pytest.raises(CudaError, match=r"no CUDA driver: libcuda\.so\.1 not found"):
        Gpu(driver=SimpleNamespace(cuInit=missing))
