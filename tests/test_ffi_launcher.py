"""The FFI library, run by XLA's CPU runtime over a stand-in of the CUDA driver.

`fake_driver/fake_cuda.cc` plays libcuda.so.1 and writes down every call; `stream_shim.cc` gives
the execute stage the stream that a CPU has not. Each test works on a private copy of the library,
so nothing of this reaches the one that a GPU test in the same process uses.
"""

from __future__ import annotations

import ctypes.util
import gc
import math
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from chip import device
from fake_driver.harness import FAKE_STREAM, NAME, Driver, Launcher, compile_library
from support.cubin_samples import SPEC
from support.launches_on_cpu import parameter_bytes
from support.random_calls import Call, random_calls

from jax_hopper_gemm.dispatch import H200, choose, problem_violations
from jax_hopper_gemm.dispatch.layout_legality import MAX_EXTENT
from jax_hopper_gemm.gemm.group_search import SPAN_EXTENT
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.spec import GemmSpec, RasterOrder
from jax_hopper_gemm.launch import ffi_target
from jax_hopper_gemm.launch.plan import Int32, LaunchPlan, Pointer, TensorMap, Workspace, make_plan
from jax_hopper_gemm.lowering.call import custom_calls

OUT_OF_MEMORY, LAUNCH_FAILED, CAPTURE_INVALIDATED, UNNAMED = 2, 719, 901, 12345  # CUresult

FAKES = Path(__file__).with_name("fake_driver")
CPU = jax.devices("cpu")[0]
A = jax.device_put(jnp.arange(64 * 32, dtype=jnp.float32).reshape(64, 32), CPU)
B = jax.device_put(jnp.ones((32, 16), jnp.float32), CPU)
D = jax.ShapeDtypeStruct((64, 16), jnp.float32)
COUNTER = jax.ShapeDtypeStruct((8,), jnp.uint8)

PLAN = LaunchPlan(
    grid=(4, 2, 1),
    cluster=(2, 1, 1),
    threads=384,
    smem_bytes=1024,
    params=(
        TensorMap(0, "float32", (32, 64), (128,), (32, 64), 128),
        TensorMap(1, "float32", (16, 32), (64,), (16, 32), 64),
        TensorMap(2, "float32", (16, 64), (64,), (16, 64), 0),
        Int32(7),
        Int32(-3),
        Pointer(3),
    ),
    workspaces=(Workspace(8, cleared=True),),
)


@pytest.fixture(scope="module")
def folder(fake_libraries) -> Path:
    return fake_libraries


@pytest.fixture(scope="module")
def shared(folder) -> tuple[Launcher, Driver]:
    return Launcher(folder, folder / "fake_cuda.so"), Driver(folder / "fake_cuda.so")


@pytest.fixture
def driver(shared) -> Driver:
    shared[1].reset()
    return shared[1]


@pytest.fixture
def launcher(shared, driver) -> Launcher:
    launcher = shared[0]
    launcher.resolved.clear()
    launcher.resolve = lambda digest, spec: driver.add_kernel(PLAN)
    return launcher


@pytest.fixture
def digest(request) -> str:
    """A digest no other test uses: a process resolves each one once."""
    return request.node.name


def load(launcher, words, digest, operands=(A, B), results=(D, COUNTER)):
    """Returns the program of one call, loaded: its instantiate stage has run."""
    return launcher.load(words, digest, operands, results)


def address(array: jax.Array) -> int:
    return array.unsafe_buffer_pointer()


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


def test_an_offset_that_tma_cannot_take_is_refused(launcher, driver, digest):
    plan = replace(PLAN, params=(replace(PLAN.params[0], offset=8), *PLAN.params[1:]))
    launcher.resolve = lambda digest, spec: driver.add_kernel(plan)
    with pytest.raises(jax.errors.JaxRuntimeError, match="16"):
        jax.block_until_ready(load(launcher, plan.encode(), digest)(A, B))
    assert driver.calls("cuLaunchKernelEx") == []


