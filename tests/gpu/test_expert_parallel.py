"""Experts spread over the GPUs of this machine: the same layer, on two or more."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_hopper_gemm import moe
from jax_hopper_gemm.testing import group_sizes
from jax_hopper_gemm.testing.grouped_programs import contraction, rows_product
from jax_hopper_gemm.testing.moe_programs import (
    AXIS,
    EXCHANGES,
    RAGGED_DOT,
    SPREAD,
    ragged_dot_specs,
    ragged_dot_step,
)
from jax_hopper_gemm.testing.tolerance import assert_within_bound

TARGET = 'custom_call_target="jax_hopper_gemm'
NAMES = ("y", "of x", "of the router", "of gate and up", "of down")


@pytest.fixture
def mesh() -> Mesh:
    """All GPUs of this machine, the largest power of two of them."""
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("needs two GPUs")
    count = 1 << (min(len(devices), 8).bit_length() - 1)
    return Mesh(np.array(devices[:count]), (AXIS,), axis_types=(AxisType.Auto,))


def placed(mesh: Mesh, arguments: list[np.ndarray]) -> list[jax.Array]:
    """Returns x, router, gate_up, down and the cotangent where the layer wants them."""
    specs = P(AXIS), P(), P(AXIS), P(AXIS), P(AXIS)
    return [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip(arguments, specs, strict=True)
    ]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_experts_over_gpus_are_the_layer_of_one(exchange, mesh, checked):
    arguments = SPREAD.arguments()
    given = placed(mesh, arguments)
    step = jax.jit(lambda *args: SPREAD.spread(mesh, exchange, *args)).lower(*given).compile()
    # Gate and up with down, two gradients of each, the router's product and its two gradients.
    text = step.as_text()
    assert text.count(TARGET) == 2 + 4 + 3
    assert not re.search(r' dot\(|custom_call_target="__cublas|ragged-dot\(', text)
    spread = [np.asarray(x) for x in step(*given)]
    here = [np.asarray(x) for x in jax.jit(SPREAD.step)(*arguments)]
    exact = SPREAD.exact(arguments)
    for what, mine, one, value in zip(NAMES, spread, here, exact, strict=True):
        assert np.any(mine)
        # Sums over devices are rounded once more: tokens' with "gather", the router's always.
        if exchange == "gather" or what == "of the router":
            got, alone = (float(np.max(np.abs(np.float64(x) - value))) for x in (mine, one))
            unit = float(np.max(np.abs(value))) * 2.0**-8  # half a unit of bfloat16's last place
            assert got <= 1.5 * max(alone, unit), f"{what}: error {got}, on one GPU {alone}"
        else:
            assert np.array_equal(mine.view("u2"), one.view("u2")), what
    for spec in SPREAD.spread_specs(mesh.size, exchange):
        checked(spec)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_results_have_the_same_bits_in_20_repeats(exchange, mesh):
    given = placed(mesh, SPREAD.arguments())
    step = jax.jit(lambda *args: SPREAD.spread(mesh, exchange, *args))
    first = [np.asarray(x).view("u2") for x in step(*given)]
    for _ in range(20):
        for one, other in zip(first, step(*given), strict=True):
            assert np.array_equal(one, np.asarray(other).view("u2"))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_all_tokens_of_all_gpus_fit_one_gpu(exchange, mesh):
    """Every token's experts are the first k, which the first device has."""
    x, router, *weights, cotangent = SPREAD.arguments()
    bias = np.zeros(SPREAD.experts, np.float32)
    bias[: SPREAD.k] = 2.0  # more than any score of softmax
    given = placed(mesh, [x, router, *weights, cotangent])
    step = jax.jit(lambda *args: SPREAD.spread(mesh, exchange, *args, selection_bias=bias))
    here = jax.jit(lambda *args: SPREAD.step(*args, selection_bias=bias))
    for what, one, other in zip(NAMES, step(*given), here(x, router, *weights, cotangent),
                                strict=True):  # fmt: skip
        one, other = (np.float64(np.asarray(a)) for a in (one, other))
        assert np.abs(one - other).max() <= 2.0**-6 * np.abs(other).max(), what
        if what in ("of gate and up", "of down"):
            assert one[: SPREAD.k].any() and not one[SPREAD.k :].any()


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_layer_of_flax_is_the_layer_of_one_gpu(exchange, mesh):
    nnx: Any = pytest.importorskip("flax.nnx", reason="needs the extra `flax`")
    from jax_hopper_gemm import nn

    x, router, gate_up, down, _ = SPREAD.arguments()
    sizes = {"num_experts": SPREAD.experts, "experts_per_token": SPREAD.k}

    def gradient_of(**options: Any) -> tuple[Any, jax.Array]:
        layer = nn.MoE(
            SPREAD.features, SPREAD.hidden, **sizes, param_dtype=jnp.bfloat16, **options,
            rngs=nnx.Rngs(0),
        )  # fmt: skip
        layer.router[...], layer.gate_up[...], layer.down[...] = map(
            jnp.asarray, (router, gate_up, down)
        )

        def loss(layer: Any) -> tuple[jax.Array, jax.Array]:
            y, statistics = layer(jnp.asarray(x), return_statistics=True)
            y = y.astype(jnp.float32)
            return (y**2).mean() + 0.01 * moe.load_balancing_loss(statistics), y

        return nnx.jit(nnx.grad(loss, has_aux=True))(layer)

    spread = gradient_of(mesh=mesh, expert_axis=AXIS, exchange=exchange)
    here = gradient_of()
    for one, other in zip(jax.tree.leaves(spread), jax.tree.leaves(here), strict=True):
        one, other = (np.float64(np.asarray(a)) for a in (one, other))
        assert other.any()
        assert np.abs(one - other).max() <= 2.0**-6 * np.abs(other).max()


def test_a_ragged_product_adds_up_over_gpus_that_have_its_groups(mesh, checked):
    rng = np.random.default_rng(0)
    lhs, rhs, cotangent = (
        rng.standard_normal(shape, np.float32).astype(jnp.bfloat16) for shape in RAGGED_DOT.values()
    )
    sizes = group_sizes.under(lhs.shape[0], rhs.shape[0], 0)
    given = [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in ((lhs, P()), (rhs, P(AXIS)), (sizes, P()), (cotangent, P()))
    ]
    step = jax.jit(lambda *args: ragged_dot_step(mesh, *args)).lower(*given).compile()
    assert (step.as_text() or "").count(TARGET) == 3
    exact = (
        rows_product(lhs, rhs, sizes),
        rows_product(cotangent, rhs.swapaxes(1, 2), sizes),
        contraction(lhs, cotangent, sizes),
    )
    # A row is of one device's groups, and the others add zeros.
    for found, wanted in zip(step(*given), exact, strict=True):
        assert_within_bound(np.asarray(found), wanted.value, wanted.magnitude, wanted.terms)
    for spec in ragged_dot_specs(mesh.size):
        checked(spec)
