"""Ragged products as users call them, on a GPU: values, gradients, vmap, sizes that change."""

from __future__ import annotations

import group_sizes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import assert_graphs_change_nothing
from repeats import assert_same_bits
from support.grouped_programs import GROUPED_PROGRAMS, ragged_dot, training

from jax_hopper_gemm import ops

TARGET = 'custom_call_target="jax_hopper_gemm'


@pytest.mark.parametrize("name", GROUPED_PROGRAMS)
def test_program_is_right(name, checked):
    program = GROUPED_PROGRAMS[name]
    run = jax.jit(program.run)
    for seed in range(2):
        arguments = program.arguments(seed)
        program.check(run(*arguments), arguments, name)
    for spec in program.specs():
        checked(spec)


@pytest.mark.parametrize("name", ["mixtral", "qwen3", "deepseek", "decode", "over sizes"])
def test_results_have_the_same_bits_in_20_repeats(name):
    program = GROUPED_PROGRAMS[name]
    assert_same_bits(jax.jit(program.run), program.arguments())


def test_only_kernels_of_ours_run_in_a_step_of_training():
    program = GROUPED_PROGRAMS["mixtral"]
    text = jax.jit(program.run).lower(*program.arguments()).compile().as_text() or ""
    assert text.count(TARGET) == 3
    assert " transpose(" not in text and " while(" not in text and " dot(" not in text


def test_one_executable_serves_all_sizes():
    program = GROUPED_PROGRAMS["over sizes"]
    arguments = program.arguments()
    run = jax.jit(program.run).lower(*arguments).compile()
    for name, make in {**group_sizes.KINDS, **group_sizes.HOSTILE}.items():
        sizes = make(arguments[0].shape[0], arguments[-1].size, 1)
        given = [*arguments[:-1], sizes]
        program.check(run(*map(jnp.asarray, given)), given, name)


def test_rows_of_no_group_do_not_matter():
    program = GROUPED_PROGRAMS["under sizes"]
    lhs, rhs, cotangent, sizes = program.arguments()
    used = int(sizes.sum())
    assert used < lhs.shape[0]
    run = jax.jit(program.run)
    expected = run(lhs, rhs, cotangent, sizes)
    lhs[used:], cotangent[used:] = np.nan, np.inf
    for one, other in zip(expected, run(lhs, rhs, cotangent, sizes), strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))


def test_weights_of_empty_groups_do_not_matter():
    program = GROUPED_PROGRAMS["half_empty sizes"]
    lhs, rhs, cotangent, sizes = program.arguments()
    run = jax.jit(program.run)
    expected = run(lhs, rhs, cotangent, sizes)
    rhs[sizes == 0] = np.nan
    for one, other in zip(expected, run(lhs, rhs, cotangent, sizes), strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))
    assert (np.asarray(expected[2])[sizes == 0] == 0).all()


def test_sizes_that_are_computed_on_the_gpu_are_never_read_by_the_host():
    program = training(900, 64, 72, 6, group_sizes.uneven)
    lhs, rhs, cotangent, _ = program.arguments()
    experts = np.random.default_rng(0).integers(0, 6, 900)

    @jax.jit
    def routed(lhs, rhs, cotangent, experts):
        return program.run(lhs, rhs, cotangent, jnp.bincount(experts, length=6))

    with jax.transfer_guard_device_to_host("disallow"):
        on_gpu = [jax.device_put(x) for x in (lhs, rhs, cotangent, experts)]
        results = jax.block_until_ready(routed(*on_gpu))
    sizes = np.bincount(experts, minlength=6).astype(np.int32)
    program.check(results, [lhs, rhs, cotangent, sizes], "routed")


def test_the_answers_of_xla_are_near():
    program = GROUPED_PROGRAMS["float32 result"]
    lhs, rhs, sizes = program.arguments()
    ours = jax.jit(program.run)(lhs, rhs, sizes)
    theirs = ops.ragged_dot(
        lhs, rhs, sizes, preferred_element_type=jnp.float32, implementation="xla"
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-3)
    assert np.any(np.asarray(ours) != 0)


def test_threads_of_a_loop_keep_their_order():
    lhs, rhs, sizes = GROUPED_PROGRAMS["float32 result"].arguments()
    rhs = np.ascontiguousarray(np.resize(rhs, (rhs.shape[0], lhs.shape[1], lhs.shape[1]))) / 12
    rhs = rhs.astype(lhs.dtype)

    def step(i, x):
        return ragged_dot(x, rhs, jnp.roll(jnp.asarray(sizes), i))

    looped = jax.jit(lambda x: jax.lax.fori_loop(0, 5, step, x))(lhs)
    x = jnp.asarray(lhs)
    for i in range(5):
        x = step(i, x)
    assert np.array_equal(np.asarray(looped), np.asarray(x))
    assert np.any(np.asarray(x) != 0)


STEPS = """
import group_sizes
from support.grouped_programs import training

program = training(1024, 136, 264, 40, group_sizes.uneven)
kinds = {**group_sizes.KINDS, **group_sizes.HOSTILE}

@jax.jit
def chain(lhs, rhs, cotangent, sizes):
    product, of_lhs, of_rhs = program.run(lhs, rhs, cotangent, sizes)
    return program.run(of_lhs, rhs + of_rhs, product, sizes[::-1])

outputs, kept = [], []
for seed, make in enumerate(kinds.values()):  # other buffers and other sizes each time
    lhs, rhs, cotangent, _ = program.arguments(seed)
    given = [jnp.asarray(x) for x in (lhs, rhs / 16, cotangent / 16, make(1024, 40, seed))]
    kept.append(given)
    outputs += [np.asarray(x).view("u2").ravel() for x in chain(*given)]
assert chain._cache_size() == 1
assert sum(np.any(x) for x in outputs) > len(outputs) // 2
np.save(folder + "/outputs", np.concatenate(outputs))
"""


def test_cuda_graphs_serve_sizes_that_change(tmp_path):
    assert_graphs_change_nothing(STEPS, tmp_path, "jit_chain")
