"""Flax's own layers on our kernels, by `nn.accelerate`: they learn as on XLA's."""

from __future__ import annotations

import re

import jax
import pytest

pytest.importorskip("flax", reason="needs the extra `flax`")

import nnx_step  # noqa: E402
import notebook_block  # noqa: E402
from flax import nnx  # noqa: E402
from learning import STEPS, assert_learned_alike, parameters, trained  # noqa: E402
from meshes import DEVICES, OTHERS, launched, names  # noqa: E402

from jax_hopper_gemm import nn  # noqa: E402


def test_an_accelerated_model_learns_on_our_kernels_as_on_xla(checked):
    def learned(step):
        model, x = nnx_step.Model(), nnx_step.batch()
        found = trained(model, lambda: step(model, x))
        assert model.calls[...] == STEPS
        return found

    ours = nnx.jit(nn.accelerate(nnx_step.train_step, implementation="hopper"))
    text = ours.lower(nnx_step.Model(), nnx_step.batch()).compile().as_text() or ""
    specs = nnx_step.specs()
    assert launched(text) == names(specs)
    assert sum(spec.panels for spec in specs) == nnx_step.PRODUCTS
    found, expected = map(learned, (ours, nnx.jit(nnx_step.train_step)))
    assert found[1][-1] < 0.99 * found[1][0]
    assert_learned_alike(found, expected, parameters(nnx_step.Model()))
    for spec in specs:
        checked(spec)


@pytest.mark.parametrize("axis", notebook_block.MESHES)
def test_the_block_of_the_notebook_learns_on_shares_as_on_xla(axis, checked):
    if len(jax.devices()) < DEVICES:
        pytest.skip(f"needs {DEVICES} GPUs")

    def learned(make):
        notebook = notebook_block.defined()
        model, optimizer, words = notebook.model, notebook.optimizer, next(notebook.batches(0))
        step = make(notebook.train_step)
        return trained(model, lambda: step(model, optimizer, words))

    with jax.set_mesh(notebook_block.mesh_of(axis, jax.devices())):
        notebook = notebook_block.defined()
        step = notebook_block.lowered(notebook).compile()
        text = step.as_text() or ""
        assert "jax_hopper_gemm.v1.partition" not in text
        found = learned(lambda step: nnx.jit(nn.accelerate(step)))
        expected = learned(nnx.jit)
    assert found[1][-1] < 0.75 * found[1][0]
    assert_learned_alike(found, expected, parameters(notebook.model))
    specs = notebook_block.specs(axis)
    products = sum(spec.panels for spec in specs)
    assert launched(text) == names(specs)
    assert products > notebook_block.PRODUCTS // 3
    assert products + len(re.findall(OTHERS, text)) <= notebook_block.PRODUCTS
    for spec in specs:
        checked(spec)
