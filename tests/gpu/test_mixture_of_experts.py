"""A mixture of experts as users call it, on a GPU: values, gradients, memory, training."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_programs import COPYING, MOE_PROGRAMS, MoeProgram, rows_written
from repeats import assert_same_bits

from jax_hopper_gemm import moe

TARGET = 'custom_call_target="jax_hopper_gemm'
PRODUCTS = r' dot\(| dot-general\(|custom_call_target="__cublas[^"]*"|ragged-dot\('


def compiled(program: MoeProgram, step: str = "step") -> Any:
    return jax.jit(getattr(program, step)).lower(*program.abstract()).compile()


def launched(text: str | None) -> list[str]:
    """Returns the names of the kernels of ours that a compiled program launches."""
    lines = [line for line in (text or "").splitlines() if TARGET in line]
    return [re.findall(r"jhg_\w+", line)[0] for line in lines]


@pytest.mark.parametrize("name", MOE_PROGRAMS)
def test_layer_and_gradients_are_as_good_as_arrays_of_16_bits_allow(name, checked):
    program = MOE_PROGRAMS[name]
    alone, step = jax.jit(program.layer), jax.jit(program.step)
    for seed in range(2):
        arguments = program.arguments(seed)
        exact, rounded, ours = (
            program.exact(arguments),
            program.rounded(arguments),
            step(*arguments),
        )
        program.assert_as_good(ours, rounded, exact)
        program.assert_as_good([alone(*arguments[:-1]), *ours[1:]], rounded, exact)
    for spec in program.specs():
        checked(spec)


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "decode"])
def test_results_have_the_same_bits_in_20_repeats(name):
    program = MOE_PROGRAMS[name]
    assert_same_bits(jax.jit(program.step), program.arguments())


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_xla_multiplies_for_the_router_alone(name):
    text = compiled(MOE_PROGRAMS[name]).as_text() or ""
    assert len(re.findall(PRODUCTS, text)) == 2  # of its product and the two gradients of that
    assert Counter("grouped" in name for name in launched(text)) == {True: 2 + 4, False: 1}


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_the_experts_products_read_tokens_through_their_indices(name):
    names = launched(compiled(MOE_PROGRAMS[name]).as_text())
    found = Counter(re.findall(r"gather_\w|$", name)[0] for name in names if "grouped" in name)
    # Gate and up, their weights' gradient, the hidden values' gradient; the gradient of down.
    assert found == {"gather_a": 3, "gather_b": 1, "": 2}


@pytest.mark.parametrize("name", COPYING)
def test_no_copy_of_the_tokens_is_written(name):
    program = MOE_PROGRAMS[name]
    arguments = program.arguments()
    without, copying = compiled(program), compiled(program, "copying_step")
    extents = program.rows, program.features
    assert rows_written(without.as_text(), *extents) == 0
    assert rows_written(copying.as_text(), *extents) >= 2  # tokens, and their results' cotangents
    memory, more = (x.memory_analysis().temp_size_in_bytes for x in (without, copying))
    assert more - memory >= program.copy_bytes
    program.assert_as_good(without(*arguments), copying(*arguments), program.exact(arguments))


def test_sizes_are_never_read_by_the_host():
    program = MOE_PROGRAMS["mixtral"]
    arguments = [jax.device_put(a) for a in program.arguments()]
    run = compiled(program)
    with jax.transfer_guard_device_to_host("disallow"):
        jax.block_until_ready(run(*arguments))


def test_the_layer_of_flax_trains():
    nnx = pytest.importorskip("flax.nnx", reason="needs the extra `flax`")
    from jax_hopper_gemm import nn

    program = MOE_PROGRAMS["mixtral"]
    d, f = program.features, program.hidden
    layer = nn.MoE(
        d, f, num_experts=program.experts, experts_per_token=program.k, dtype=jnp.bfloat16,
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    x = jax.random.normal(jax.random.key(1), (program.tokens, d))
    wanted = jnp.tanh(x @ jax.random.normal(jax.random.key(2), (d, d)) / d**0.5)

    def loss(layer):
        y, statistics = layer(x.astype(jnp.bfloat16), return_statistics=True)
        error = jnp.mean((y.astype(jnp.float32) - wanted) ** 2)
        return error + 0.01 * moe.load_balancing_loss(statistics)

    graph, state = nnx.split(layer)

    @jax.jit
    def step(state):
        value, gradient = jax.value_and_grad(lambda s: loss(nnx.merge(graph, s)))(state)
        return value, jax.tree.map(lambda p, g: p - 30.0 * g, state, gradient)

    text = step.lower(state).compile().as_text()
    assert len([name for name in launched(text) if "grouped" in name]) == 2 + 3  # none of x
    losses = []
    for _ in range(30):
        value, state = step(state)
        losses.append(float(value))
    assert all(np.isfinite(losses)) and losses[-1] < 0.5 * losses[0], losses