def test_a_borrowed_context_is_given_back(launcher, driver, digest):
    load(launcher, PLAN.encode(), digest)
    for call in ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease", "cuCtxPopCurrent"):
        assert len(driver.calls(call)) == 1


def test_a_cleared_workspace_is_set_to_zero_before_the_launch(launcher, driver, digest):
    _, counter = load(launcher, PLAN.encode(), digest)(A, B)
    (memset,) = driver.calls("cuMemsetD32Async")
    assert memset["address"] == address(counter)
    assert (memset["value"], memset["words"], memset["stream"]) == (0, 2, FAKE_STREAM)


def test_a_workspace_that_is_not_flagged_is_left_alone(launcher, driver, digest):
    plan = replace(PLAN, workspaces=(Workspace(8, cleared=False),))
    load(launcher, plan.encode(), digest)(A, B)
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
    results += [jax.ShapeDtypeStruct((work.nbytes,), jnp.uint8) for work in plan.workspaces]
    load(launcher, plan.encode(), digest, operands=operands, results=results)(*operands)
    (launch,) = driver.calls("cuLaunchKernelEx")
    assert launch["grid"] == list(plan.grid)
    assert launch["smem_bytes"] == spec.smem_bytes
    assert len(driver.calls("cuMemsetD32Async")) == len(plan.workspaces)


def test_weight_gradients_of_under_32_gib_a_group_are_loaded_and_larger_ones_refused_by_dispatch(
    launcher, driver, digest
):
    large = GemmProblem.grouped("k", 2**17, 2**17, 4096, 8)  # bfloat16: 2**35 bytes a group
    assert problem_violations(large) == []
    decision = choose(large, H200, kernel_only=True)
    assert decision.spec is None and decision.reason.startswith(
        "D, where it is zeros for empty groups, has 2147483648 vectors of 16 bytes without a gap, "
        f"over {MAX_EXTENT}: split the product"
    )
    under = GemmProblem.grouped("k", 2**17, 2**17 - 64, 4096, 8)
    decision = choose(under, H200, kernel_only=True)
    assert decision.spec and decision.raster_order
    plan = make_plan(under, decision.spec, decision.raster_order, H200.num_sms)
    launcher.resolve = lambda digest, spec: driver.add_kernel(plan)
    load(launcher, plan.encode(), digest)
    assert len(launcher.resolved) == 1


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
        jax.block_until_ready(load(launcher, PLAN.encode(), digest)(A, B))
    assert str(caught.value).startswith(code)
    assert f"jax_hopper_gemm: {NAME}: {call} failed: {text}{detail}" in str(caught.value)


@pytest.mark.parametrize("result", [OUT_OF_MEMORY, CAPTURE_INVALIDATED])
def test_each_call_of_the_driver_may_fail(launcher, driver, digest, result):
    """In turn, of loading and of running; a captured launch makes the calls of an eager one."""
    jax.block_until_ready(load(launcher, PLAN.encode(), digest)(A, B))
    calls = [call["call"] for call in driver.calls()]
    assert len(calls) > 15
    for i, failing in enumerate(calls):
        driver.reset()
        driver.fail_after(i, result)
        message = ""
        try:
            jax.block_until_ready(load(launcher, PLAN.encode(), digest)(A, B))
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
    jax.block_until_ready(load(launcher, PLAN.encode(), digest)(A, B))
    assert [call["call"] for call in driver.calls()] == calls


def test_a_context_that_is_current_is_used(folder, launcher, driver):
    host = device.Launcher(compile_library(folder, FAKES / "ffi_host.cc"), launcher.library)
    driver.push_context(0xBEEF)
    try:
        state = host.load(SPEC, PLAN, NAME)
    finally:
        driver.push_context(None)
    assert not isinstance(state, str), state
    host.free(state)
    assert driver.calls("cuDevicePrimaryCtxRetain") == []


