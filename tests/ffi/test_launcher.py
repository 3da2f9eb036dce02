"""Plans that the FFI library loads and runs: what it asks of the driver, at once or each time."""

from __future__ import annotations

import gc
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from chip import device
from fake_driver.harness import FAKE_STREAM, NAME, SOURCES, compile_library
from support.cubin_samples import SPEC
from support.launches import CLEARING, COUNTER, CPU, PLAN, A, B, D, address, load

from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.launch.plan import TensorMap, make_plan


def test_launch_gets_the_plan_and_the_addresses(launcher, driver, digest):
    program = load(launcher, PLAN.encode(), digest)
    d, counter = program(A, B)
    (launch,) = driver.calls("cuLaunchKernelEx")
    assert launch["grid"] == [4, 2, 1]
    assert launch["cluster"] == [2, 1, 1]
    assert launch["block"] == [384, 1, 1]
    assert launch["smem_bytes"] == 1024
    assert launch["stream"] == FAKE_STREAM
    assert launch["extra"] == 0
    params = [bytes(param) for param in launch["params"]]
    assert [struct.unpack("QQ", map_[:16]) for map_ in params[:3]] == [
        (address(array), 2) for array in (A, B, d)
    ]
    assert struct.unpack("i", params[3]) == (7,)
    assert struct.unpack("i", params[4]) == (-3,)
    assert struct.unpack("Q", params[5]) == (address(counter),)


def test_tensor_maps_are_encoded_while_loading_only(launcher, driver, digest):
    program = load(launcher, PLAN.encode(), digest)
    maps = driver.calls("cuTensorMapEncodeTiled")
    assert [map_["dims"] for map_ in maps] == [[32, 64], [16, 32], [16, 64]]
    assert [map_["strides"] for map_ in maps] == [[128], [64], [64]]
    assert [map_["box"] for map_ in maps] == [[32, 64], [16, 32], [16, 64]]
    assert [map_["swizzle"] for map_ in maps] == [3, 2, 0]
    assert {map_["dtype"] for map_ in maps} == {7}
    assert all(map_["element_strides"] == [1, 1] for map_ in maps)
    assert all(map_["has_context"] == 1 and map_["misalignment"] == 0 for map_ in maps)
    program(A, B)
    program(A, B)
    assert len(driver.calls("cuTensorMapEncodeTiled")) == 3
    replaced = driver.calls("cuTensorMapReplaceAddress")
    assert len(replaced) == 6
    assert all(call["misalignment"] == 0 for call in replaced)


def test_parameters_are_checked_in_a_context(launcher, driver, digest):
    load(launcher, PLAN.encode(), digest)
    calls = driver.calls("cuKernelGetParamInfo")
    assert calls and all(call["has_context"] == 1 for call in calls)


def test_two_tensor_maps_share_a_buffer_at_their_offsets(launcher, driver, digest):
    first = TensorMap(0, "float32", (32, 64), (256,), (32, 64), 128)
    maps = (first, replace(first, offset=128), *PLAN.params[1:3])
    plan = replace(PLAN, params=(*maps, *PLAN.params[3:]))
    launcher.resolve = lambda digest, spec: driver.add_kernel(plan)
    wide = jax.device_put(jnp.zeros((64, 64), jnp.float32), CPU)
    d, _ = load(launcher, plan.encode(), digest, operands=(wide, B))(wide, B)
    (launch,) = driver.calls("cuLaunchKernelEx")
    starts = [struct.unpack("Q", bytes(param)[:8])[0] for param in launch["params"][:4]]
    assert starts == [address(wide), address(wide) + 128, address(B), address(d)]


def test_a_borrowed_context_is_given_back(launcher, driver, digest):
    load(launcher, PLAN.encode(), digest)
    for call in ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease", "cuCtxPopCurrent"):
        assert len(driver.calls(call)) == 1


def test_a_cleared_workspace_is_set_to_zero_before_the_launch(launcher, driver, digest):
    _, counter = load(launcher, CLEARING, digest)(A, B)
    (memset,) = driver.calls("cuMemsetD32Async")
    assert memset["address"] == address(counter)
    assert (memset["value"], memset["words"], memset["stream"]) == (0, 2, FAKE_STREAM)


def test_a_workspace_that_is_not_flagged_is_left_alone(launcher, driver, digest):
    load(launcher, PLAN.encode(), digest)(A, B)
    assert driver.calls("cuMemsetD32Async") == []
    assert len(driver.calls("cuLaunchKernelEx")) == 1


def test_a_cluster_of_one_is_launched_without_the_cluster_attribute(launcher, driver, digest):
    load(launcher, replace(PLAN, cluster=(1, 1, 1)).encode(), digest)(A, B)
    (launch,) = driver.calls("cuLaunchKernelEx")
    assert launch["cluster"] == []


