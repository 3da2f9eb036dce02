"""A GPU that others use, too, and work that is given up: other processes, held SMs, interrupts."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import many_shapes
import numpy as np
import pytest
from processes import run_python
from support import cases, grouped, random_operands, trial
from support.gpu import Gpu
from support.programs import PROGRAMS

from jax_hopper_gemm.dispatch import H200, table_specs
from jax_hopper_gemm.gemm.spec import GemmSpec

MPS = "nvidia-cuda-mps-control"

HOLD_MS = 60
HOLD_SMEM = 160 << 10  # so that a block has its SM for itself
# Each block waits for so many nanoseconds.
HOLD = b"""
.version 7.8
.target sm_90
.address_size 64
.visible .entry hold(.param .u64 nanoseconds)
{
  .reg .u64 %begun, %now, %time;
  .reg .pred %early;
  ld.param.u64 %time, [nanoseconds];
  mov.u64 %begun, %globaltimer;
again:
  mov.u64 %now, %globaltimer;
  sub.u64 %now, %now, %begun;
  setp.lt.u64 %early, %now, %time;
  @%early bra again;
  ret;
}
\0"""


def kinds() -> list[GemmSpec]:
    """Returns a kernel of each scheduler, size of cluster and split that dispatch can choose."""
    found: dict[tuple, GemmSpec] = {}
    for spec in table_specs(H200, [("bfloat16", "bfloat16")]):
        kind = (spec.tile_scheduler, spec.split_k, spec.cluster_k, spec.cluster_size, spec.grouped)
        found.setdefault(kind, spec)
    return list(found.values())


@pytest.fixture
def hold(gpu: Gpu) -> Iterator[Callable[[int], Any]]:
    """A function that holds so many SMs for `HOLD_MS`, on a stream of its own, which it returns."""
    module = gpu.call("cuModuleLoadData", HOLD)
    kernel = gpu.call("cuModuleGetFunction", module, b"hold")
    limit = gpu.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    gpu.call("cuFuncSetAttribute", kernel, limit, HOLD_SMEM)
    stream = gpu.call("cuStreamCreate", int(gpu.driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    arguments = ((HOLD_MS * 1_000_000,), (ctypes.c_uint64,))

    def start(sms: int) -> Any:
        shape = (sms, 1, 1, 32, 1, 1)  # of the grid, of a block
        gpu.call("cuLaunchKernel", kernel, *shape, HOLD_SMEM, stream, arguments, 0)
        return stream

    yield start
    gpu.call("cuStreamSynchronize", stream)
    gpu.call("cuStreamDestroy", stream)
    gpu.call("cuModuleUnload", module)


@pytest.mark.parametrize("spec", kinds(), ids=lambda spec: spec.name)
def test_kernels_beside_others_that_hold_sms_give_the_same_bits(spec, gpu, hold):
    """Also where one SM is left: what waits for another CTA must not keep it from starting."""
    num_sms = gpu.device.num_sms
    if spec.grouped:
        case = grouped.edge_cases(spec, num_sms, exact=False)[2]
        problem, order, inputs = case.problem, case.raster_order, case.inputs()
    else:
        problems = cases.split_problems if spec.split_k else cases.edge_problems
        problem, order = problems(spec, num_sms)[-1]
        inputs = random_operands.normal_inputs(problem, 0)
    on_gpu = trial.uploaded(gpu, problem, spec, order, inputs)

    def bits() -> list[np.ndarray]:
        for buffer in (*on_gpu.outputs, *on_gpu.launch.workspaces):
            buffer.fill(trial.POISON)
        on_gpu.launch()
        gpu.call("cuStreamSynchronize", 0)  # not what holds the SMs
        return [output.download("u1") for output in on_gpu.outputs]

    alone, beside = bits(), 0
    for held in (16, num_sms // 2, num_sms - 2, num_sms - 1):
        stream = hold(held)
        found = bits()
        beside += int(gpu.driver.cuStreamQuery(stream)[0]) != 0
        gpu.call("cuStreamSynchronize", stream)
        for one, other in zip(alone, found, strict=True):
            assert np.array_equal(one, other), f"{held} SMs held"
    assert beside, "no launch ended while SMs were held"


# What a process computes again and again. It begins when all have come.
WORK = """
import os
import time
from support.programs import PROGRAMS

names = ("gelu MLP, training", "swiglu, training", "router", "statistics")
programs = {name: jax.jit(PROGRAMS[name].ours) for name in names}
arguments = {name: PROGRAMS[name].arguments() for name in names}