@pytest.mark.parametrize(
    ("param_bytes", "message"),
    [
        ([128, 128, 128, 4, 4], "takes 5 parameters, the launch plan has 6"),
        ([128, 128, 128, 4, 4, 8, 4], "takes more than 6 parameters, the launch plan has 6"),
        ([128, 64, 128, 4, 4, 8], "parameter 1 has 64 bytes, the launch plan's has 128"),
        ([128, 128, 128, 8, 4, 8], "parameter 3 has 8 bytes, the launch plan's has 4"),
        ([128, 128, 128, 4, 4, 4], "parameter 5 has 4 bytes, the launch plan's has 8"),
    ],
)
def test_a_kernel_with_other_parameters_is_never_launched(
    launcher, driver, digest, param_bytes, message
):
    launcher.resolve = lambda digest, spec: driver.add_kernel_of(param_bytes)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        load(launcher, PLAN.encode(), digest)
    assert driver.calls("cuLaunchKernelEx") == []


@pytest.mark.slow
def test_a_plan_cut_short_or_continued_is_refused(launcher, digest):
    words = PLAN.encode()
    for length in range(len(words)):
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"ends after {length} words, before"):
            load(launcher, words[:length], digest)
    with pytest.raises(jax.errors.JaxRuntimeError, match="2 words follow its end"):
        load(launcher, (*words, 0, 0), digest)


@pytest.mark.parametrize(
    ("position", "word", "message"),
    [
        (0, 0, "word 0, version, is 0, not 1 to"),
        (1, 0, "grid x, is 0, not 1 to 2147483647"),
        (1, 2**31, "grid x, is 2147483648"),
        (2, 65536, "grid y, is 65536, not 1 to 65535"),
        (1, 3, "the cluster does not divide the grid"),
        (4, -1, "cluster, is -1, not 1 to 8"),
        (6, 8, "the cluster has more than 8 CTAs"),
        (7, 1025, "threads, is 1025, not 1 to 1024"),
        (8, 232449, "shared memory bytes, is 232449, not 0 to 232448"),
        (9, 17, "number of cleared workspaces, is 17, not 0 to 16"),
        (10, -1, "buffer, is -1, not 0 to 255"),
        (11, 6, "a cleared workspace is not a multiple of 4 bytes"),
        (12, 65, "number of parameters, is 65, not 0 to 64"),
        (13, 3, "word 13, parameter kind, is 3, not 0 to 2"),
        (15, -16, "tensor map offset, is -16, not 0 to"),
        (15, 2**62, "tensor map offset, is 4611686018427387904, not 0 to"),
        (21, 2**62, "a tensor map reaches 9223372036854775807 bytes into buffer 0, more than any"),
        (21, 2**44, "a tensor map reaches 1108307720798336 bytes into buffer 0, more than any"),
        (16, 99, "tensor map dtype, is 99, not 0 to 12"),
        (17, 4, "tensor map swizzle, is 4, not 0 to 3"),
        (18, 6, "tensor map rank, is 6, not 1 to 5"),
        (19, 0, "tensor map extent, is 0, not 1 to 4294967296"),
        (21, -16, "tensor map stride, is -16, not 0 to"),
        (22, 257, "tensor map box, is 257, not 1 to 256"),
    ],
)
def test_a_word_out_of_range_is_named(launcher, digest, position, word, message):
    words = list(PLAN.encode())
    words[position] = word
    with pytest.raises(jax.errors.JaxRuntimeError, match="the launch plan is malformed") as caught:
        load(launcher, words, digest)
    assert message in str(caught.value)
    assert NAME in str(caught.value)


@pytest.mark.parametrize("version", [1, 3, 2**40])
def test_a_plan_of_another_version_says_what_to_do(launcher, digest, version):
    with pytest.raises(jax.errors.JaxRuntimeError, match=NAME) as caught:
        load(launcher, (version, *PLAN.encode()[1:]), digest)
    assert f"plan has version {version}, and this jax_hopper_gemm reads version 2" in str(
        caught.value
    )
    assert "export it again" in str(caught.value) and launcher.resolved == []


