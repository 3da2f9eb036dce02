"""Plans that the FFI library refuses: malformed, unlike the kernel, or reaching out of a buffer."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from fake_driver.harness import NAME
from support.launches import CLEARING, PLAN, A, B, D, load, run_launches
from support.random_calls import random_calls

from jax_hopper_gemm.dispatch import H200, choose, problem_violations
from jax_hopper_gemm.dispatch.layout_legality import MAX_EXTENT
from jax_hopper_gemm.gemm.group_search import SPAN_EXTENT
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.gemm.type_legality import MAX_TENSOR_MAPS
from jax_hopper_gemm.launch.plan import make_plan


def test_an_offset_that_tma_cannot_take_is_refused(launcher, driver, digest):
    plan = replace(PLAN, params=(replace(PLAN.params[0], offset=8), *PLAN.params[1:]))
    launcher.resolve = lambda digest, spec: driver.add_kernel(plan)
    with pytest.raises(jax.errors.JaxRuntimeError, match="16"):
        jax.block_until_ready(load(launcher, plan.encode(), digest)(A, B))
    assert driver.calls("cuLaunchKernelEx") == []


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
    words = CLEARING
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
    words = list(CLEARING)
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
    words = list(CLEARING)
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
    plan = replace(PLAN, params=(MAX_TENSOR_MAPS + 1) * PLAN.params[:1])
    message = f"it has more than {MAX_TENSOR_MAPS} tensor maps"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        load(launcher, plan.encode(), digest)


def test_a_plan_of_more_buffers_than_the_call_has_is_refused(launcher, driver, digest):
    program = load(launcher, CLEARING, digest, results=(D,))
    with pytest.raises(jax.errors.JaxRuntimeError, match="refers to 4 buffers, the call has 3"):
        jax.block_until_ready(program(A, B))
    assert driver.calls("cuLaunchKernelEx") == []


def test_a_workspace_smaller_than_what_is_cleared_is_refused(launcher, driver, digest):
    small = jax.ShapeDtypeStruct((4,), jnp.uint8)
    program = load(launcher, CLEARING, digest, results=(D, small))
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
        words = list(CLEARING)
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
    work = [jax.ShapeDtypeStruct((nbytes,), jnp.uint8) for nbytes in plan.workspaces]
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
