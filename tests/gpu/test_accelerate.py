"""Training steps in plain JAX, accelerated: kernels with their epilogues, and their numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.fused_programs import DTYPES, FUSED_PROGRAMS

import jax_hopper_gemm as jhg

TARGET = 'custom_call_target="jax_hopper_gemm'


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("name", FUSED_PROGRAMS)
def test_an_accelerated_step_is_as_exact_as_the_plain_one(name, dtype, checked):
    """In float32 the plain one multiplies in TF32, as ours does."""
    program = FUSED_PROGRAMS[name]
    arguments = program.arguments(dtype)
    ours = jax.jit(jhg.accelerate(program.step)).lower(*arguments).compile()
    specs = program.specs(dtype)
    assert (ours.as_text() or "").count(TARGET) == len(specs)
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(program.step)(*program.arguments("float32"))
    plain = jax.jit(program.step)(*arguments)
    first, again = ours(*arguments), ours(*arguments)
    for x, y, z, same in zip(*map(jax.tree.leaves, (first, plain, exact, again)), strict=True):
        np.testing.assert_array_equal(x, same)
        x, y, z = (np.asarray(array, np.float64) for array in (x, y, z))
        assert np.isfinite(x).all()
        allowed = 2 * np.abs(y - z).max() + float(jnp.finfo(dtype).eps) / 4 * np.abs(z).max()
        assert np.abs(x - z).max() <= allowed
    for spec in specs:
        checked(spec)