@pytest.mark.parametrize("dtype", range(13))
def test_elements_of_every_dtype_of_a_map_are_counted(launcher, driver, digest, dtype):
    words = list(PLAN.encode())
    words[16], words[19] = dtype, 2000
    nbytes = {0: 1, 1: 2, 4: 8, 5: 8, 6: 2, 8: 8, 9: 2}.get(dtype, 4)  # as cuda.h numbers them
    message = f"the launch plan reaches {63 * 128 + 2000 * nbytes}"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(load(launcher, words, digest)(A, B))


@pytest.mark.parametrize(
    "change",
    [
        dict(dims=(32, 64, 2, 2), strides=(128, 2**62, 2**62)),  # whose sum overflows
        *(dict(dims=(64, SPAN_EXTENT, 9, last), strides=strides)
          for last, strides in [(SPAN_EXTENT, (128, 128, 2**34 - 128)),
                                (SPAN_EXTENT + 1, (128, 256, 2**34 - 128)),
                                (SPAN_EXTENT + 1, (128, 128, 2**34))]),
    ],
)  # fmt: skip
def test_a_map_that_is_nearly_one_of_spans_reaches_too_far(launcher, digest, change):
    plan = replace(PLAN, params=(replace(PLAN.params[0], box=(32, 1, 1, 1), **change),))
    with pytest.raises(jax.errors.JaxRuntimeError, match="into buffer 0, more than any has"):
        load(launcher, plan.encode(), digest)


def test_more_tensor_maps_than_fit_are_refused(launcher, digest):
    plan = replace(PLAN, params=17 * PLAN.params[:1])
    with pytest.raises(jax.errors.JaxRuntimeError, match="it has more than 16 tensor maps"):
        load(launcher, plan.encode(), digest)


def test_a_plan_of_more_buffers_than_the_call_has_is_refused(launcher, driver, digest):
    program = load(launcher, PLAN.encode(), digest, results=(D,))
    with pytest.raises(jax.errors.JaxRuntimeError, match="refers to 4 buffers, the call has 3"):
        jax.block_until_ready(program(A, B))
    assert driver.calls("cuLaunchKernelEx") == []


def test_a_workspace_smaller_than_what_is_cleared_is_refused(launcher, driver, digest):
    small = jax.ShapeDtypeStruct((4,), jnp.uint8)
    program = load(launcher, PLAN.encode(), digest, results=(D, small))
    with pytest.raises(jax.errors.JaxRuntimeError, match="buffer 3 has 4 bytes, .* reaches 8"):
        jax.block_until_ready(program(A, B))
    assert driver.calls("cuMemsetD32Async") == []


@pytest.mark.parametrize(
    ("change", "reached"),
    [
        (dict(offset=16), 64 * 128 + 16),
        (dict(dims=(32, 65)), 65 * 128),
        (dict(dims=(36, 64)), 64 * 128 + 16),
        (dict(strides=(144,)), 63 * 144 + 128),
        (dict(dtype="uint8", dims=(129, 64)), 64 * 128 + 1),
    ],
)
def test_a_map_that_leaves_its_buffer_is_refused(launcher, driver, digest, change, reached):
    if "dtype" in change:  # a byte past the end, of elements that no kernel has
        words = list(PLAN.encode())
        words[16], words[19] = 0, 129
    else:
        words = replace(PLAN, params=(replace(PLAN.params[0], **change), *PLAN.params[1:])).encode()
    message = f"buffer 0 has 8192 bytes, the launch plan reaches {reached}"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(load(launcher, words, digest)(A, B))
    assert driver.calls("cuLaunchKernelEx") == []


