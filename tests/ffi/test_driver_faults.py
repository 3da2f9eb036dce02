"""Where the driver, the host memory or the search for a driver fails: the call returns an error."""

from __future__ import annotations

import ctypes.util

import jax
import jax.numpy as jnp
import pytest
from fake_driver.harness import NAME, SOURCES, Launcher, compile_library
from support.launches import CLEARING, PLAN, A, B, D, load

OUT_OF_MEMORY, LAUNCH_FAILED, CAPTURE_INVALIDATED, UNNAMED = 2, 719, 901, 12345  # CUresult


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "detail"),
    [
        ("cuKernelGetParamInfo", ""),
        (
            "cuTensorMapEncodeTiled",
            "; tensor map of buffer 0: extents 32x64, strides in bytes 128, box 32x64",
        ),
        ("cuTensorMapReplaceAddress", ""),
        ("cuMemsetD32Async", ""),
        (
            "cuLaunchKernelEx",
            "; grid 4x2x1, cluster 2x1x1, 384 threads, 1024 bytes of shared memory",
        ),
    ],
)
@pytest.mark.parametrize(
    ("result", "code", "text"),
    [
        (OUT_OF_MEMORY, "RESOURCE_EXHAUSTED", "CUDA_ERROR_OUT_OF_MEMORY (out of memory)"),
        (LAUNCH_FAILED, "INTERNAL", "CUDA_ERROR_LAUNCH_FAILED (unspecified launch failure)"),
        (UNNAMED, "INTERNAL", "CUresult 12345 (no description)"),
    ],
)
def test_a_cuda_error_names_kernel_call_and_error(
    launcher, driver, digest, call, detail, result, code, text
):
    driver.fail(call, result)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(load(launcher, CLEARING, digest)(A, B))
    assert str(caught.value).startswith(code)
    assert f"jax_hopper_gemm: {NAME}: {call} failed: {text}{detail}" in str(caught.value)


@pytest.mark.parametrize("result", [OUT_OF_MEMORY, CAPTURE_INVALIDATED])
def test_each_call_of_the_driver_may_fail(launcher, driver, digest, result):
    """In turn, of loading and of running; a captured launch makes the calls of an eager one."""
    jax.block_until_ready(load(launcher, CLEARING, digest)(A, B))
    calls = [call["call"] for call in driver.calls()]
    assert len(calls) > 15
    for i, failing in enumerate(calls):
        driver.reset()
        driver.fail_after(i, result)
        message = ""
        try:
            jax.block_until_ready(load(launcher, CLEARING, digest)(A, B))
        except jax.errors.JaxRuntimeError as error:
            message = str(error)
        made = [call["call"] for call in driver.calls()]
        assert made[: i + 1] == calls[: i + 1]
        assert made.count("cuDevicePrimaryCtxRelease") == made.count("cuCtxPushCurrent")
        if "Ctx" in failing:  # a context that is not had is found wanting by what needs it
            assert not message and made[-1] == "cuLaunchKernelEx"
        else:
            assert f"{NAME}: {failing} failed: " in message
            assert "cuLaunchKernelEx" not in made[:-1]
    driver.reset()
    jax.block_until_ready(load(launcher, CLEARING, digest)(A, B))
    assert [call["call"] for call in driver.calls()] == calls


@pytest.mark.slow
def test_an_allocation_that_fails_is_an_error(folder, driver, digest):
    """Whichever it is: nothing may unwind into XLA."""
    sources = [SOURCES / "failing_new.cc", *sorted(SOURCES.parents[1].glob("ffi/src/*.cc"))]
    whole = folder / "failing_library.cc"  # in one piece, since XLA's headers take the time
    whole.write_text("".join(f'#include "{source}"\n' for source in sources))
    library = compile_library(folder, whole, options=("-O0", "-static-libstdc++", "-Wl,-Bsymbolic"))
    alone = Launcher(folder, folder / "fake_cuda.so", library=library)
    alone.resolve = lambda digest, spec: driver.add_kernel(PLAN)
    small = jax.ShapeDtypeStruct((4,), jnp.uint8)

    def failures(stage) -> int:
        """Returns how many allocations fail, one a run, until a run has none left to fail."""
        count = 0
        for count in range(1, 200):
            alone.library.jhg_fail_allocation(count)
            try:
                stage(count)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED: jax_hopper_gemm: no host memory" not in str(error):
                    break
            else:
                break
        assert alone.library.jhg_fail_allocation(0) > 0
        return count - 1

    assert failures(lambda count: load(alone, PLAN.encode(), f"{digest}_{count}")) > 10
    refused = load(alone, CLEARING, digest, results=(D, small))
    assert failures(lambda _: jax.block_until_ready(refused(A, B))) > 3
    jax.block_until_ready(load(alone, PLAN.encode(), digest)(A, B))


def test_without_a_driver_loading_says_so(folder, launcher, digest):
    alone = Launcher(folder, folder / "no_such_libcuda.so")
    alone.resolve = lambda digest, spec: 1
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        load(alone, PLAN.encode(), digest)
    assert "the CUDA driver cannot be opened" in str(caught.value)
    assert "JAX_HOPPER_GEMM_LIBCUDA names it: name a driver's library" in str(caught.value)
    assert "no_such_libcuda.so" in str(caught.value)


@pytest.mark.skipif(ctypes.util.find_library("cuda") is not None, reason="there is a driver")
def test_without_a_driver_that_anything_names_loading_says_how_to_get_one(folder, digest):
    alone = Launcher(folder, "")
    with pytest.raises(jax.errors.JaxRuntimeError, match="libcuda.* Install the NVIDIA driver, or"):
        load(alone, PLAN.encode(), digest)


def test_a_driver_whose_path_is_no_text_is_named(folder, digest):
    alone = Launcher(folder, folder / "no_such_\udcff.so")
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"no_such_\\xff\.so"):
        load(alone, PLAN.encode(), digest)


def test_a_driver_too_old_is_named(folder, digest):
    source = folder / "old_cuda.cc"
    source.write_text('extern "C" int cuInit(unsigned) { return 0; }\n')
    alone = Launcher(folder, compile_library(folder, source))
    alone.resolve = lambda digest, spec: 1
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"old_cuda.so lacks cu\w+. Update the"):
        load(alone, PLAN.encode(), digest)


def test_without_a_resolver_loading_says_so(folder, digest):
    alone = Launcher(folder, folder / "fake_cuda.so")
    alone.library.jhg_set_resolver(None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Import jax_hopper_gemm before"):
        load(alone, PLAN.encode(), digest)
