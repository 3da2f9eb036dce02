"""Experts spread over the GPUs of this machine: the same layer, on two or more."""

from __future__ import annotations

import re
from typing import Any

import group_sizes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import OTHERS, TARGET, launched, most_gpus, names
from moe_programs import (
    AXIS,
    CROWDED,
    EXCHANGES,
    RAGGED_DOT,
    SPREAD,
    ragged_dot_specs,
    ragged_dot_step,
)
from repeats import assert_same_bits
from support.bounds import assert_within_bound
from support.grouped_programs import contraction, rows_product

from jax_hopper_gemm import moe


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(most_gpus()), (AXIS,), axis_types=(AxisType.Auto,))


def placed(mesh: Mesh, arguments: list[np.ndarray]) -> list[jax.Array]:
    """Returns x, router, gate_up, down and the cotangent where the layer wants them."""
    specs = P(AXIS), P(), P(AXIS), P(AXIS), P(AXIS)
    return [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip(arguments, specs, strict=True)
    ]


def summed(exchange: str, mesh: Mesh) -> dict[str, int]:
    """Returns which results are sums of parts of so many devices."""
    names = ("y", "of x", "of the router") if exchange == "gather" else ("of the router",)
    return dict.fromkeys(names, mesh.size)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("program", [SPREAD, CROWDED], ids=["spread", "crowded"])
def test_experts_over_gpus_are_the_layer_of_one(program, exchange, mesh, checked):
    arguments = program.arguments()
    given = placed(mesh, arguments)
    step = jax.jit(lambda *args: program.spread(mesh, exchange, *args)).lower(*given).compile()
    spread, here = step(*given), jax.jit(program.step)(*arguments)
    program.assert_as_good(spread, here, program.exact(arguments), summed(exchange, mesh))
    text, specs = step.as_text() or "", program.spread_specs(mesh.size, exchange)
    found = launched(text)
    assert found <= names(specs)  # XLA drops launches whose results nothing reads
    grouped = sum(count for name, count in found.items() if "_grouped_" in name)
    assert grouped == 2 + 4  # gate and up with down, two gradients of each
    # The router's product and its two gradients, small ones, may run on XLA.
    assert found.total() - grouped + len(re.findall(OTHERS, text)) == 3
    for spec in specs:
        if spec.name in found:
            checked(spec)


@pytest.mark.parametrize("exchange", ["all_to_all", "ragged_all_to_all"])
@pytest.mark.parametrize("program", [SPREAD, CROWDED], ids=["spread", "crowded"])
def test_exchanged_rows_have_the_bits_of_one_gpu(program, exchange, mesh):
    """The same sums in the same order. The router's weights are given: XLA rounds them as it fuses
    them, which is not the same in both programs."""
    x, router, gate_up, down, cotangent = program.arguments()
    bias = None if program.bias is None else np.array(program.bias, np.float32)
    routing = moe.route_tokens(x, router, program.k, selection_bias=bias)
    arguments = (
        np.asarray(x), *map(np.asarray, (routing.weights, routing.experts)), gate_up, down,
        cotangent,
    )  # fmt: skip
    of_devices = NamedSharding(mesh, P(AXIS))
    given = [jax.device_put(a, of_devices) for a in arguments]
    step = jax.jit(lambda *a: program.routed_step(*a, mesh=mesh, exchange=exchange))
    here = jax.jit(program.routed_step)(*arguments)
    for i, (one, other) in enumerate(zip(step(*given), here, strict=True)):
        one, other = np.asarray(one), np.asarray(other)
        assert np.array_equal(one.view("u1"), other.view("u1")), f"result {i}"
        assert np.any(one != 0)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_results_have_the_same_bits_in_20_repeats(exchange, mesh):
    given = placed(mesh, SPREAD.arguments())
    step = jax.jit(lambda *args: SPREAD.spread(mesh, exchange, *args))
    assert_same_bits(step, given)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_layer_of_flax_has_the_gradients_of_one_gpu(exchange, mesh):
    nnx: Any = pytest.importorskip("flax.nnx", reason="needs the extra `flax`")
    from jax_hopper_gemm import nn

    arguments = SPREAD.arguments()
    x, router, gate_up, down, cotangent = map(jnp.asarray, arguments)
    layer = nn.MoE(
        SPREAD.features, SPREAD.hidden, num_experts=SPREAD.experts, experts_per_token=SPREAD.k,
        param_dtype=jnp.bfloat16, mesh=mesh, expert_axis=AXIS, exchange=exchange,
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    layer.router[...], layer.gate_up[...], layer.down[...] = router, gate_up, down

    def loss(layer: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        y, statistics = layer(x, return_statistics=True)
        return (y.astype(jnp.float32) * cotangent).sum(), (y, statistics)

    gradients, (y, statistics) = nnx.jit(nnx.grad(loss, argnums=(0, 1), has_aux=True))(layer, x)
    of_layer, of_x = gradients
    found = y, of_x, *(of_layer[name][...] for name in ("router", "gate_up", "down"))
    here = jax.jit(SPREAD.step)(*arguments)
    SPREAD.assert_as_good(found, here, SPREAD.exact(arguments), summed(exchange, mesh))
    load = np.asarray(statistics.load)
    expected = moe.route_tokens(x, router, SPREAD.k).statistics.load
    np.testing.assert_array_equal(load, expected)


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
