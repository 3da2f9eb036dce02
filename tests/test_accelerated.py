"""An accelerated program is one equation of a trace that writes down, and its own of all others."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify
from jax.extend.core import jaxpr_as_fun
from support.program_inspection import normal

import jax_hopper_gemm as jhg
from jax_hopper_gemm.interop import rewrite_jaxpr
from jax_hopper_gemm.primitives import accelerated

X, W = normal((32, 64), "bfloat16"), normal((64, 64), "bfloat16", seed=1) / 8
LARGE = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)


def layer(x: Any, w: Any) -> Any:
    with jax.named_scope("layer"):
        return jnp.tanh(x @ w) + x


def names(function: Any, *args: Any) -> list[str]:
    return [e.primitive.name for e in jax.make_jaxpr(function)(*args).eqns]


def text(function: Any, *args: Any, **options: Any) -> str:
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text(**options)


def by_equations(closed: Any, arrays: Any) -> list[Any]:
    """Stands in for `run_accelerated`."""
    return list(jaxpr_as_fun(closed)(*arrays))


@pytest.mark.parametrize("derivative", [False, True])
def test_it_is_lowered_as_its_equations_are(monkeypatch: Any, derivative: bool) -> None:
    def function(x: Any, w: Any) -> Any:
        return jnp.sum(layer(layer(x, w), w).astype(jnp.float32))

    ours = jhg.accelerate(jax.grad(function, (0, 1)) if derivative else function)
    assert names(ours, LARGE, LARGE) == ["accelerated"]
    whole = text(ours, LARGE, LARGE)
    located = text(ours, LARGE, LARGE, debug_info=True)
    assert '/test_accelerated.py":' in located and "layer" in located
    monkeypatch.setattr(rewrite_jaxpr, "run_accelerated", by_equations)
    ours = jhg.accelerate(jax.grad(function, (0, 1)) if derivative else function)
    assert "accelerated" not in names(ours, LARGE, LARGE)
    assert text(ours, LARGE, LARGE) == whole


def test_what_a_program_only_returns_is_no_result_of_it() -> None:
    ours = jhg.accelerate(lambda x, w: (x, x @ w, 3, w, x))
    (equation,) = jax.make_jaxpr(ours)(X, W).eqns
    assert len(equation.outvars) == 1
    x, y, three, w, again = jax.jit(ours)(X, W)
    assert three == 3
    for found, expected in ((x, X), (y, X @ W), (w, W), (again, X)):
        np.testing.assert_array_equal(found, expected)
    assert names(jhg.accelerate(lambda x: (x, x)), X) == []


def test_what_nothing_reads_is_left_out() -> None:
    ours = jhg.accelerate(lambda x, w: (x @ w, jnp.sin(x) @ w))
    lowered = text(lambda x, w: ours(x, w)[0], X, W)
    assert "sine" not in lowered and lowered.count("dot_general") == 1


def test_a_program_within_a_program_is_rewritten_with_it() -> None:
    inner = jhg.accelerate(lambda x, w: x @ w)
    outer = jhg.accelerate(lambda x, w: jnp.tanh(inner(x, w)))
    (equation,) = jax.make_jaxpr(outer)(LARGE, LARGE).eqns
    steps = equation.params["call_jaxpr"].jaxpr.eqns
    assert [e.primitive.name for e in steps] == ["hopper_fused"]
    plain = jhg.accelerate(lambda x, w: jnp.tanh(x @ w))
    assert text(outer, LARGE, LARGE) == text(plain, LARGE, LARGE)
    reports = (str(jhg.explain(x, LARGE, LARGE)) for x in (outer, plain))
    nested, alone = (re.sub(r"py:[0-9:]+", "", report) for report in reports)
    assert nested == alone


def transformed(name: str, call: Any) -> Any:
    """Returns a function of `X` and `W` that finds `call(layer)` in a jaxpr that it transforms."""
    ours = jax.jit(call(layer))

    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(ours(x, w).astype(jnp.float32) ** 2)

    linear = jax.jit(call(lambda x: x @ W))
    zeros = jax.ShapeDtypeStruct(X.shape, X.dtype)
    return {
        "grad": jax.grad(loss, (0, 1)),
        "hessian": lambda x, w: jax.hessian(lambda s: loss(s * x, w))(jnp.float32(0.5)),
        "vmap": lambda x, w: jax.vmap(ours, (0, None))(x[None] * jnp.ones((3, 1, 1), x.dtype), w),
        "linear_transpose": lambda x, w: jax.linear_transpose(linear, zeros)(x),
        "scan": lambda x, w: lax.scan(lambda x, _: (ours(x, w), None), x, length=2)[0],
        "grad of scan": jax.grad(
            lambda x, w: loss(lax.scan(lambda x, _: (ours(x, w), None), x, length=2)[0], w)
        ),
        "checkpoint": jax.grad(jax.checkpoint(loss)),
        "closure": lambda x, w: jax.grad(
            lambda y: jnp.sum(jax.jit(call(lambda z: layer(z, w) + y))(x).astype(jnp.float32))
        )(x),
        "rule": jax.grad(jax.checkpoint(partial(loss_by_rule, call))),
    }[name]


def loss_by_rule(call: Any, x: Any, w: Any) -> Any:
    """A loss whose function has a rule that is accelerated itself."""

    @jax.custom_vjp
    def product(x: Any, w: Any) -> Any:
        return jnp.sin(x) @ w

    def forward(x: Any, w: Any) -> Any:
        return call(lambda x, w: (jnp.sin(x) @ w, jnp.cos(x)))(x, w)[0], (x, w)

    def backward(kept: Any, cotangent: Any) -> Any:
        return call(lambda x, w, dy: ((dy @ w.T) * jnp.cos(x), x.T @ dy))(*kept, cotangent)

    product.defvjp(forward, backward)
    return jnp.sum(product(jnp.tanh(x), w).astype(jnp.float32) ** 2)


@pytest.mark.parametrize(
    "name",
    [
        "grad", "hessian", "vmap", "linear_transpose", "scan", "grad of scan", "checkpoint",
        "closure", "rule",
    ],
)  # fmt: skip
def test_transformations_of_a_jaxpr_find_its_equations(monkeypatch: Any, name: str) -> None:
    def leaves(call: Any) -> list[Any]:
        results = jax.jit(transformed(name, call))(X, W)
        return [np.asarray(x, np.float64) for x in jax.tree.leaves(results)]

    found, expected = leaves(jhg.accelerate), leaves(lambda function: function)
    monkeypatch.setattr(rewrite_jaxpr, "run_accelerated", by_equations)
    for x, y, z in zip(found, leaves(jhg.accelerate), expected, strict=True):
        np.testing.assert_array_equal(x, y)
        assert np.any(z)
        np.testing.assert_allclose(x, z, rtol=0, atol=0.02 * np.max(np.abs(z)))


def test_what_changes_a_reference_is_no_equation_of_its_own() -> None:
    def add(x: Any, reference: Any) -> Any:
        reference[...] += 1.0
        return x @ W

    def function(x: Any) -> Any:
        reference = jax.new_ref(jnp.zeros(()))
        y = jhg.accelerate(partial(add, reference=reference))(x)
        return y, reference[...]

    y, count = jax.jit(function)(X)
    assert count == 1
    np.testing.assert_array_equal(y, X @ W)


def test_checkify_sees_the_equations() -> None:
    ours = jhg.accelerate(lambda x, w: jnp.log(x @ w))
    error, _ = checkify.checkify(jax.jit(ours), errors=checkify.float_checks)(X, W)
    assert "nan generated by primitive: hopper_fused" in (error.get() or "")


def test_the_equation_holds_no_arrays() -> None:
    ours = jhg.accelerate(lambda x: x @ W + np.ones((32, 64), jnp.bfloat16))
    (equation,) = jax.make_jaxpr(ours)(X).eqns
    assert equation.primitive is accelerated.accelerated_p
    assert not equation.params["call_jaxpr"].consts


def constants(x: Any) -> list[Any]:
    flag, number = jnp.asarray(True), jnp.asarray(0)
    return [x @ x, flag, number, jnp.zeros(()), jnp.array([1, 2]), jnp.asarray(1.5), np.ones(2)]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_constants_are_arrays(wrap: Any) -> None:
    """JAX holds some as numbers of its own, of which `~True` is -2."""
    x = normal((16, 16), "bfloat16")
    ours, theirs = (wrap(f)(x) for f in (jhg.accelerate(constants), constants))
    assert [type(y) for y in ours] == [type(y) for y in theirs]
    assert [jax.typeof(y) for y in ours] == [jax.typeof(y) for y in theirs]

    def read(function: Any, x: Any) -> Any:
        _, flag, number, *_ = function(x)
        return jnp.where(~flag, 1.0, 2.0) + number.astype(jnp.float32)

    assert wrap(partial(read, jhg.accelerate(constants)))(x) == 2.0
