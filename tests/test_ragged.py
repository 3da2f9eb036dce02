"""`hopper_ragged_dot` on the CPU: numbers and derivatives of the three forms.

Small integers make every sum exact, so that comparisons are of equality.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.program_inspection import integers

from jax_hopper_gemm.gemm.groups import FORMS, VARLEN_K, VARLEN_M_KN, VARLEN_M_NK, Groups
from jax_hopper_gemm.gemm.product import Options, Product
from jax_hopper_gemm.gemm.subscripts import Subscripts
from jax_hopper_gemm.primitives.group_sizes import group_of_rows, run_ends
from jax_hopper_gemm.primitives.ragged_dot import hopper_ragged_dot
from jax_hopper_gemm.primitives.ragged_reference import reference_ragged_dot

T, K, N, G = 12, 3, 4, 3

# Groups, and sizes for them: one size each, with an offset, of several periods that share their
# matrices or have their own.
CASES = {
    "plain": (Groups.plain(G), [3, 0, 5]),
    "all rows": (Groups.plain(G), [4, 4, 4]),
    "one group": (Groups.plain(1), [7]),
    "too long": (Groups.plain(G), [5, 9, 4]),
    "far too long": (Groups.plain(G), [5, 2**31 - 1, 2**31 - 1]),
    "negative": (Groups.plain(G), [5, -3, 4]),
    "all empty": (Groups.plain(G), [0, 0, 0]),
    "no group": (Groups.plain(0), []),
    "offset": (Groups(G + 2, G, first=1), [2, 3, 0, 4]),
    "offset behind the rows": (Groups(G + 2, G, first=1), [20, 3, 0, 4]),
    "shared by periods": (Groups(4, 3, step=0), [1, 2, 1, 2, 0, 4, 1]),
    "own of periods": (Groups(4, 3, step=3), [1, 2, 1, 2, 0, 4, 1]),
    "own of periods, offset": (Groups(3, 1, first=1, step=1), [1, 2, 1, 4, 3]),
}


def product(subscripts: Subscripts, groups: Groups, **options: Any):
    multiplied = Product(subscripts, Options(**options), groups=groups)
    return partial(hopper_ragged_dot, product=multiplied)


@cache
def compiled(subscripts: Subscripts, groups: Groups):
    """Returns the product, compiled once for all sizes."""
    return jax.jit(product(subscripts, groups))


@cache
def compiled_gradients(subscripts: Subscripts, groups: Groups):
    return jax.jit(jax.grad(partial(squared, product(subscripts, groups)), (0, 1)))


def operands(
    subscripts: Subscripts, groups: Groups, sizes: Any, length: int = T
) -> list[jax.Array]:
    extents = {"m": length, "k": K, "n": N, "g": groups.matrices(len(sizes))}
    labels = subscripts.lhs, subscripts.rhs
    return [integers(tuple(extents[x] for x in o), seed=i) for i, o in enumerate(labels)]


def matrix_of_rows(sizes: Any, groups: Groups, length: int) -> list[int]:
    """The matrix of each row, -1 for none, by a loop."""
    found: list[int] = []
    for index, size in enumerate([*map(int, sizes), length]):
        period, place = divmod(index, groups.period)
        own = groups.first <= place < groups.first + groups.count
        matrix = period * groups.step + place - groups.first if own else -1
        found += [matrix] * min(max(size, 0), length - len(found))
    return found


def by_loop(subscripts: Subscripts, groups: Groups, lhs: Any, rhs: Any, sizes: Any) -> np.ndarray:
    """The product in float64, row by row."""
    lhs, rhs = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64)
    owners = matrix_of_rows(np.asarray(sizes), groups, len(lhs))
    matrices = groups.matrices(len(sizes))
    if subscripts == VARLEN_K:
        out = np.zeros((matrices, lhs.shape[1], rhs.shape[1]))
        for row, matrix in enumerate(owners):
            if matrix >= 0:
                out[matrix] += np.outer(lhs[row], rhs[row])
        return out
    weights = rhs if subscripts == VARLEN_M_KN else rhs.swapaxes(1, 2)
    out = np.zeros((len(lhs), weights.shape[2]))
    for row, matrix in enumerate(owners):
        if matrix >= 0:
            out[row] = lhs[row] @ weights[matrix]
    return out


FORM_CASES = [
    (subscripts, name)
    for subscripts, name in itertools.product(FORMS, CASES)
    if not (subscripts == VARLEN_K and name == "shared by periods")
]


@pytest.mark.parametrize("subscripts, name", FORM_CASES)
def test_numbers_are_those_of_a_loop_over_rows(subscripts, name):
    groups, sizes = CASES[name]
    lhs, rhs = operands(subscripts, groups, sizes)
    out = compiled(subscripts, groups)(lhs, rhs, np.array(sizes, np.int32))
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out, by_loop(subscripts, groups, lhs, rhs, sizes))


@pytest.mark.parametrize("subscripts", FORMS)
@pytest.mark.parametrize("name", ["plain", "offset"])
def test_no_rows_give_zeros(subscripts, name):
    groups, sizes = CASES[name]
    lhs, rhs = operands(subscripts, groups, sizes, length=0)
    out = compiled(subscripts, groups)(lhs, rhs, np.array(sizes, np.int32))
    np.testing.assert_array_equal(out, by_loop(subscripts, groups, lhs, rhs, sizes))


# `jax.lax.ragged_dot` multiplies zeros by all matrices.
NOT_LAX = [name for name, (groups, sizes) in CASES.items() if not groups.is_plain(len(sizes))]


@pytest.mark.parametrize("name", NOT_LAX)
def test_what_no_row_belongs_to_is_not_touched(name):
    groups, sizes = CASES[name]
    lhs, rhs = map(np.array, operands(VARLEN_M_KN, groups, sizes))
    owners = np.array(matrix_of_rows(sizes, groups, T))
    lhs[owners < 0] = np.inf
    rhs[np.setdiff1d(np.arange(rhs.shape[0]), owners)] = np.nan
    out = compiled(VARLEN_M_KN, groups)(lhs, rhs, np.array(sizes, np.int32))
    np.testing.assert_array_equal(out, by_loop(VARLEN_M_KN, groups, lhs, rhs, sizes))


@pytest.mark.parametrize("name", CASES)
def test_group_of_rows_follows_a_loop(name):
    groups, sizes = CASES[name]
    run = jax.jit(group_of_rows, static_argnums=(1, 2))
    found = run(np.array(sizes, np.int32), groups, T)
    assert found.dtype == np.int32 and found.tolist() == matrix_of_rows(sizes, groups, T)


@pytest.mark.parametrize("length", [10, 2**30 - 1])
def test_ends_of_hostile_sizes_stay_on_the_axis(length):
    largest, smallest = 2**31 - 1, -(2**31)
    sizes = np.array([3, smallest, 4, largest, largest, smallest, largest], np.int32)
    found = jax.jit(run_ends, static_argnums=1)(sizes, length)
    assert found.tolist() == [3, 3, 7, length, length, length, length]


@pytest.mark.parametrize("subscripts", FORMS)
@pytest.mark.parametrize("dtype, preferred, expected", [
    ("bfloat16", None, "bfloat16"), ("bfloat16", np.dtype("float32"), "float32"),
    ("float16", None, "float16"), ("int32", None, "int32"), ("complex64", None, "complex64"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["plain", "offset"])
def test_dtypes_follow_dot_general(subscripts, dtype, preferred, expected, name):
    groups, sizes = CASES[name]
    lhs, rhs = map(np.asarray, operands(subscripts, groups, sizes))
    function = jax.jit(product(subscripts, groups, preferred_element_type=preferred))
    out = function(*(x.astype(jnp.dtype(dtype)) for x in (lhs, rhs)), np.array(sizes, np.int32))
    assert out.dtype == expected
    exact = by_loop(subscripts, groups, lhs, rhs, sizes)
    np.testing.assert_array_equal(np.asarray(out).astype(np.complex64).real, exact)


# Derivatives.


def squared(function, lhs, rhs, sizes):
    return (function(lhs, rhs, sizes) ** 2).sum()


def gradients_by_loop(
    subscripts: Subscripts, groups: Groups, lhs: Any, rhs: Any, sizes: Any
) -> Any:
    """The gradients of `squared` in float64."""
    lhs, rhs = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64)
    cotangent = 2 * by_loop(subscripts, groups, lhs, rhs, sizes)
    if subscripts == VARLEN_K:
        return (
            by_loop(VARLEN_M_NK, groups, rhs, cotangent, sizes),
            by_loop(VARLEN_M_KN, groups, lhs, cotangent, sizes),
        )
    other = VARLEN_M_NK if subscripts == VARLEN_M_KN else VARLEN_M_KN
    own = groups if groups.step else replace(groups, step=groups.count)
    of_rhs = by_loop(VARLEN_K, own, lhs, cotangent, sizes)
    of_rhs = of_rhs.reshape(-1, *rhs.shape[:1], *of_rhs.shape[1:]).sum(0)
    of_rhs = of_rhs if subscripts == VARLEN_M_KN else of_rhs.swapaxes(1, 2)
    return by_loop(other, groups, cotangent, rhs, sizes), of_rhs


@pytest.mark.parametrize("subscripts, name", [c for c in FORM_CASES if c[1] != "no group"])
def test_gradients_are_those_of_a_loop_over_rows(subscripts, name):
    groups, sizes = CASES[name]
    args: Any = (*operands(subscripts, groups, sizes), jnp.array(sizes, np.int32))
    ours = compiled_gradients(subscripts, groups)(*args)
    theirs = gradients_by_loop(subscripts, groups, *args)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def dense(subscripts: Subscripts, groups: Groups, count: int):
    """The product as an einsum, which JAX differentiates and maps by itself."""
    weights, out = subscripts.rhs, subscripts.out

    def function(lhs, rhs, sizes):
        owners = group_of_rows(sizes, groups, lhs.shape[0])
        own = (owners[:, None] == jnp.arange(groups.matrices(count))).astype(lhs.dtype)
        return jnp.einsum(f"mk,{weights},mg->{out}", lhs, rhs, own, precision="highest")

    return function


TRANSFORMS = {
    "jacfwd": lambda f: jax.jacfwd(f, (0, 1)),
    "jacrev": lambda f: jax.jacrev(f, (0, 1)),
    "grad of grad": lambda f: jax.grad(
        lambda x, y, s: sum((g**2).sum() for g in jax.grad(f, (0, 1))(x, y, s)), (0, 1)
    ),
    "forward over reverse": lambda f: lambda x, y, s: jax.jvp(
        lambda x, y: jax.grad(f, (0, 1))(x, y, s), (x, y), (x + 1, y - 1)
    ),
    "jvp": lambda f: lambda x, y, s: jax.jvp(lambda x, y: f(x, y, s), (x, y), (x + 1, y - 1)),
    "linearize": lambda f: lambda x, y, s: jax.linearize(lambda x, y: f(x, y, s), x, y)[1](
        x + 1, y - 1
    ),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
}
DERIVED = [(*case, "plain") for case in itertools.product(TRANSFORMS, FORMS)]
DERIVED += [
    ("jvp", VARLEN_M_KN, "shared by periods"),
    ("grad of grad", VARLEN_M_KN, "shared by periods"),
]


@cache
def derivative_of_einsum(transform: str, subscripts: Subscripts, name: str):
    groups, sizes = CASES[name]
    args: Any = (*operands(subscripts, groups, sizes), jnp.array(sizes, np.int32))
    if transform == "checkpoint":
        return gradients_by_loop(subscripts, groups, *args)
    if transform == "linearize":
        return derivative_of_einsum("jvp", subscripts, name)[1]
    function = dense(subscripts, groups, len(sizes))
    return jax.jit(TRANSFORMS[transform](partial(squared, function)))(*args)


@pytest.mark.slow
@pytest.mark.parametrize("transform, subscripts, name", DERIVED)
def test_derivatives_follow_einsum(transform, subscripts, name):
    groups, sizes = CASES[name]
    args = (*operands(subscripts, groups, sizes), jnp.array(sizes, np.int32))
    ours = jax.jit(TRANSFORMS[transform](partial(squared, product(subscripts, groups))))(*args)
    theirs = derivative_of_einsum(transform, subscripts, name)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("subscripts", FORMS)
def test_gradients_are_ragged_products_with_nothing_transposed(subscripts):
    groups, sizes = CASES["plain"]
    args = (*operands(subscripts, groups, sizes), jnp.array(sizes, np.int32))
    function = product(subscripts, groups)
    program = str(jax.make_jaxpr(jax.grad(partial(squared, function), (0, 1)))(*args))
    assert program.count("hopper_ragged_dot[") == 3 and "transpose" not in program


def test_weights_that_periods_share_get_one_gradient_summed_in_float32():
    groups, sizes = Groups(2, 1), [1] * 7
    lhs = jnp.array([[256.0], [1.0], [1.0], [1.0]], jnp.bfloat16).repeat(2, 0)
    rhs, ones = jnp.zeros((1, 1, 1), jnp.bfloat16), jnp.ones((8, 1), jnp.bfloat16)
    _, back = jax.vjp(
        lambda w: product(VARLEN_M_KN, groups)(lhs, w, jnp.array(sizes, np.int32)), rhs
    )
    (gradient,) = back(ones)
    assert gradient.dtype == jnp.bfloat16 and gradient.item() == 260  # 256 + 1 is 256 in bfloat16


@pytest.mark.parametrize("wrt", [0, 1])
def test_one_gradient_alone(wrt):
    groups, sizes = CASES["plain"]
    args = (*operands(VARLEN_M_KN, groups, sizes), jnp.array(sizes, np.int32))
    ours, theirs = (
        jax.grad(partial(squared, function), wrt)(*args)
        for function in (product(VARLEN_M_KN, groups), dense(VARLEN_M_KN, groups, len(sizes)))
    )
    np.testing.assert_array_equal(ours, theirs)


def test_it_runs_op_by_op():
    groups, sizes = CASES["offset"]
    lhs, rhs = operands(VARLEN_M_NK, groups, sizes)
    with jax.disable_jit():
        out = product(VARLEN_M_NK, groups)(lhs, rhs, jnp.array(sizes, np.int32))
    np.testing.assert_array_equal(out, by_loop(VARLEN_M_NK, groups, lhs, rhs, sizes))


def test_the_reference_is_lax_where_lax_has_the_form():
    groups, sizes = CASES["plain"]
    lhs, rhs = operands(VARLEN_M_KN, groups, sizes)
    reference = partial(reference_ragged_dot, product=Product(VARLEN_M_KN, groups=groups))
    assert "ragged_dot_general" in str(jax.make_jaxpr(reference)(lhs, rhs, jnp.array(sizes)))
