"""vmap of `hopper_ragged_dot` on the CPU: each call that it stands for, by a loop."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.program_inspection import integers
from test_ragged import (
    CASES,
    FORM_CASES,
    G,
    K,
    N,
    T,
    by_loop,
    gradients_by_loop,
    operands,
    product,
    squared,
)

from jax_hopper_gemm.gemm.groups import FORMS, VARLEN_M_KN, Groups
from jax_hopper_gemm.gemm.subscripts import Subscripts

MAPPED = [mapped for mapped in itertools.product((False, True), repeat=3) if any(mapped)]
FIRST_AXES = [tuple(0 if own else None for own in mapped) for mapped in MAPPED]
# Neighbours are mapped along different axes, each operand along either.
AXES = [
    tuple((start + sum(mapped[:i])) % 2 if own else None for i, own in enumerate(mapped))
    for mapped in MAPPED
    for start in (0, 1)
]


def with_axes(
    subscripts: Subscripts, axes: Any, name: str, extent: int
) -> tuple[Groups, list[Any]]:
    """Returns operands with mapped axes, all of different numbers."""
    groups, sizes = CASES[name]
    args: list[Any] = [*operands(subscripts, groups, sizes), jnp.array(sizes, np.int32)]
    for i, axis in enumerate(axes):
        if axis is not None:
            shape = tuple(np.insert(args[i].shape, axis, extent))
            args[i] = integers(shape, args[i].dtype, seed=7 + i) + (3 if i == 2 else 0)
    return groups, args


def apart(axes: Any, args: Any) -> list[list[np.ndarray]]:
    """Returns the arguments of each call that `vmap` stands for."""
    arrays = list(map(np.asarray, args))
    (extent,) = {x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None}
    pairs = list(zip(arrays, axes, strict=True))
    return [[x if a is None else np.take(x, i, a) for x, a in pairs] for i in range(extent)]


def together(gradients: Any, axis: int | None) -> np.ndarray:
    """Returns the gradient of one argument from those of each call."""
    return np.sum(gradients, 0) if axis is None else np.stack(gradients, axis)


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("subscripts", FORMS)
def test_vmap_follows_a_loop(subscripts, axes):
    groups, args = with_axes(subscripts, axes, "plain", 2)
    function = product(subscripts, groups)
    expected = np.stack([by_loop(subscripts, groups, *each) for each in apart(axes, args)])
    out_axis = AXES.index(axes) % expected.ndim
    out = jax.jit(jax.vmap(function, axes, out_axis))(*args)
    np.testing.assert_array_equal(out, np.moveaxis(expected, 0, out_axis))


@pytest.mark.parametrize("axes", FIRST_AXES)
@pytest.mark.parametrize("subscripts", FORMS)
def test_vmap_of_grad_and_grad_of_vmap_follow_a_loop(subscripts, axes):
    groups, args = with_axes(subscripts, axes, "plain", 2)
    loss = partial(squared, product(subscripts, groups))
    each = [gradients_by_loop(subscripts, groups, *own) for own in apart(axes, args)]
    lhs, rhs = zip(*each, strict=True)

    of_sum = jax.grad(lambda *args: jax.vmap(loss, axes)(*args).sum(), (0, 1))
    ours = jax.jit(lambda *args: (jax.vmap(jax.grad(loss, (0, 1)), axes)(*args), of_sum(*args)))
    theirs = ((np.stack(lhs), np.stack(rhs)), (together(lhs, axes[0]), together(rhs, axes[1])))
    jax.tree.map(np.testing.assert_array_equal, ours(*args), theirs)


@pytest.mark.parametrize(
    "subscripts, name",
    [(s, n) for s, n in FORM_CASES if n in ("offset", "shared by periods", "own of periods")],
)
@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (0, 0, None), (0, 0, 0)])
def test_vmap_of_all_kinds_of_spans_follows_a_loop(subscripts, name, axes):
    groups, args = with_axes(subscripts, axes, name, 2)
    ours = jax.jit(jax.vmap(product(subscripts, groups), axes))(*args)
    theirs = [by_loop(subscripts, groups, *each) for each in apart(axes, args)]
    np.testing.assert_array_equal(ours, np.stack(theirs))


@pytest.mark.parametrize("index, inner", list(enumerate(FIRST_AXES)))
def test_nested_vmap_follows_a_loop(index, inner):
    one = tuple(0 if i == index % 3 else None for i in range(3))
    for outer in (one, (0, 0, 0)):
        groups, args = with_axes(VARLEN_M_KN, inner, "plain", 2)
        args = [
            x if axis is None else jnp.stack([x, x[::-1] if i < 2 else x + 1, x])
            for i, (x, axis) in enumerate(zip(args, outer, strict=True))
        ]
        ours = jax.jit(jax.vmap(jax.vmap(product(VARLEN_M_KN, groups), inner), outer))(*args)
        theirs = [
            [by_loop(VARLEN_M_KN, groups, *each) for each in apart(inner, own)]
            for own in apart(outer, args)
        ]
        np.testing.assert_array_equal(ours, np.array(theirs))


def test_vmap_that_shares_weights_copies_none():
    groups, args = with_axes(VARLEN_M_KN, (0, None, None), "plain", 5)
    program: Any = jax.make_jaxpr(jax.vmap(product(VARLEN_M_KN, groups), (0, None, None)))(*args)
    (shape,) = {
        e.invars[1].aval.shape for e in program.eqns if e.primitive.name == "hopper_ragged_dot"
    }
    assert shape == (G, K, N)


def test_an_empty_vmap_is_empty():
    groups, sizes = CASES["plain"]
    lhs, rhs = operands(VARLEN_M_KN, groups, sizes)
    args = jnp.zeros((0, *lhs.shape)), rhs, jnp.array(sizes, np.int32)
    assert jax.vmap(product(VARLEN_M_KN, groups), (0, None, None))(*args).shape == (0, T, N)
