"""A whole step of training: its kernels, CUDA graphs of it, and threads that run it on all GPUs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from processes import assert_graphs_change_nothing, run_python
from support import training_step

TARGET = 'custom_call_target="jax_hopper_gemm'
STEPS = 4


def trained(step, seed, device):
    """Returns the bits of the parameters after some steps, and of the losses."""
    parameters = jax.device_put(training_step.parameters(seed), device)
    losses = []
    for i in range(STEPS):
        batch = jax.device_put(training_step.batch(100 * seed + i), device)
        parameters, loss = step(parameters, *batch)
        losses.append(loss)
    assert {device} == set().union(*(x.devices() for x in losses))
    return training_step.bits((parameters, losses))


def test_a_step_runs_on_our_kernels_and_learns(checked):
    parameters, batch = training_step.parameters(), training_step.batch()
    step = jax.jit(training_step.step).lower(parameters, *batch).compile()
    text = step.as_text() or ""
    assert text.count(TARGET) == training_step.LAUNCHES
    assert " dot(" not in text and "__cublas" not in text
    losses = []
    for _ in range(8):
        parameters, loss = step(parameters, *batch)
        losses.append(float(loss))
    assert np.isfinite(losses).all() and losses[-1] < 0.99 * losses[0]
    for spec in training_step.specs():
        checked(spec)


REPLAYS = """
from functools import partial
from support import training_step

@partial(jax.jit, donate_argnums=0)
def step(parameters, x, sizes):
    return training_step.step(parameters, x, sizes)

parameters = jax.device_put(training_step.parameters())
kept, addresses, losses = [], set(), []
for seed in range(8):
    x, sizes = jax.device_put(training_step.batch(seed))
    if seed % 2:  # new memory for the parameters, too, and the old one in other hands
        parameters = jax.tree.map(lambda p: jnp.array(p, copy=True), parameters)
    kept += [x, jnp.zeros((1 + 3 * seed, 4096))]
    addresses.add((x.unsafe_buffer_pointer(), parameters["experts"].unsafe_buffer_pointer()))
    parameters, loss = step(parameters, x, sizes)
    losses.append(loss)
assert len(addresses) > 4
assert len({float(loss) for loss in losses}) == len(losses)
np.save(folder + "/outputs", training_step.bits((parameters, losses)))
"""


def test_cuda_graphs_of_a_step_replay_with_other_buffers(tmp_path):
    assert_graphs_change_nothing(REPLAYS, tmp_path, "jit_step")


def test_threads_train_on_all_gpus_at_once():
    """On one GPU or two; each thread has parameters of its own, half of them a program as well."""
    devices = jax.devices()[:2]
    shared = jax.jit(training_step.step)
    cases = [(seed, devices[seed % len(devices)]) for seed in range(8)]
    alone = [trained(shared, *case) for case in cases]

    def work(case):
        seed, device = case
        step = shared if seed < 4 else jax.jit(lambda *args: training_step.step(*args))
        return [trained(step, seed, device) for _ in range(3)]

    with ThreadPoolExecutor(len(cases)) as pool:
        for expected, results in zip(alone, pool.map(work, cases), strict=True):
            for result in results:
                assert np.array_equal(result, expected)
    assert not np.array_equal(alone[0], alone[1])


EXPORTED = """
from support import training_step

arguments = training_step.parameters(), *training_step.batch()
"""

WRITE = """
step = jax.jit(training_step.step)
program = jax.export.export(
    step, platforms=["cuda"], disabled_checks=jhg.export_disabled_checks()
)(*arguments)
open(folder + "/program", "wb").write(program.serialize())
np.save(folder + "/outputs", training_step.bits(step(*arguments)))
"""

READ = """
program = jax.export.deserialize(bytearray(open(folder + "/program", "rb").read()))
found = training_step.bits(jax.jit(program.call)(*arguments))
assert np.array_equal(found, np.load(folder + "/outputs.npy")) and np.any(found)
print([m for m in sys.modules if m == "cutlass"])
"""


def test_an_exported_step_has_the_same_bits_in_a_fresh_process(tmp_path):
    pytest.importorskip("flatbuffers")  # jax serialises with it, and does not ask for it
    run_python(EXPORTED + WRITE, tmp_path)
    assert run_python(EXPORTED + READ, tmp_path) == "[]"