def bits():
    found = {}
    for name in names:
        for i, x in enumerate(jax.tree.leaves(programs[name](*arguments[name]))):
            found[f"{name} {i}"] = np.atleast_1d(np.asarray(x)).view("u1")
    return found
"""
ALONE = WORK + 'np.savez(folder + "/alone", **bits())'
TOGETHER = (
    WORK
    + """
alone = np.load(folder + "/alone.npz")
bits()
open(f"{folder}/{os.getpid()}.ready", "w").close()
begun = time.monotonic()
while len([name for name in os.listdir(folder) if name.endswith(".ready")]) < 2:
    assert time.monotonic() < begun + 120, "the other process did not come"
    time.sleep(0.01)
rounds, end = 0, time.monotonic() + 3
while time.monotonic() < end:
    rounds += 1
    for name, found in bits().items():
        assert np.array_equal(found, alone[name]), (rounds, name)
print(rounds)
"""
)


def run_two(folder: Path, **environment: str) -> None:
    """Runs two processes at once; each compares what it computes with what one alone computed."""
    run_python(ALONE, folder)
    with ThreadPoolExecutor(2) as pool:
        run = partial(run_python, TOGETHER, folder, 240, **environment)
        both = [pool.submit(run) for _ in range(2)]
        assert all(int(each.result()) > 3 for each in both)


def test_two_processes_on_one_gpu_get_what_one_alone_gets(tmp_path):
    run_two(tmp_path)


@pytest.mark.skipif(not shutil.which(MPS), reason=f"{MPS} is not installed")
def test_two_processes_share_the_sms_by_mps(tmp_path):
    places = {f"CUDA_MPS_{x}_DIRECTORY": str(tmp_path / x) for x in ("PIPE", "LOG")}
    for place in places.values():
        Path(place).mkdir()
    control = partial(subprocess.run, env={**os.environ, **places}, timeout=30, text=True)
    if control([MPS, "-d"], capture_output=True).returncode:
        pytest.skip("no MPS daemon starts here")
    try:
        run_two(tmp_path, **places)
        servers = control([MPS], input="get_server_list\n", capture_output=True).stdout
        assert servers.split(), "no process used the daemon"
    finally:
        control([MPS], input="quit -t 5\n", capture_output=True)


def test_caches_that_are_cleared_while_programs_run_change_nothing():
    program = PROGRAMS["gelu MLP, training"]
    arguments = program.arguments()
    alone = jax.tree.leaves(jax.jit(program.ours)(*arguments))
    for _ in range(3):
        step = jax.jit(lambda *x: program.ours(*x))
        running = [step(*arguments) for _ in range(20)]
        del step
        jax.clear_caches()
        gc.collect()
        for found in running:
            for one, other in zip(alone, jax.tree.leaves(found), strict=True):
                assert np.array_equal(np.asarray(one).view("u1"), np.asarray(other).view("u1"))


INTERRUPTED = """
import signal

a, b = np.ones((264, 512), jnp.bfloat16), np.full((512, 328), 2, jnp.bfloat16)
stopped = 0
hopper(a, b)  # imports what the first product imports
signal.signal(signal.SIGALRM, signal.default_int_handler)
for delay in (0.01, 0.05, 0.1, 0.2, 0.4, 0.8):
    signal.setitimer(signal.ITIMER_REAL, delay, 1)  # again: Python ignores one in a finalizer
    try:
        for i in range(10_000):
            jax.block_until_ready(jax.jit(lambda a, b, i=i: hopper(a, b) + i)(a, b))
    except (KeyboardInterrupt, jax.errors.JaxRuntimeError) as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert "KeyboardInterrupt" in repr(error)
        stopped += 1
    found = jax.jit(lambda a, b: hopper(a, b))(a, b)
    assert np.array_equal(found, np.full((264, 328), 1024, jnp.bfloat16))
print(stopped)
"""


def test_work_that_is_interrupted_leaves_all_in_order(tmp_path):
    assert run_python(INTERRUPTED, tmp_path) == "6"


def test_many_shapes_leave_no_more_behind_than_those_of_xla():
    """JAX_HOPPER_GEMM_SHAPES=10000 runs so many; kernels are built for as many."""
    gpu = Gpu()

    def free() -> int:
        return int(gpu.call("cuMemGetInfo")[0])

    theirs, ours = (
        [*many_shapes.growth(many_shapes.compiled(function), many_shapes.COUNT, free)][-1]
        for function in (many_shapes.theirs, many_shapes.ours)
    )
    assert (ours < theirs + many_shapes.SLACK).all(), (theirs, ours)