@pytest.mark.parametrize("axis", ["m", "k"])
@pytest.mark.parametrize("missing", [None, 0, 1, 2])
def test_a_map_of_groups_is_held_to_its_rows(launcher, driver, digest, axis, missing):
    """A map that ends where a run does is 2**60 rows long, and its addresses wrap around."""
    problem = GemmProblem.grouped(axis, 256, 128, 192, groups=3)
    spec = GemmSpec(
        "bfloat16", "bfloat16", "bfloat16", problem.a.major, "n", 128, 128, grouped=axis
    )
    plan = make_plan(problem, spec, RasterOrder(), num_sms=132)
    launcher.resolve = lambda digest, spec: driver.add_kernel(plan)
    shapes = {"m": [(256, 192), (3, 192, 128), (256, 128)]}
    shapes["k"] = [(192, 256), (192, 128), (3, 256, 128)]
    lengths = [math.prod(shape) - 8 * (i == missing) for i, shape in enumerate(shapes[axis])]
    a, b, sizes = [*(jnp.zeros(length, jnp.bfloat16) for length in lengths[:2]), jnp.zeros(3, int)]
    work = [jax.ShapeDtypeStruct((work.nbytes,), jnp.uint8) for work in plan.workspaces]
    results = [jax.ShapeDtypeStruct((lengths[2],), jnp.bfloat16), *work]
    program = load(launcher, plan.encode(), digest, (a, b, sizes), results)
    if missing is None:
        jax.block_until_ready(program(a, b, sizes))
        assert len(driver.calls("cuLaunchKernelEx")) == 1
        return
    buffer = 3 if missing == 2 else missing
    nbytes = 2 * lengths[missing]
    message = f"buffer {buffer} has {nbytes} bytes, the launch plan reaches {nbytes + 16}"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(program(a, b, sizes))
    assert driver.calls("cuLaunchKernelEx") == []


DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "i32": "int32", "ui8": "uint8"}


def launched_arrays(call: Call) -> Iterator[tuple[list[int], list, list]]:
    """Yields of each launch in a program for CUDA its plan, and the arrays that it has."""

    def arrays(values):
        for type_ in (value.type for value in values):
            yield jax.ShapeDtypeStruct(tuple(type_.shape), DTYPES[str(type_.element_type)])

    traced = jax.jit(lambda *args: call.function(*args)).trace(*call.arguments)
    try:
        lowered = traced.lower(lowering_platforms=("cuda",))
    except NotImplementedError:  # implementation="hopper", and no kernel runs it
        return
    for launch in custom_calls(lowered.compiler_ir("stablehlo"), ffi_target.TARGET):
        plan = list(launch.attributes["mhlo.backend_config"]["plan"])
        yield plan, [*arrays(launch.operands)], [*arrays(launch.results)]


def run_launches(launcher: Launcher, driver: Driver, call: Call, digest: str) -> int:
    """Loads and runs each launch of a call, on arrays of the sizes that it has; counts them."""
    count = 0
    for count, (plan, operands, results) in enumerate(launched_arrays(call), 1):
        sizes = parameter_bytes(plan)
        launcher.resolve = lambda digest, spec, sizes=sizes: driver.add_kernel_of(sizes)
        zeros = [jax.device_put(jnp.zeros(x.shape, x.dtype), CPU) for x in operands]
        program = load(launcher, plan, f"{digest}_{count}", zeros, results)
        jax.block_until_ready(program(*zeros))
    return count


@pytest.mark.slow
def test_random_programs_keep_within_their_buffers(launcher, driver, digest):
    calls = random_calls(40, seed=31)
    ran = sum(run_launches(launcher, driver, call, f"{digest}_{i}") for i, call in enumerate(calls))
    assert len(driver.calls("cuLaunchKernelEx")) == ran > 12


def test_an_address_that_tma_cannot_take_is_refused(launcher, driver, digest):
    program = load(launcher, PLAN.encode(), digest)
    launcher.shim.shim_misalign(8)
    try:
        with pytest.raises(jax.errors.JaxRuntimeError, match="buffer 0 is not a multiple of 16"):
            jax.block_until_ready(program(A, B))
    finally:
        launcher.shim.shim_misalign(0)
    assert driver.calls("cuLaunchKernelEx") == []


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


@pytest.mark.slow
def test_an_allocation_that_fails_is_an_error(folder, driver, digest):
    """Whichever it is: nothing may unwind into XLA."""
    sources = [FAKES / "failing_new.cc", *sorted(FAKES.parents[1].glob("ffi/src/*.cc"))]
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
    refused = load(alone, PLAN.encode(), digest, results=(D, small))
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
