"""Updates and sums that `accelerate` computes in kernels, in the memory of what they replace."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support.accelerated import accelerated, equations, products

import jax_hopper_gemm as jhg

M, K, N = 4096, 4096, 4096
S = jax.ShapeDtypeStruct
BF16, F32 = jnp.bfloat16, jnp.float32
X, W, V = S((M, K), BF16), S((K, N), BF16), S((K, N), BF16)
MATRIX = S((M, N), BF16)


def test_an_update_rides_on_its_weight_gradient() -> None:
    def step(w: Any, x: Any) -> Any:
        return w - 0.5 * jax.grad(lambda w: (x @ w).astype(F32).sum())(w)

    ((_, dtypes, names),) = products(step, W, X)
    assert dtypes == ("bfloat16",) and names == ["mul", "sub"]


@pytest.mark.usefixtures("launcher")
def test_an_update_takes_the_memory_of_donated_weights() -> None:
    def step(w: Any, x: Any) -> Any:
        return w - 0.5 * jax.grad(lambda w: jnp.tanh(x @ w).astype(F32).sum())(w)

    for donated in (0, ()):
        program = jax.jit(jhg.accelerate(step), donate_argnums=donated).trace(W, X)
        text = program.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("output_operand_aliases = [#stablehlo") == (donated == 0)


def test_each_moment_of_an_optimizer_is_updated_where_it_lies() -> None:
    def step(w: Any, mean: Any, square: Any, x: Any) -> Any:
        g = jax.grad(lambda w: jnp.tanh(x @ w.astype(BF16)).astype(F32).sum())(w)
        mean, square = 0.9 * mean + 0.1 * g, 0.9 * square + 0.1 * g**2
        return mean, w - mean / (jnp.sqrt(square) + 1e-8), square

    w = S((K, N), F32)
    program = accelerated(step, w, w, w, X)
    (update,) = (e for e in program.eqns if e.params.get("in_place"))
    taken = [update.invars[2 + x] for x in update.params["in_place"]]
    pairs = dict(zip(update.outvars, taken, strict=True))
    weights, mean, square, _ = program.invars
    assert [pairs[x] for x in program.outvars] == [mean, weights, square]


def test_an_update_waits_for_the_products_that_read_the_weights() -> None:
    def step(w: Any, x: Any) -> Any:
        y, pull = jax.vjp(lambda w, x: jnp.tanh(x @ w), w, x)
        dw, dx = pull(y)
        return w - 0.5 * dw, dx

    program = accelerated(step, W, X)
    (barrier,) = (e for e in program.eqns if e.primitive.name == "optimization_barrier")
    (update,) = (e for e in program.eqns if e.params.get("in_place"))
    assert barrier.invars == [program.invars[0], program.outvars[1]]
    assert barrier.outvars[0] in update.invars and program.invars[0] not in update.invars


def test_a_sum_of_products_takes_the_memory_of_the_first() -> None:
    first, second = equations(lambda x, w, y, v: x @ w + y @ v, X, W, MATRIX, V)
    assert (first.primitive.name, second.params["in_place"]) == ("hopper_dot", (0,))


def test_what_is_multiplied_is_not_overwritten() -> None:
    for function in (lambda x, w: x @ w + x, lambda x, w: x + jnp.tanh(w @ x)):
        (product,) = equations(function, X, W)
        assert product.primitive.name == "hopper_fused" and product.params["in_place"] == ()


def test_the_gradient_of_a_transposed_weight_is_not_transposed() -> None:
    gradient = jax.grad(lambda w, x: (x @ w.T).astype(F32).sum())
    w = S((N, K), BF16)
    names = [e.primitive.name for e in jax.make_jaxpr(gradient)(w, X).jaxpr.eqns]
    assert names.count("transpose") == 3
    assert "transpose" not in [e.primitive.name for e in equations(gradient, w, X)]


def test_a_weight_gradient_is_cast_without_a_rounding() -> None:
    gradient = jax.grad(lambda w, x: (x @ w.astype(BF16)).astype(F32).sum())
    assert products(gradient, S((K, N), F32), X)[-1] == (1, ("float32",), [])
