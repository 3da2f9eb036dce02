"""Derivatives, vmap and checkpoints of products with what follows them are those of jnp."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.epilogue_reference import (
    BIAS,
    RESIDUAL,
    A,
    B,
    C,
    K,
    M,
    N,
    assert_close,
    assert_same,
    reference,
)
from support.program_inspection import integers

import jax_hopper_gemm as jhg
from jax_hopper_gemm.fusion.jaxprs import as_differentiated, traced
from jax_hopper_gemm.ops.activations import ACTIVATIONS
from jax_hopper_gemm.primitives.dots import hopper_dots_p
from jax_hopper_gemm.testing.lowered import specs_of


def differentiable() -> tuple[dict[str, Any], Any]:
    """Returns the arrays of a call, and its options, with a result of every kind."""
    arrays = dict(
        a=A * 0.25, b=B, bias=BIAS, residual=RESIDUAL, alpha=jnp.float32(0.5),
        beta=jnp.float32(2), c=C, epilogue_operands=(integers((N,), seed=7), integers((M, 1))),
    )  # fmt: skip
    return arrays, lambda y, s, t: (jnp.sin(y) * s + t, jnp.sum(y * t, 0), jnp.max(jnp.abs(y)))


def loss_of(matmul: Any, arrays: dict[str, Any], **options: Any) -> Any:
    results = matmul(arrays["a"], arrays["b"], **{k: v for k, v in arrays.items() if k not in "ab"},
                     **options)  # fmt: skip
    leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(results)]
    return sum((x * integers(x.shape, seed=8)).sum() + (x**2).sum() for x in leaves)


DERIVATIVES = {
    "grad": jax.grad,
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jax.tree.map(jnp.sin, x),)),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](jax.tree.map(jnp.sin, x)),
    "jvp of grad": lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (jax.tree.map(jnp.sin, x),))[1],
}


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("save_preactivation", [True, False])
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_derivatives_by_every_argument_follow_jnp(derivative, save_preactivation, implementation):
    matmul = partial(
        jhg.matmul, save_preactivation=save_preactivation, implementation=implementation
    )
    assert_close(derivative_of(matmul, derivative), reference_derivative(derivative))


def derivative_of(matmul: Any, derivative: str) -> Any:
    arrays, epilogue = differentiable()
    loss = partial(loss_of, matmul, activation="gelu", epilogue=epilogue)
    return jax.jit(DERIVATIVES[derivative](loss))(arrays)


@cache
def reference_derivative(derivative: str) -> Any:
    return derivative_of(reference, derivative)


@pytest.mark.parametrize("save_preactivation", [True, False])
@pytest.mark.parametrize("name", sorted(set(ACTIVATIONS) - {"identity"}))
def test_the_gradient_of_every_activation_follows_jnp(name, save_preactivation):
    ours = gradient_of_activation(partial(jhg.matmul, save_preactivation=save_preactivation), name)
    assert_close(ours, reference_gradient_of_activation(name))


def gradient_of_activation(matmul: Any, name: str) -> Any:
    arrays = dict(a=A * 0.25 + 0.01, b=B, bias=BIAS)
    return jax.jit(jax.grad(partial(loss_of, matmul, activation=name)))(arrays)


@cache
def reference_gradient_of_activation(name: str) -> Any:
    return gradient_of_activation(reference, name)


@pytest.mark.parametrize("save_preactivation", [True, False])
@pytest.mark.parametrize("a_shape, b_shape", [((6, 4), (4, 5)), ((2, 6, 4), (2, 4, 5)),
                                              ((4,), (4, 5)), ((1, 6, 4), (1, 4, 5))])  # fmt: skip
def test_gradients_of_16_bit_operands_come_in_16_bits(a_shape, b_shape, save_preactivation):
    # Integers throughout: no rounding anywhere, whatever is kept in 16 bits.
    a, b = integers(a_shape, "bfloat16"), integers(b_shape, "bfloat16", seed=1)
    arrays = dict(a=a, b=b, bias=integers((5,), "bfloat16", seed=2), c=jnp.bfloat16(1))

    def loss(matmul, arrays):
        arrays = dict(arrays)
        y = matmul(arrays.pop("a"), arrays.pop("b"), **arrays, activation="relu", alpha=2.0,
                   save_preactivation=save_preactivation)  # fmt: skip
        return (y.astype(jnp.float32) * integers(y.shape, seed=3)).sum()

    ours, theirs = (
        jax.jit(jax.grad(partial(loss, f), allow_int=True))(arrays) for f in (jhg.matmul, reference)
    )
    assert_same(ours, theirs)


def test_hessians_follow_jnp():
    def loss(matmul, x):
        return (matmul(x["a"], x["b"], bias=x["bias"], activation="tanh") ** 2).sum()

    arrays = dict(a=A * 0.25, b=B, bias=BIAS)
    assert_close(
        jax.jit(jax.hessian(partial(loss, jhg.matmul)))(arrays),
        jax.jit(jax.hessian(partial(loss, reference)))(arrays),
    )


@jax.custom_jvp
def straight_through(y: Any) -> Any:
    return jnp.round(y)


@jax.custom_vjp
def straight_back(y: Any) -> Any:
    return jnp.round(y)


straight_through.defjvp(lambda primals, tangents: (jnp.round(*primals), *tangents))
straight_back.defvjp(lambda y: (jnp.round(y), ()), lambda _, ct: (ct,))


@pytest.mark.parametrize("save_preactivation", [True, False])
@pytest.mark.parametrize("function", [straight_through, straight_back])
def test_derivatives_go_on_with_what_a_rule_computes(function, save_preactivation):
    def loss(product: Any, a: Any, **options: Any) -> Any:
        return jnp.sum(product(a, B, activation=function, **options) ** 2)

    def slope(product: Any, a: Any, **options: Any) -> Any:
        return jnp.sum(jnp.sin(jax.grad(partial(loss, product))(a, **options)))

    options: Any = {"save_preactivation": save_preactivation}
    for of in (loss, slope):
        ours = jax.grad(partial(of, jhg.matmul))(A / 4, **options)
        assert_close(ours, jax.grad(partial(of, reference))(A / 4))


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_an_activation_is_what_its_rule_computes(name):
    closed = traced(ACTIVATIONS[name], jax.ShapeDtypeStruct((M, N), "float32"))
    assert as_differentiated(closed, (0,)) is closed


def printed(y: Any) -> Any:
    jax.debug.callback(lambda x: None, y[0, 0])
    return jnp.sin(y)


def dropped(y: Any, key: Any) -> Any:
    return jnp.sin(y) * jax.random.bernoulli(key, 0.5, y.shape)


@pytest.mark.parametrize("epilogue, operands", [
    (lambda y: jnp.tanh(y) * jnp.arange(float(N)), ()),  # an operation without inputs
    (printed, ()),  # one without results
    (dropped, (jax.random.key(0),)),
])  # fmt: skip
def test_gradients_of_functions_of_other_things_than_arrays(epilogue, operands):
    def loss(product: Any, *arrays: Any) -> Any:
        return jnp.sum(product(*arrays, epilogue=epilogue, epilogue_operands=operands) ** 2)

    a = A / 4
    ours, theirs = (jax.grad(partial(loss, f), (0, 1))(a, B) for f in (jhg.matmul, reference))
    assert_close(ours, theirs)


@pytest.mark.parametrize("save_preactivation", [True, False])
@pytest.mark.parametrize("function", [
    lambda y: jnp.real(jnp.exp(0.5j * y)),
    lambda y: jnp.abs(y * (1 + 1j)),
    lambda y: jnp.angle(y + 1j),
    lambda y: jnp.where(y == jnp.inf * 1j, 0, jnp.sin(y)),
])  # fmt: skip
def test_a_real_product_may_become_complex(function, save_preactivation):
    def loss(product: Any, a: Any, **options: Any) -> Any:
        return jnp.sum(product(a, B, epilogue=function, **options))

    options = {"save_preactivation": save_preactivation}
    gradient = partial(jax.grad(partial(loss, jhg.matmul)), **options)
    assert_close(gradient(A / 4), jax.jit(jax.grad(partial(loss, reference)))(A / 4))


def interpolated(y: Any) -> Any:
    """A function of which JAX 0.12 replaces `searchsorted` before it lowers a program."""
    return jnp.interp(y, jnp.arange(-8.0, 8.0), jnp.sin(jnp.arange(16.0))) * y


@pytest.mark.parametrize("transform", [
    jax.jit, jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f)),
    lambda f: lambda a: jax.jvp(f, (a,), (a,)),
    lambda f: lambda a: jax.vmap(f)(jnp.stack([a, 2 * a])),
    lambda f: jax.grad(lambda a: jax.grad(f)(a).sum()),
])  # fmt: skip
@pytest.mark.parametrize("product", ["matmul", "gated_linear_unit", "ragged_dot"])
def test_functions_that_jax_replaces_parts_of_are_transformed(product, transform):
    def layer(implementation: Any, a: Any) -> Any:
        options: Any = dict(activation=interpolated, implementation=implementation)
        if product == "gated_linear_unit":
            return jnp.sum(jhg.gated_linear_unit(a, (B, B), **options))
        if product == "ragged_dot":
            return jnp.sum(jhg.ragged_dot(a, B[None], jnp.array([M]), **options))
        return jnp.sum(jhg.matmul(a, B, **options))

    ours, theirs = (transform(partial(layer, x)) for x in (None, "xla"))
    assert_close(ours(A / 4), jax.jit(theirs)(A / 4))


def test_epilogues_that_jax_replaces_parts_of_are_lowered_for_cuda():
    def two(a: Any, b: Any) -> Any:
        (function,) = (e.params for e in jax.make_jaxpr(product)(a, b).eqns if "jaxpr" in e.params)
        several = dict(product=function["product"], functions=(function["jaxpr"],) * 2)
        return hopper_dots_p.bind(a, b, b, in_place=(), **several)

    def product(a: Any, b: Any) -> Any:
        return jhg.matmul(a, b, epilogue=interpolated, implementation="hopper")

    a = jax.ShapeDtypeStruct((256, 256), "bfloat16")
    assert len(specs_of(product, a, a)) == 1 and len(specs_of(two, a, a)) == 2
    assert len(specs_of(jax.grad(lambda *x: product(*x).sum().astype("float32")), a, a)) == 2


def test_an_epilogue_may_reduce_over_a_mapped_axis():
    stack = np.stack([A, A]) / np.array([[[4]], [[8]]], np.float32)

    def loss(product: Any, stack: Any) -> Any:
        centred = partial(product, epilogue=lambda y: jnp.sin(y - jax.lax.pmean(y, "rows")))
        return jnp.sum(jax.vmap(lambda a: centred(a, B), axis_name="rows")(stack) ** 2)

    both = (jax.value_and_grad(partial(loss, f)) for f in (jhg.matmul, reference))
    ours, theirs = (jax.jit(f)(stack) for f in both)
    assert_close(ours, theirs)


def test_products_rounded_to_integers_have_no_gradient():
    def loss(a: Any, bias: Any) -> Any:
        options: Any = {"preferred_element_type": "int32", "epilogue": lambda y: jnp.sin(1.0 * y)}
        return jnp.sum(jhg.matmul(a, B, bias=bias, **options))

    of_a, of_bias = jax.grad(loss, (0, 1))(A, BIAS)
    assert_same(of_a, jnp.zeros_like(A))
    whole = jnp.matmul(A, B, preferred_element_type="int32")
    assert_close(of_bias, jnp.cos(whole + BIAS).sum(0))


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [
    ("a",), ("b",), ("bias",), ("a", "b"), ("c", "alpha"), ("epilogue_operands",), ("residual",),
    ("a", "b", "bias", "residual", "alpha", "beta", "c", "epilogue_operands"),
])  # fmt: skip
# jnp's gradient of a maximum is inf where that is not its element.
@pytest.mark.usefixtures("optimised")
def test_vmap_over_any_argument_follows_jnp(mapped):
    arrays, epilogue = differentiable()
    batched = {
        k: jax.tree.map(lambda x: np.stack([x, x + 1, 2 * x], -1), v) if k in mapped else v
        for k, v in jax.tree.map(np.asarray, arrays).items()
    }
    axes = ({k: -1 if k in mapped else None for k in arrays},)

    def both(matmul, x):
        """Returns the results and their derivatives."""
        named = {"activation": "gelu", "epilogue": epilogue}
        others = {k: v for k, v in x.items() if k not in "ab"}
        results = matmul(x["a"], x["b"], **others, **named)
        return results, jax.grad(partial(loss_of, matmul, **named))(x)

    ours, theirs = (
        jax.jit(jax.vmap(partial(both, f), axes))(batched) for f in (jhg.matmul, reference)
    )
    assert_close(ours, theirs)


@pytest.mark.parametrize("policy, batch, products", [
    # Forward, and once more unless what the kernel writes was saved.
    (jax.checkpoint_policies.dots_saveable, (2,), 1),
    (jax.checkpoint_policies.dots_with_no_batch_dims_saveable, (), 1),
    (jax.checkpoint_policies.dots_with_no_batch_dims_saveable, (2,), 2),
    (jax.checkpoint_policies.nothing_saveable, (), 2),
])  # fmt: skip
@pytest.mark.parametrize("product", ["matmul", "gated_linear_unit"])
def test_checkpoint_policies_see_products_with_epilogues(product, policy, batch, products):
    a, b = integers((*batch, M, K)), integers((*batch, K, N), seed=1)

    def block(a, b):
        if product == "matmul":
            return jnp.sin(jhg.matmul(a, b, activation="gelu")).sum()
        unit = jax.vmap(jhg.gated_linear_unit) if batch else jhg.gated_linear_unit
        return jnp.sin(unit(a, jnp.stack((b, b), -2))).sum()

    block = jax.checkpoint(block, policy=policy)
    program = str(jax.make_jaxpr(jax.value_and_grad(block, (0, 1)))(a, b))
    assert program.count("hopper_fused[") == products
