"""The programs that a GPU runs accelerated: they are fused, and right without a GPU, too."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from support import fused_programs
from support.fused_programs import FUSED_PROGRAMS

import jax_hopper_gemm as jhg
from jax_hopper_gemm.interop import rewrite_jaxpr

LEFT = (
    rewrite_jaxpr.ROWS_APART,
    "our best kernel is expected to take",
    "multiplies float32 by bfloat16",
)

# The programs are long; what of JAX they depend on, shorter tests try in all versions.
pytestmark = pytest.mark.pure


@pytest.mark.parametrize("name", FUSED_PROGRAMS)
def test_their_kernels_compute_what_follows_products(name):
    program = FUSED_PROGRAMS[name]
    report = jhg.explain(program.step, *program.abstract())
    left = [x.reason for x in report.products if x.path != "hopper"]
    assert all(any(x in reason for x in LEFT) for reason in left), left
    operations = {
        node.op
        for spec in program.specs() if spec.epilogue
        for node in spec.epilogue.nodes
    }  # fmt: skip
    assert program.operations <= operations
    assert program.specs("float32")


@pytest.mark.slow
@pytest.mark.parametrize("name", FUSED_PROGRAMS)
def test_an_accelerated_step_is_the_step(name, monkeypatch, all_fused):
    for extent in ("TOKENS", "WIDTH", "HIDDEN"):
        monkeypatch.setattr(fused_programs, extent, getattr(fused_programs, extent) // 32)
    shapes = {
        key: tuple(x if x == fused_programs.EXPERTS else x // 32 for x in shape)
        for key, shape in FUSED_PROGRAMS[name].shapes.items()
    }
    program = replace(FUSED_PROGRAMS[name], shapes=shapes)
    arguments = program.arguments()
    ours = jax.jit(jhg.accelerate(program.step))(*arguments)
    plain, exact = program.step(*arguments), program.step(*program.arguments("float32"))
    for x, y, z in zip(*map(jax.tree.leaves, (ours, plain, exact)), strict=True):
        x, y, z = (np.asarray(array, np.float64) for array in (x, y, z))
        assert np.abs(x - z).max() <= 2 * np.abs(y - z).max() + 2.0**-9 * np.abs(z).max()
