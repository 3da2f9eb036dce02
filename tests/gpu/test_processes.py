"""What must hold across processes, or needs a process of its own."""

from __future__ import annotations

import pytest
from processes import assert_graphs_change_nothing, run_python


def test_an_exported_program_runs_in_a_fresh_process(tmp_path):
    pytest.importorskip("flatbuffers")  # jax serialises with it, and does not ask for it
    run_python(
        """
        a, b = normal(0, (264, 512)), normal(1, (512, 328))
        f = jax.jit(lambda a, b: jnp.sum(hopper(a, b).astype(jnp.float32) ** 2))
        program = jax.jit(lambda a, b: (hopper(a, b), jax.grad(f)(a, b)))
        exported = jax.export.export(program, disabled_checks=jhg.export_disabled_checks())(a, b)
        open(folder + "/program", "wb").write(exported.serialize())
        product, gradient = program(a, b)
        np.savez(folder + "/results", product=product.view("u2"), gradient=gradient.view("u2"))
        """,
        tmp_path,
    )
    compilers = run_python(
        """
        program = jax.export.deserialize(open(folder + "/program", "rb").read())
        product, gradient = program.call(normal(0, (264, 512)), normal(1, (512, 328)))
        saved = np.load(folder + "/results.npz")
        assert np.array_equal(saved["product"], product.view("u2"))
        assert np.array_equal(saved["gradient"], gradient.view("u2"))
        assert np.any(saved["gradient"] != 0)
        print([m for m in sys.modules if m == "cutlass"])
        """,
        tmp_path,
    )
    assert compilers == "[]"


CHAIN = """
@jax.jit
def chain(x, a, b):
    for _ in range(4):
        x = hopper(hopper(x, a), b)
    return x

outputs, kept = [], []
for seed in range(6):  # new buffers each time: a graph's addresses must be updated
    x = normal(seed, (264, 264))
    a, b = normal(10 + seed, (264, 520)) / 23, normal(20 + seed, (520, 264)) / 16
    kept.append((x, a, b))
    outputs.append(np.asarray(chain(x, a, b)).view("u2"))
assert all(np.any(o != outputs[0]) for o in outputs[1:])
np.save(folder + "/outputs", np.stack(outputs))
"""


def test_cuda_graphs_change_nothing(tmp_path):
    assert_graphs_change_nothing(CHAIN, tmp_path, "jit_chain")


def test_out_of_memory_is_an_error_and_the_next_product_works(tmp_path):
    said = run_python(
        """
        a, b = normal(0, (65536, 1024)), normal(1, (1024, 65536))
        try:
            jax.block_until_ready(jax.jit(hopper)(a, b))
            print("no error")
        except jax.errors.JaxRuntimeError as error:
            print(str(error).splitlines()[0])
        a, b = normal(0, (64, 64)), normal(1, (64, 64))
        small = np.asarray(jax.jit(hopper)(a, b))
        assert np.isfinite(small.astype(np.float32)).all() and np.any(small != 0)
        """,
        tmp_path,
        XLA_PYTHON_CLIENT_PREALLOCATE="true",
        XLA_PYTHON_CLIENT_MEM_FRACTION=".03",
    )
    assert "RESOURCE_EXHAUSTED" in said


def test_one_program_lowers_for_cpu_and_gpu(tmp_path):
    run_python(
        """
        a, b = normal(0, (64, 128)), normal(1, (128, 64))
        exported = jax.export.export(
            jax.jit(jhg.matmul),
            platforms=["cpu", "cuda"],
            disabled_checks=jhg.export_disabled_checks(),
        )(a, b)
        host = np.asarray(a), np.asarray(b)
        exact, magnitude = reference.product(*host), reference.magnitude(*host)
        for device in (jax.devices()[0], jax.devices("cpu")[0]):
            result = exported.call(*jax.device_put((a, b), device))
            assert result.devices() == {device}
            bounds.assert_within_bound(
                np.asarray(result), exact, magnitude, 128, str(device), "float32"
            )
        """,
        tmp_path,
    )
