"""`jax.export`: one program for CPU and CUDA, read back in another process."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from programs import LAUNCH, integers, run_fresh

import jax_hopper_gemm as jhg

pytestmark = pytest.mark.usefixtures("launcher")

A, B = integers((256, 128), "bfloat16"), integers((128, 512), "bfloat16", seed=1)


def loss(a, b):
    return jhg.matmul(a, b, preferred_element_type=jnp.float32).sum()


def exported(function, platforms=("cpu", "cuda"), args=(A, B)):
    checks = jhg.export_disabled_checks()
    return export.export(jax.jit(function), platforms=platforms, disabled_checks=checks)(*args)


def test_a_program_for_both_platforms_runs_in_a_fresh_process(tmp_path):
    program = exported(lambda a, b: (jhg.matmul(a, b), *jax.grad(loss, (0, 1))(a, b)))
    (tmp_path / "program").write_bytes(program.serialize(vjp_order=1))
    np.savez(tmp_path / "operands", a=A.astype(jnp.float32), b=B.astype(jnp.float32))
    source = (
        "import sys, pathlib, numpy as np, jax, jax.numpy as jnp\n"
        "from jax import export\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "program = export.deserialize((folder / 'program').read_bytes())\n"
        "operands = np.load(folder / 'operands.npz')\n"
        "a, b = (jnp.asarray(operands[x], jnp.bfloat16) for x in 'ab')\n"
        "out = [x.astype(jnp.float32) for x in jax.jit(program.call)(a, b)]\n"
        "np.savez(folder / 'results', *out)\n"
        "print('jax_hopper_gemm' in sys.modules)\n"
    )
    assert run_fresh(source, str(tmp_path)) == "False\n"  # the CPU's part needs nothing of ours
    with np.load(tmp_path / "results.npz") as results:
        product, grad_a, grad_b = results.values()
    np.testing.assert_array_equal(product, jnp.matmul(A, B).astype(jnp.float32))
    ones = np.ones((256, 512), np.float32)
    np.testing.assert_array_equal(grad_a, jnp.asarray(ones @ np.asarray(B, "f4").T, "bfloat16"))
    np.testing.assert_array_equal(grad_b, jnp.asarray(np.asarray(A, "f4").T @ ones, "bfloat16"))


def test_export_for_cuda_needs_no_gpu_and_the_disabled_check():
    function = lambda a, b: jhg.matmul(a, b, implementation="hopper")  # noqa: E731
    assert exported(function, ("cuda",)).mlir_module().count(LAUNCH) == 1
    with pytest.raises(ValueError, match="jax_hopper_gemm.v1.launch"):
        export.export(jax.jit(function), platforms=("cuda",))(A, B)


def test_symbolic_extents_go_to_xla():
    (rows,) = export.symbolic_shape("rows")
    args = (jax.ShapeDtypeStruct((rows, 128), jnp.bfloat16), B)
    program = exported(jhg.matmul, args=args)
    assert LAUNCH not in program.mlir_module()
    np.testing.assert_array_equal(jax.jit(program.call)(A[:7], B), jnp.matmul(A[:7], B))
    with pytest.raises(NotImplementedError, match="symbolic"):
        exported(lambda a, b: jhg.matmul(a, b, implementation="hopper"), ("cuda",), args)
