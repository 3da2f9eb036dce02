"""A limit of SMs: every launch keeps to it, those of derivatives as well."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from math import prod
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from support.lowered import grids_of
from support.program_inspection import integers, lowered

import jax_hopper_gemm as jhg
from jax_hopper_gemm.dispatch import H200, choose
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.launch.plan import make_plan

pytestmark = pytest.mark.usefixtures("launcher", "no_tables")


def grids(function: Callable[..., Any], *args: Any) -> list[int]:
    """Returns how many thread blocks each launch in a program for CUDA has."""
    return [prod(grid) for grid in grids_of(function, *args)]


def half(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


SIZES = jnp.array([100, 200, 300], jnp.int32)
PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "matmul": (
        partial(jhg.matmul, implementation="hopper"), (half(1024, 512), half(512, 2048)),
    ),
    "epilogue": (
        lambda a, b, bias: jhg.matmul(a, b, bias=bias, activation="gelu"),
        (half(1024, 512), half(512, 2048), half(2048)),
    ),
    "activation of a product": (
        lambda a, b: jhg.matmul(jax.nn.gelu(jhg.matmul(a, b)), b.T),
        (half(1024, 512), half(512, 2048)),
    ),
    "recomputed": (
        lambda a, b: jhg.matmul(a, b, activation="gelu", save_preactivation=False),
        (half(1024, 512), half(512, 2048)),
    ),
    "dot_general": (
        lambda a, b: jhg.dot_general(a, b, (((2,), (2,)), ((0,), (0,)))),
        (half(4, 512, 256), half(4, 1024, 256)),
    ),
    "einsum": (partial(jhg.einsum, "mk,kn->nm"), (half(1024, 512), half(512, 2048))),
    "gated_linear_unit": (
        jhg.gated_linear_unit,
        (half(1024, 512), half(512, 2, 1024)),
    ),
    "gate and up apart": (
        lambda x, gate, up: jhg.gated_linear_unit(x, (gate, up)),
        (half(1024, 512), half(512, 1024), half(512, 1024)),
    ),
    "ragged_dot": (
        lambda a, b: jhg.ragged_dot(a, b, SIZES, activation="gelu"),
        (half(1024, 512), half(3, 512, 1024)),
    ),
    "bare ragged_dot": (
        lambda a, b: jhg.ragged_dot(a, b, SIZES),
        (half(1024, 512), half(3, 512, 1024)),
    ),
    "accelerate": (jhg.accelerate(jnp.matmul), (half(1024, 512), half(512, 2048))),
}  # fmt: skip


def gradients(function: Callable[..., Any], *args: Any) -> Any:
    y, pull = jax.vjp(function, *args)
    return y, pull(jnp.ones_like(y))


@pytest.mark.usefixtures("kernels_by_default")
@pytest.mark.parametrize("name", PRODUCTS)
def test_launches_of_products_and_gradients_keep_to_the_limit(name):
    function, args = PRODUCTS[name]

    def limited(*args: Any) -> Any:
        with jhg.max_sms(24):
            return function(*args)

    free, kept = (grids(partial(gradients, f), *args) for f in (function, limited))
    assert kept and max(kept) <= 24 < max(free)


def test_the_limit_is_that_of_the_product_not_of_its_derivative():
    function, args = PRODUCTS["matmul"]

    def outside(*args: Any) -> Any:
        y, pull = jax.vjp(function, *args)
        with jhg.max_sms(24):
            return pull(jnp.ones_like(y))

    assert min(grids(outside, *args)) > 24


def test_limits_nest_and_can_be_lifted():
    function, args = PRODUCTS["matmul"]
    with jhg.max_sms(64):
        assert 24 < grids(function, *args)[0] <= 64
        with jhg.max_sms(24):
            assert grids(function, *args)[0] <= 24
        with jhg.max_sms(None):
            assert grids(function, *args)[0] > 64
        assert grids(function, *args)[0] <= 64
    assert grids(function, *args)[0] > 64


def test_a_function_that_was_traced_is_traced_again_under_a_limit():
    function, args = PRODUCTS["accelerate"]
    jitted = jax.jit(function)

    def limit_of() -> Any:
        (found,) = re.findall(r"max_sms=(\w+)", str(jitted.trace(*args).jaxpr))
        return found

    assert limit_of() == "None"
    with jhg.max_sms(24):
        assert limit_of() == "24"
    assert limit_of() == "None"


def test_collective_products_keep_to_the_limit():
    mesh = AbstractMesh((2,), ("tp",), axis_types=(AxisType.Auto,))

    def layer(x: Any, up: Any, down: Any) -> Any:
        with jhg.max_sms(24):
            hidden = jhg.all_gather_matmul(x, up, "tp")
            return jhg.matmul_reduce_scatter(hidden, down, "tp")

    mapped = jax.shard_map(
        layer, mesh=mesh, in_specs=(P("tp"), P(None, "tp"), P("tp")), out_specs=P("tp")
    )
    found = grids(partial(gradients, mapped), half(1024, 512), half(512, 2048), half(2048, 512))
    assert len(found) == (2 + 4 + 1) + (4 + 2 + 1) and max(found) <= 24


def test_partitioned_products_take_the_limit_along():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    on = jax.sharding.NamedSharding(mesh, P("x"))
    a, b = (jax.device_put(integers((1024, 1024), "bfloat16"), on) for _ in "ab")
    with jhg.max_sms(24):
        assert "\\22max_sms\\22: 24" in lowered(jhg.matmul, a, b)


@pytest.mark.parametrize("limit", [1, 2, 7, 50, 112])
def test_whatever_is_chosen_keeps_to_the_limit(limit):
    device, random = H200.limited_to(limit), Random(limit)
    for _ in range(40):
        m, n, k = (8 * random.randint(1, 1100) for _ in "mnk")
        batches = random.choice([1, 1, 3])
        problem = GemmProblem.dense(
            m, n, k, batches, d_dtype=random.choice(["bfloat16", "float32"])
        )
        decision = choose(problem, device, kernel_only=True)
        assert decision.spec and decision.raster_order
        plan = make_plan(problem, decision.spec, decision.raster_order, device.num_sms)
        assert prod(plan.grid) <= limit


def test_explain_says_what_the_limit_is():
    with jhg.max_sms(24):
        found = jhg.explain(jhg.matmul, half(1024, 512), half(512, 2048))
    assert "a limit of 24 SMs" in str(found) and found.grid and prod(found.grid) <= 24
    with jhg.max_sms(500):
        assert "9.0, 132 SMs" in str(jhg.explain(jhg.matmul, half(1024, 512), half(512, 2048)))


@pytest.mark.parametrize(
    ("limit", "error", "message"),
    [
        (0, ValueError, "limit is 0, expected at least 1"),
        (-4, ValueError, "limit is -4"),
        (112.0, TypeError, "limit is a float, expected an integer"),
        (True, TypeError, "limit is a bool"),
    ],
)
def test_limits_that_are_none_are_refused(limit, error, message):
    with pytest.raises(error, match=message), jhg.max_sms(limit):
        pass


def test_a_limit_is_known_while_tracing():
    def limited(limit):
        with jhg.max_sms(limit):
            return limit

    with pytest.raises(TypeError, match="limit is a .*Tracer, expected an integer"):
        jax.jit(limited)(112)