@pytest.mark.parametrize("scheduler", ["single", "static", "dynamic"])
def test_the_plan_of_a_gemm_runs(launcher, driver, digest, scheduler):
    problem = GemmProblem.dense(256, 512, 128, l=2)
    spec = GemmSpec(
        "bfloat16", "bfloat16", "bfloat16", "k", "n", 128, 128, tile_scheduler=scheduler
    )
    plan = make_plan(problem, spec, RasterOrder(), num_sms=132)
    launcher.resolve = lambda digest, spec: driver.add_kernel(plan)
    shapes = ((2, 256, 128), (2, 128, 512))
    operands = [jax.device_put(jnp.ones(shape, jnp.bfloat16), CPU) for shape in shapes]
    results = [jax.ShapeDtypeStruct((2, 256, 512), jnp.bfloat16)]
    results += [jax.ShapeDtypeStruct((nbytes,), jnp.uint8) for nbytes in plan.workspaces]
    load(launcher, plan.encode(), digest, operands=operands, results=results)(*operands)
    (launch,) = driver.calls("cuLaunchKernelEx")
    assert launch["grid"] == list(plan.grid)
    assert launch["smem_bytes"] == spec.smem_bytes
    assert driver.calls("cuMemsetD32Async") == []


def test_a_digest_is_resolved_once_and_never_while_running(launcher, digest):
    first = load(launcher, PLAN.encode(), digest)
    second = load(launcher, replace(PLAN, grid=(2, 1, 1)).encode(), digest)
    assert launcher.resolved == [(digest, '{"tile_m":64}')]
    launcher.resolve = None
    first(A, B)
    second(A, B)
    assert len(launcher.resolved) == 1


def test_a_kernel_that_cannot_be_found_says_why_and_is_asked_for_again(launcher, driver, digest):
    def missing(digest, spec):
        raise LookupError(f"no cubin of {spec}; run python -m jax_hopper_gemm build. " + 8192 * "x")

    launcher.resolve = missing
    with pytest.raises(jax.errors.JaxRuntimeError, match=NAME) as caught:
        load(launcher, PLAN.encode(), digest)
    assert 'the kernel cannot be loaded: no cubin of {"tile_m":64}; run' in str(caught.value)
    launcher.resolve = lambda digest, spec: driver.add_kernel(PLAN)
    load(launcher, PLAN.encode(), digest)(A, B)


def test_an_answer_without_a_kernel_is_an_error(launcher, digest):
    launcher.resolve = lambda digest, spec: 0
    with pytest.raises(jax.errors.JaxRuntimeError, match="loaded: Python did not answer"):
        load(launcher, PLAN.encode(), digest)


def test_a_context_that_is_current_is_used(folder, launcher, driver):
    host = device.Launcher(compile_library(folder, SOURCES / "ffi_host.cc"), launcher.library)
    driver.push_context(0xBEEF)
    try:
        state = host.load(SPEC, PLAN, NAME)
    finally:
        driver.push_context(None)
    assert not isinstance(state, str), state
    host.free(state)
    assert driver.calls("cuDevicePrimaryCtxRetain") == []


def test_threads_share_a_program_and_keep_their_addresses_apart(launcher, driver, digest):
    program = load(launcher, PLAN.encode(), digest)
    per_thread = [(A + i, B + i) for i in range(4)]

    def work(operands: tuple) -> list:
        return [jax.block_until_ready(program(*operands)) for _ in range(50)]

    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(work, per_thread))
    launched = {
        tuple(struct.unpack("Q", bytes(param[:8]))[0] for param in [*call["params"][:3]])
        for call in driver.calls("cuLaunchKernelEx")
    }
    assert launched == {
        (address(a), address(b), address(d))
        for (a, b), runs in zip(per_thread, outputs, strict=True)
        for d, _ in runs
    }


@pytest.mark.slow
def test_programs_run_while_the_caches_of_jax_are_cleared(launcher, driver, digest, monkeypatch):
    monkeypatch.setenv("JAX_HOPPER_GEMM_LIBCUDA", str(launcher.libcuda))
    program = launcher.call(PLAN.encode(), digest, (D, COUNTER))
    cleared = threading.Event()

    def work(_: int) -> int:
        turns = 0
        while turns == 0 or not cleared.is_set():
            jax.block_until_ready([program(A, B) for _ in range(25)])
            turns += 1
        return turns

    with ThreadPoolExecutor(3) as pool:
        results = pool.map(work, range(3))
        for _ in range(3):
            jax.clear_caches()
            gc.collect()
        cleared.set()
        turns = sum(results)
    assert len(driver.calls("cuLaunchKernelEx")) == 25 * turns


def test_threads_load_programs_at_once(launcher, digest):
    digests = [f"{digest}_{i % 2}" for i in range(8)]

    def work(digest: str) -> Any:
        return launcher.call(PLAN.encode(), digest, (D, COUNTER)).lower(A, B).compile()

    with ThreadPoolExecutor(len(digests)) as pool:
        programs = list(pool.map(work, digests))
    assert {digest for digest, _ in launcher.resolved} == set(digests)
    for program in programs:
        jax.block_until_ready(program(A, B))


def test_execute_takes_at_most_three_microseconds(launcher, driver, digest, capsys):
    program = load(launcher, PLAN.encode(), digest)
    driver.stop_recording()
    launcher.shim.shim_time(10_000)
    jax.block_until_ready(program(A, B))
    nanoseconds = launcher.shim.shim_nanoseconds()
    with capsys.disabled():
        print(f"\nexecute stage without the driver's own time: {nanoseconds:.0f} ns")
    assert nanoseconds < 3000
