"""Worker processes: forked before CUDA is used, forked after, and spawned."""

from __future__ import annotations

from processes import run_command, run_python

FORK = """
import os
import signal
import traceback

def work(seed):
    a, b = normal(seed, (264, 512)), normal(seed + 9, (512, 328))
    return np.asarray(jax.jit(hopper)(a, b)).view("u2")

def in_child(function):
    # What the function returns in a forked process, which ends after a minute at the latest.
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            os.write(writer, function().encode())
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    os.waitpid(child, 0)
    return said
"""

FORKED_BEFORE = """
def save(seed):
    np.save(f"{folder}/{seed}", work(seed))
    return "done"

assert [in_child(lambda: save(seed)) for seed in (1, 2)] == ["done", "done"]
for seed in (1, 2):  # the parent may use CUDA, too
    assert np.array_equal(np.load(f"{folder}/{seed}.npy"), work(seed))
assert np.any(work(1) != work(2))
"""

FORKED_AFTER = """
x = np.ones((256, 512), jnp.bfloat16)
before = work(1)

def attempt():
    try:
        jax.jit(lambda x: hopper(x, x.T))(x)
    except RuntimeError as error:
        return str(error)
    return "no error"

print(in_child(attempt))
assert np.array_equal(work(1), before)
"""

SPAWNED = """
import multiprocessing
import jax
import jax.numpy as jnp
import numpy as np
import jax_hopper_gemm as jhg

def work(seed):
    a = jax.random.normal(jax.random.key(seed), (264, 264), jnp.bfloat16)
    return np.asarray(jhg.matmul(a, a, implementation="hopper")).view("u2")

if __name__ == "__main__":
    expected = [work(seed) for seed in range(4)]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.map_async(work, range(4)).get(timeout=180)
    assert np.array_equal(expected, found) and np.any(expected[0] != expected[1])
    print("done")
"""


def test_workers_forked_before_cuda_is_used_run_kernels(tmp_path):
    run_python(FORK + FORKED_BEFORE, tmp_path)


def test_a_worker_forked_after_kernels_ran_is_told_so(tmp_path):
    said = run_python(FORK + FORKED_AFTER, tmp_path)
    assert "forked" in said and "spawn" in said


def test_spawned_workers_run_kernels_beside_a_parent_that_does(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SPAWNED)
    assert run_command(str(script)) == "done"
