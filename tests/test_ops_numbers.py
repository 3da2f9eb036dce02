"""Values and dtypes are those of jnp and lax; small integers make every comparison exact."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.program_inspection import integers

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.dtypes import OPERANDS, RESULTS


def assert_same(ours: jax.Array, theirs: jax.Array) -> None:
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert jax.typeof(ours).weak_type == jax.typeof(theirs).weak_type
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


SHAPES = [
    ((3, 4), (4, 5)), ((4,), (4,)), ((4,), (4, 5)), ((3, 4), (4,)), ((2, 3, 4), (4, 5)),
    ((2, 3, 4), (2, 4, 5)), ((7, 2, 3, 4), (2, 4, 5)), ((3, 4), (2, 4, 5)), ((4,), (2, 4, 5)),
    ((2, 3, 4), (4,)), ((1, 3, 4), (2, 4, 5)), ((2, 3, 4), (1, 4, 5)), ((2, 1, 3, 4), (6, 4, 5)),
    ((1, 3, 4), (1, 4, 5)), ((2, 1, 3, 4), (1, 6, 4, 5)), ((3, 0), (0, 5)), ((0, 4), (4, 5)),
    ((0, 3, 4), (0, 4, 5)), ((1, 1), (1, 1)),
]  # fmt: skip


@pytest.mark.parametrize("a_shape, b_shape", SHAPES)
@pytest.mark.parametrize("jit", [False, True])
def test_matmul_follows_jnp(a_shape, b_shape, jit):
    a, b = integers(a_shape), integers(b_shape, seed=1)
    ours = jax.jit(jhg.matmul) if jit else jhg.matmul
    assert_same(ours(a, b), jnp.matmul(a, b))


DTYPES = ["bfloat16", "float16", "float32", "int8", "int32", "uint8", "bool", "complex64"]


@pytest.mark.parametrize("a_dtype", DTYPES)
@pytest.mark.parametrize("b_dtype", DTYPES)
def test_matmul_promotes_like_jnp(a_dtype, b_dtype):
    a, b = integers((3, 8), a_dtype), integers((8, 5), b_dtype, seed=1)
    assert_same(jhg.matmul(a, b), jnp.matmul(a, b))


@pytest.mark.parametrize("preferred", RESULTS)
@pytest.mark.parametrize("dtype", OPERANDS)
def test_preferred_element_type_is_the_result_dtype(dtype, preferred):
    a, b = integers((3, 8), dtype), integers((8, 5), dtype, seed=1)
    theirs = jnp.matmul(a, b, preferred_element_type=preferred)
    assert_same(jhg.matmul(a, b, preferred_element_type=preferred), theirs)


def test_preferred_element_type_widens_integers():
    a, b = integers((3, 8), "int8"), integers((8, 5), "int8", seed=1)
    theirs = jnp.matmul(a, b, preferred_element_type=jnp.int32)
    assert_same(jhg.matmul(a, b, preferred_element_type=jnp.int32), theirs)


@pytest.mark.parametrize(
    "precision",
    [
        "highest", lax.Precision.HIGH, (lax.Precision.DEFAULT, lax.Precision.HIGHEST),
        ["default", "highest"], lax.DotAlgorithmPreset.DEFAULT,
    ],
)  # fmt: skip
def test_every_form_of_precision_is_taken(precision):
    a, b = integers((3, 8)), integers((8, 5), seed=1)
    dimension_numbers = (((1,), (0,)), ((), ()))
    ours, theirs = (
        f(a, b, dimension_numbers, precision) for f in (jhg.dot_general, lax.dot_general)
    )
    assert_same(ours, theirs)


def test_the_default_precision_of_the_context_is_part_of_the_product():
    a, b = integers((3, 8)), integers((8, 5), seed=1)
    with jax.default_matmul_precision("highest"):
        jaxpr = jax.make_jaxpr(jhg.matmul)(a, b)
    assert jaxpr.eqns[0].params["product"].options.precision == (lax.Precision.HIGHEST,) * 2


def test_numpy_arrays_and_wrapped_arrays_are_taken():
    class Wrapped:
        def __init__(self, value):
            self.value = value

        def __jax_array__(self):
            return self.value

    a, b = integers((3, 8)), integers((8, 5), seed=1)
    wrapped: Any = Wrapped(b)
    assert_same(jhg.matmul(np.asarray(a), wrapped), jnp.matmul(a, b))


DOTS = [
    ((3, 4), (4, 5), (((1,), (0,)), ((), ()))),
    ((3, 4), (4, 5), ((1, 0), ((), ()))),
    ((4, 3), (5, 4), (((0,), (1,)), ((), ()))),
    ((2, 3, 4), (2, 4, 5), (((2,), (1,)), ((0,), (0,)))),
    ((3, 2, 4), (4, 5, 2), (((2,), (0,)), ((1,), (2,)))),
    ((2, 3, 4, 5), (5, 2, 6, 4), (((2, 3), (3, 0)), ((0,), (1,)))),
    ((3,), (4,), (((), ()), ((), ()))),
    ((2, 3), (2, 3), (((0, 1), (0, 1)), ((), ()))),
    ((2, 3), (2, 3), (((), ()), ((0, 1), (0, 1)))),
    ((), (3,), (((), ()), ((), ()))),
]


@pytest.mark.parametrize("lhs_shape, rhs_shape, dimension_numbers", DOTS)
def test_dot_general_follows_lax(lhs_shape, rhs_shape, dimension_numbers):
    lhs, rhs = integers(lhs_shape), integers(rhs_shape, seed=1)
    assert_same(
        jhg.dot_general(lhs, rhs, dimension_numbers), lax.dot_general(lhs, rhs, dimension_numbers)
    )


def test_dot_general_takes_lists_and_positional_options():
    lhs, rhs = integers((3, 4), "bfloat16"), integers((5, 4), "bfloat16")
    ours = jhg.dot_general(lhs, rhs, [[[1], [1]], [[], []]], None, jnp.float32)
    assert_same(ours, lax.dot_general(lhs, rhs, (((1,), (1,)), ((), ())), None, jnp.float32))


EINSUMS = [
    ("mk,kn->mn", (3, 4), (4, 5)),
    ("mk,kn->nm", (3, 4), (4, 5)),
    ("mk,nk", (3, 4), (5, 4)),
    ("bthd,hde->bthe", (2, 3, 4, 5), (4, 5, 6)),
    ("bthd,bshd->bhts", (2, 3, 4, 5), (2, 6, 4, 5)),
    ("...mk,...kn->...mn", (2, 1, 3, 4), (7, 4, 5)),
    ("...mk,kn", (2, 3, 4), (4, 5)),
    ("ij,jk->i", (3, 4), (4, 5)),
    ("ii,ij->j", (3, 3), (3, 4)),
    ("ij,ij->", (3, 4), (3, 4)),
    ("i,j->ji", (3,), (4,)),
    ("ij,jk->ik", (3, 1), (4, 5)),
    (" ij , jk -> ki ", (3, 4), (4, 5)),
]


@pytest.mark.parametrize("subscripts, lhs_shape, rhs_shape", EINSUMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_einsum_follows_jnp(subscripts, lhs_shape, rhs_shape, dtype):
    lhs, rhs = integers(lhs_shape, dtype), integers(rhs_shape, dtype, seed=1)
    assert_same(jhg.einsum(subscripts, lhs, rhs), jnp.einsum(subscripts, lhs, rhs))


@pytest.mark.parametrize(
    "subscripts, lhs_shape, rhs_shape",
    [("ka,kbc->abc", (8, 4), (8, 6, 5)), ("eka,keb->eab", (3, 8, 4), (8, 3, 6))],
)
def test_bfloat16_with_an_epilogue_runs_where_xla_cpu_cannot_sum_in_float32(
    subscripts, lhs_shape, rhs_shape
):
    lhs, rhs = integers(lhs_shape, "bfloat16"), integers(rhs_shape, "bfloat16", seed=1)

    def run(einsum, lhs, rhs):
        result, pull = jax.vjp(partial(einsum, subscripts), lhs, rhs)
        return result, pull(result)

    ours = partial(run, partial(jhg.einsum, epilogue=jnp.abs))
    theirs = partial(run, lambda *args: jnp.abs(jnp.einsum(*args)))
    jax.tree.map(assert_same, jax.jit(ours)(lhs, rhs), jax.jit(theirs)(lhs, rhs))
    mapped, both = partial(jax.vmap, in_axes=(None, 0)), np.stack([rhs, -np.asarray(rhs)])
    ours, theirs = (jax.jit(mapped(f))(lhs, both) for f in (ours, theirs))
    jax.tree.map(assert_same, ours, theirs)


@pytest.mark.parametrize("read", [
    lambda y: y.T, lambda y: jnp.cumsum(y, 0), lambda y: jnp.sum(y.T, 0),
])  # fmt: skip
def test_bfloat16_into_float32_runs_on_xla_cpu_whatever_transposes_the_product(read):
    lhs, rhs = integers((8, 6), "bfloat16"), integers((6, 5), "bfloat16", seed=1)
    weights, sizes = jnp.stack([rhs, -rhs]), jnp.array([3, 5])
    expected = read(jnp.matmul(lhs, rhs, preferred_element_type=jnp.float32))
    followed = jhg.matmul(lhs, rhs, epilogue=read)
    assert_same(followed, expected.astype(followed.dtype))
    wide = partial(jhg.matmul, preferred_element_type=jnp.float32)
    assert_same(jax.jit(lambda *args: read(wide(*args)))(lhs, rhs), expected)
    ragged = partial(jhg.ragged_dot, preferred_element_type=jnp.float32)
    sums = jax.jit(lambda *args: read(ragged(*args)))(lhs, weights, sizes)
    assert_same(sums, read(ragged(lhs, weights, sizes)))
    pull = jax.grad(lambda lhs: jnp.sum(read(wide(lhs, rhs)) ** 2))
    assert_same(jax.jit(pull)(lhs), pull(lhs))


MANY = [
    ("ij->ji", 1, "auto", 0),
    ("ii", 1, True, 0),
    ("ij,jk", 2, "optimal", 1),
    ("ij,jk", 2, False, 1),
    ("ij,jk", 2, [(0, 1)], 1),
    ("ij,jk,kl->li", 3, "auto", 2),
    ("ij,jk,kl->li", 3, False, 2),
    ("...j,jk,...k->...", 3, "greedy", 2),
    ("ij,jk,kl,lm", 4, [(2, 3), (1, 2), (0, 1)], 3),
]


@pytest.mark.parametrize("subscripts, number, optimize, products", MANY)
def test_einsum_of_any_number_of_operands_follows_jnp(subscripts, number, optimize, products):
    arrays = [integers((4, 4), "bfloat16", seed=i) for i in range(number)]

    def run(einsum, *arrays):
        result, pull = jax.vjp(partial(einsum, subscripts, optimize=optimize), *arrays)
        return result, pull(result)

    ours, theirs = (jax.jit(partial(run, x))(*arrays) for x in (jhg.einsum, jnp.einsum))
    jax.tree.map(assert_same, ours, theirs)
    jaxpr = jax.make_jaxpr(partial(jhg.einsum, subscripts, optimize=optimize))(*arrays)
    names = [equation.primitive.name for equation in jaxpr.eqns]
    assert (names.count("hopper_dot"), names.count("dot_general")) == (products, 0)


def test_the_xla_implementation_is_jax_itself():
    a, b = integers((3, 4)), integers((4, 5))
    text = str(jax.make_jaxpr(lambda a, b: jhg.matmul(a, b, implementation="xla"))(a, b))
    assert "dot_general" in text and "hopper_dot" not in text


def test_a_transposed_result_is_one_product():
    jaxpr = jax.make_jaxpr(lambda x, y: jhg.einsum("bthd,hde->bthe", x, y))(
        integers((2, 3, 4, 5)), integers((4, 5, 6))
    )
    assert [equation.primitive.name for equation in jaxpr.eqns] == ["hopper_dot"]


@pytest.mark.slow
def test_flax_linear_takes_our_dot_general():
    nnx = pytest.importorskip("flax.nnx")
    layers = [
        nnx.Linear(8, 5, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, **options)
        for options in ({}, {"dot_general": jhg.dot_general})
    ]
    x = integers((2, 3, 8), "bfloat16")

    def loss(layer, x):
        return (layer(x).astype(jnp.float32) ** 2).sum()

    assert_same(layers[1](x), layers[0](x))
    theirs, ours = (nnx.grad(loss)(layer, x) for layer in layers)
    np.testing.assert_array_equal(ours.kernel[...], theirs.kernel[...])
    assert "hopper_dot" in str(jax.make_jaxpr(lambda x: layers[1](x))(x))
