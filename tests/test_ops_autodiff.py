"""Derivatives, vmap and checkpoint are those of jnp; small integers make comparisons exact."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from support.epilogue_reference import assert_same
from support.program_inspection import integers

import jax_hopper_gemm as jhg

PRODUCTS = [
    ("mk,kn->mn", (3, 4), (4, 5)),
    ("km,kn->mn", (4, 3), (4, 5)),
    ("mk,nk->mn", (3, 4), (5, 4)),
    ("km,nk->mn", (4, 3), (5, 4)),
    ("mk,kn->nm", (3, 4), (4, 5)),
    ("lmk,lkn->lmn", (2, 3, 4), (2, 4, 5)),
    ("mlk,kln->mln", (3, 2, 4), (4, 2, 5)),
    ("bthd,hde->bthe", (2, 3, 2, 4), (2, 4, 5)),
    ("ab,ab->", (3, 4), (3, 4)),
    ("a,b->ab", (3,), (4,)),
]


def squared(product, x, y):
    return (product(x, y) ** 2).sum()


TRANSFORMS = {
    "grad": lambda f: jax.grad(f, (0, 1)),
    "jacfwd": lambda f: jax.jacfwd(f, (0, 1)),
    "jacrev": lambda f: jax.jacrev(f, (0, 1)),
    "hessian": lambda f: jax.hessian(f, (0, 1)),
    "grad of grad": lambda f: jax.grad(
        lambda x, y: sum((g**2).sum() for g in jax.grad(f, (0, 1))(x, y)), (0, 1)
    ),
    "jvp": lambda f: lambda x, y: jax.jvp(f, (x, y), (x + 1, y - 1)),
    "linearize": lambda f: lambda x, y: jax.linearize(f, x, y)[1](x + 1, y - 1),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
}


CASES = [("grad", *product) for product in PRODUCTS]
CASES += [
    (name, *PRODUCTS[i]) for name, i in itertools.product(TRANSFORMS, (0, 6, 8)) if name != "grad"
]


@pytest.mark.parametrize("transform, subscripts, lhs_shape, rhs_shape", CASES)
def test_derivatives_follow_jnp(transform, subscripts, lhs_shape, rhs_shape):
    x, y = integers(lhs_shape), integers(rhs_shape, seed=1)
    ours, theirs = (
        jax.jit(TRANSFORMS[transform](partial(squared, partial(einsum, subscripts))))(x, y)
        for einsum in (jhg.einsum, jnp.einsum)
    )
    assert_same(ours, theirs)


@pytest.mark.parametrize("a_dtype, b_dtype, preferred", [
    ("bfloat16", "bfloat16", None), ("bfloat16", "bfloat16", "float32"),
    ("bfloat16", "float32", None), ("bfloat16", "float32", "float32"),
    ("float32", "complex64", None), ("complex64", "complex64", None),
])  # fmt: skip
def test_gradients_have_the_operands_dtypes(a_dtype, b_dtype, preferred):
    a, b = integers((3, 4), a_dtype), integers((4, 5), b_dtype, seed=1)

    def loss(matmul, a, b):
        product = matmul(a, b, preferred_element_type=preferred)
        return (product.real.astype(jnp.float32) ** 2).sum()

    ours, theirs = (jax.grad(partial(loss, f), (0, 1))(a, b) for f in (jhg.matmul, jnp.matmul))
    assert_same(ours, theirs)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("wrapped", [jhg.accelerate, jax.jit])
def test_integers_do_not_move_with_operands_of_floats(wrapped, grouped):
    """Within one program, too, where JAX converts the tangent of its product of integers."""
    x, y = integers((3, 4)), integers((4, 5), seed=1)

    def product(x, y):
        if grouped:
            return jax.lax.ragged_dot(x, y[None], jnp.array([3]), preferred_element_type=jnp.int32)
        return jnp.matmul(x, y, preferred_element_type=jnp.int32)

    moving = wrapped(lambda x, y: jhg.accelerate(product)(x, y) + 0.5)
    assert_same(jax.jvp(moving, (x, y), (x, y))[1], jnp.zeros((3, 5)))
    assert_same(jax.jacfwd(moving)(x, y), jnp.zeros((3, 5, 3, 4)))


MAPPED = [
    axes
    for axes in itertools.product((None, 0, 1, 2), repeat=2)
    if any(a is not None for a in axes)
]


@pytest.mark.parametrize("a_axis, b_axis", MAPPED)
@pytest.mark.parametrize("out_axis", [0, 2])
def test_vmap_follows_jnp(a_axis, b_axis, out_axis):
    a = integers((3, 4) if a_axis is None else (*(3, 4)[:a_axis], 2, *(3, 4)[a_axis:]))
    b = integers((4, 5) if b_axis is None else (*(4, 5)[:b_axis], 2, *(4, 5)[b_axis:]), seed=1)
    ours, theirs = (jax.vmap(f, (a_axis, b_axis), out_axis) for f in (jhg.matmul, jnp.matmul))
    assert_same(ours(a, b), theirs(a, b))


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 1), (1, 2)])
def test_vmap_and_grad_commute_with_ours(axes):
    shapes = [(3, 4), (4, 5)]
    a, b = (
        integers(s if axis is None else (*s[:axis], 2, *s[axis:]), seed=i)
        for i, (s, axis) in enumerate(zip(shapes, axes, strict=True))
    )

    def vmap_of_grad(f):
        return jax.vmap(jax.grad(partial(squared, f), (0, 1)), axes)(a, b)

    def grad_of_vmap(f):
        return jax.grad(lambda a, b: jax.vmap(partial(squared, f), axes)(a, b).sum(), (0, 1))(a, b)

    for transform in (vmap_of_grad, grad_of_vmap):
        assert_same(transform(jhg.matmul), transform(jnp.matmul))


def test_nested_vmap_follows_jnp():
    a, b = integers((2, 3, 4, 6)), integers((6, 4, 5), seed=1)
    ours, theirs = (
        jax.vmap(jax.vmap(f, (0, None)), (3, 0), 1)(a, b) for f in (jhg.matmul, jnp.matmul)
    )
    assert_same(ours, theirs)


@pytest.mark.parametrize(
    "policy, subscripts, products",
    [
        # Forward, two gradients, and one product again unless it was saved.
        (jax.checkpoint_policies.dots_saveable, "mk,kn->mn", 3),
        (jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "mk,kn->mn", 3),
        (jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "lmk,lkn->lmn", 4),
        (jax.checkpoint_policies.nothing_saveable, "mk,kn->mn", 4),
    ],
)
def test_checkpoint_policies_see_our_products(policy, subscripts, products):
    extents = {"l": 2, "m": 3, "k": 4, "n": 5}
    x, y = (integers(tuple(extents[c] for c in s)) for s in subscripts.split("->")[0].split(","))
    block = jax.checkpoint(lambda x, y: jnp.sin(jhg.einsum(subscripts, x, y)).sum(), policy=policy)
    program = str(jax.make_jaxpr(jax.value_and_grad(block, (0, 1)))(x, y))
    assert program.count("hopper_dot[") == products
