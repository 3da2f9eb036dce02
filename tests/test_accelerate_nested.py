"""`accelerate` reaches products inside of other programs: loops, branches, rules of derivatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.program_inspection import equations, integers, operations, products, same

import jax_hopper_gemm as jhg

REPLACED = {"hopper_dot": "dot_general", "hopper_ragged_dot": "ragged_dot_general"}

X, W = integers((16, 16), "bfloat16"), integers((16, 16), "bfloat16", seed=1)


@jax.custom_jvp
def with_jvp(x: Any, w: Any) -> Any:
    return x @ w


# Not its derivative: what is found must come from here.
with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), 2 * tangents[0] @ primals[1]))


@jax.custom_vjp
def with_vjp(x: Any, w: Any) -> Any:
    return x @ w


with_vjp.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, ct: (3 * ct @ saved[1].T, None))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_symbolic_zeros(scale: int, x: Any, w: Any) -> Any:
    return x @ w, scale * w


def _forward(scale: int, x: Any, w: Any) -> Any:
    return (x.value @ w.value, scale * w.value), (x.value, w.value, x.perturbed)


def _backward(scale: int, saved: Any, cts: Any) -> Any:
    x, w, _ = saved
    zero = jax.custom_derivatives.SymbolicZero
    assert any(isinstance(ct, zero) for ct in cts)
    return 5 * cts[0] @ w.T, scale * x.T @ cts[0]


with_symbolic_zeros.defvjp(_forward, _backward, symbolic_zeros=True)


@jax.custom_vjp
def with_optimized_remat(x: Any, w: Any) -> Any:
    return jnp.sign(x @ w)


with_optimized_remat.defvjp(
    lambda x, w: (jnp.sign(x @ w), (x @ w, w)),
    lambda saved, ct: ((ct * saved[0]) @ saved[1].T, None),
    optimize_remat=True,
)


@jax.custom_batching.custom_vmap
def with_vmap(x: Any, w: Any) -> Any:
    return x @ w


@with_vmap.def_vmap
def _mapped(axis_size: int, in_batched: Any, x: Any, w: Any) -> Any:
    return jnp.zeros((axis_size, *x.shape[-2:]), x.dtype), True


@partial(jax.jit, donate_argnums=0, keep_unused=True)
def jitted(x: Any, w: Any) -> Any:
    return x @ w


def scanned(x: Any, w: Any) -> Any:
    def body(carry: Any, row: Any) -> Any:
        return jnp.sign(carry @ w) + row, carry @ row

    return lax.scan(body, x, x, reverse=True, unroll=2)


def looped(x: Any, w: Any) -> Any:
    return lax.while_loop(
        lambda state: jnp.sum(state[1] @ w) * 0 + state[0] < 3,
        lambda state: (state[0] + 1, jnp.sign(state[1] @ w)),
        (0, x),
    )[1]


def branched(x: Any, w: Any) -> Any:
    return lax.switch(x[0, 0].astype(int) % 3, [jnp.matmul, lambda x, w: w @ x, jnp.add], x, w)


def mapped_over_devices(x: Any, w: Any) -> Any:
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
    spec = P("i", None)
    return jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(spec, P()), out_specs=spec)(x, w)


SAVING = jax.checkpoint_policies.dots_saveable

symbolic: Any = with_symbolic_zeros  # JAX's types lose that it gives a tuple

# Each with the number of products that it traces to.
NESTED: dict[str, tuple[Callable[..., Any], int]] = {
    "jit": (jitted, 1),
    "checkpoint": (jax.checkpoint(lambda x, w: jnp.sin(x @ w)), 1),
    "checkpoint with a policy": (jax.checkpoint(lambda x, w: jnp.sin(x @ w), policy=SAVING), 1),
    "scan": (scanned, 2),
    "map": (lambda x, w: lax.map(lambda row: row @ w, x), 1),
    "while": (looped, 2),
    "cond": (branched, 2),
    "custom_jvp": (with_jvp, 1),
    "custom_vjp": (with_vjp, 1),
    "custom_vmap": (with_vmap, 1),
    "symbolic zeros": (lambda x, w: symbolic(7, x, w)[0], 1),
    "optimized remat": (with_optimized_remat, 1),
    "optimized remat in checkpoint": (jax.checkpoint(with_optimized_remat), 1),
    "shard_map": (mapped_over_devices, 1),
    "deep": (lambda x, w: jax.jit(jax.checkpoint(scanned))(x, with_jvp(x, w)), 3),
}


@pytest.mark.parametrize("name", NESTED)
def test_products_inside_of_other_programs_become_ours(name: str):
    function, number = NESTED[name]
    ours = jhg.accelerate(function)
    assert products(function, X, W) == (0, number)
    assert products(ours, X, W) == (number, 0)
    same(jax.jit(ours)(X, W), jax.jit(function)(X, W))
    same(ours(jnp.copy(X), W), function(jnp.copy(X), W))


@pytest.mark.parametrize("name", NESTED)
def test_nothing_but_the_products_changes(name: str):
    function, _ = NESTED[name]
    theirs = list(equations(function, X, W))
    ours = list(equations(jhg.accelerate(function, fuse=False), X, W))
    assert len(ours) == len(theirs)
    for old, new in zip(theirs, ours, strict=True):
        assert REPLACED.get(new.primitive.name, new.primitive.name) == old.primitive.name
        assert [x.aval for x in old.outvars] == [x.aval for x in new.outvars]
        assert str(old.source_info.name_stack) == str(new.source_info.name_stack)
        if new.primitive.name in REPLACED:
            continue
        for key, value in old.params.items():
            if isinstance(value, str | int | bool | tuple) and not list(
                jaxprs_in_params({key: value})
            ):
                assert str(new.params[key]) == str(value), (old.primitive, key)


@pytest.mark.parametrize("name", [x for x in NESTED if x not in ("while", "custom_vmap")])
def test_gradients_inside_and_outside_are_those_of_jax(name: str):
    function, _ = NESTED[name]

    def loss(function: Callable[..., Any], x: Any, w: Any) -> Any:
        return sum(jnp.sum(y.astype("float32")) for y in jax.tree.leaves(function(x, w)))

    theirs = jax.grad(partial(loss, function))
    outside = jax.grad(partial(loss, jhg.accelerate(function)))
    inside = jhg.accelerate(theirs)
    number = sum(products(theirs, X, W))
    plain = jhg.accelerate(theirs, fuse=False)
    unfused = jax.grad(partial(loss, jhg.accelerate(function, fuse=False)))
    assert products(unfused, X, W) == products(plain, X, W)
    assert sum(products(plain, X, W)) == number
    assert "0 not replaced" in str(jhg.explain(theirs, X, W))
    # Without those that nothing reads; dispatch leaves some small ones to XLA.
    assert products(inside, X, W)[1] <= products(plain, X, W)[1] <= 1
    expected = jax.jit(theirs)(X, W)
    assert np.any(expected)
    same(jax.jit(outside)(X, W), expected)
    same(jax.jit(inside)(X, W), expected)


@pytest.mark.parametrize("name", [x for x in NESTED if x != "shard_map"])
def test_vmap_of_nested_programs_is_that_of_jax(name: str):
    function, _ = NESTED[name]
    xs = jnp.stack([X, -X])
    theirs = jax.vmap(function, (0, None))
    ours = jax.vmap(jhg.accelerate(function), (0, None))
    same(jax.jit(ours)(xs, W), jax.jit(theirs)(xs, W))
    left = products(ours, xs, W)[1]
    assert left == 0


@jax.custom_vjp
def quantized(x: Any, w: Any) -> Any:
    return jnp.matmul(x.astype("int16"), w.astype("int16"), preferred_element_type=x.dtype)


quantized.defvjp(
    lambda x, w: (quantized(x, w), (x, w)), lambda saved, ct: (ct @ saved[1].T, saved[0].T @ ct)
)


def test_derivatives_are_taken_of_products_that_stay():
    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(quantized(x, w) ** 2)

    gradients = jax.grad(loss, (0, 1))
    for ours in (jax.grad(jhg.accelerate(loss), (0, 1)), jhg.accelerate(gradients)):
        assert products(ours, X, W) == (2, 1)
        same(jax.jit(ours)(X, W), jax.jit(gradients)(X, W))


def test_second_derivatives_follow():
    def function(x: Any) -> Any:
        return jnp.sum(jnp.square(lax.scan(lambda c, _: (c @ W, None), x, None, 2)[0]))

    x = X[0]
    ours = jhg.accelerate(function)
    expected = jax.jit(jax.hessian(function))(x)
    same(jax.jit(jax.hessian(ours))(x), expected)
    same(jax.jit(jhg.accelerate(jax.hessian(function)))(x), expected)


@pytest.mark.parametrize("policy", [None, SAVING, jax.checkpoint_policies.nothing_saveable])
def test_policies_of_checkpoint_judge_our_products_as_dots(policy: Any):
    def function(x: Any, w: Any) -> Any:
        return jnp.sum(jax.checkpoint(lambda x, w: jnp.sin(x @ w), policy=policy)(x, w))

    number = operations(jax.grad(function, (0, 1)), X, W)["dot_general"]
    assert number == (3 if policy is SAVING else 4)
    assert products(jax.grad(jhg.accelerate(function), (0, 1)), X, W) == (number, 0)


def test_programs_are_exported_with_our_products():
    exported = jax.export.export(jax.jit(jhg.accelerate(scanned)))(X, W)
    copy = jax.export.deserialize(exported.serialize())
    same(copy.call(X, W), jax.jit(scanned)(X, W))


@pytest.mark.parametrize(
    ("name", "within"),
    [("jit", "jit(jitted)"), ("checkpoint", "checkpoint"), ("while", "while cond"),
     ("cond", "cond branch 0"), ("custom_vjp", "custom_vjp_call"), ("shard_map", "shard_map")],
)  # fmt: skip
def test_the_report_names_what_is_around_a_product(name: str, within: str):
    function, number = NESTED[name]
    report = jhg.explain(function, X, W)
    assert len(report.products) == number
    first = report.products[0]
    assert first.within[0] == within
    assert first.place.split(" > ") == [*first.within, first.line][: None if first.line else -1]
    assert f"at {first.place}" in str(report)
