"""Flax's own layers on our kernels, by `nn.accelerate`: they learn as on XLA's."""

from __future__ import annotations

import jax
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs the extra `flax`")

import nnx_step  # noqa: E402
from flax import nnx  # noqa: E402

from jax_hopper_gemm import nn  # noqa: E402

TARGET = 'custom_call_target="jax_hopper_gemm'
STEPS = 6


def trained(step):
    """Returns the model after some steps, and their losses."""
    model, x = nnx_step.Model(), nnx_step.batch()
    losses = np.array([float(step(model, x)) for _ in range(STEPS)])
    assert model.calls[...] == STEPS
    return nnx.to_pure_dict(nnx.state(model, nnx.Param)), losses


def test_an_accelerated_model_learns_on_our_kernels_as_on_xla(checked):
    ours = nnx.jit(nn.accelerate(nnx_step.train_step, implementation="hopper"))
    text = ours.lower(nnx_step.Model(), nnx_step.batch()).compile().as_text() or ""
    assert text.count(TARGET) == nnx_step.LAUNCHES
    (state, losses), (expected, their_losses) = map(trained, (ours, nnx.jit(nnx_step.train_step)))
    assert losses[-1] < 0.99 * losses[0]
    np.testing.assert_allclose(losses, their_losses, rtol=STEPS * 2.0**-8)

    start = nnx.to_pure_dict(nnx.state(nnx_step.Model(), nnx.Param))

    def check(found, expected, start):
        moved = np.abs(np.asarray(expected) - np.asarray(start)).max()
        np.testing.assert_allclose(found, expected, rtol=0, atol=STEPS * 2.0**-6 * moved)

    jax.tree.map(check, state, expected, start)
    for spec in nnx_step.specs():
        checked(spec)
