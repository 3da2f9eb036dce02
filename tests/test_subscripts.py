"""Subscripts of products, checked with `np.einsum` and `lax.dot_general`."""

from __future__ import annotations

import random

import jax
import numpy as np
import pytest
from jax import lax
from support.program_inspection import integers

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.subscripts import Subscripts

TEXTS = [
    "mk,kn->mn", "mk,kn->nm", "bmk,bkn->bmn", "bthd,hde->bthe", "bthe,hde->bthd", "mk,k->m",
    "abkm,kabn->nabm", "m,n->mn", "ab,ab->ab", ",k->k",
]  # fmt: skip
EXTENTS = dict(zip("abdehkmnt", (2, 3, 4, 5, 2, 6, 3, 5, 4), strict=True))


def arrays(text: str) -> list[np.ndarray]:
    inputs = text.split("->")[0].split(",")
    shapes = [tuple(EXTENTS[x] for x in letters) for letters in inputs]
    return [np.asarray(integers(shape, seed=i)) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_parsed_and_given_back(text):
    subscripts = Subscripts.parse(text)
    assert str(subscripts) == repr(subscripts) == text
    assert hash(subscripts) == hash(Subscripts.parse(text))


def test_a_jaxpr_prints_the_text():
    jaxpr = jax.make_jaxpr(jhg.matmul)(*arrays("mk,kn->mn"))
    assert "subscripts=ab,bc->ac," in str(jaxpr)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("may_swap", [True, False])
def test_the_dot_general_and_its_transpose_are_the_product(text, may_swap):
    lhs, rhs = arrays(text)
    dot = Subscripts.parse(text).dot_general(may_swap=may_swap)
    assert may_swap or not dot.swap_ab
    operands = (rhs, lhs) if dot.swap_ab else (lhs, rhs)
    out = lax.dot_general(*operands, dot.dimension_numbers).transpose(dot.permutation)
    np.testing.assert_array_equal(out, np.einsum(text, lhs, rhs))


def test_operands_swap_only_where_that_saves_the_transpose():
    assert Subscripts.parse("mk,kn->nm").dot_general().swap_ab
    for text in ("mk,kn->mn", "btk,kn->bnt", "mk,k->m"):
        assert not Subscripts.parse(text).dot_general().swap_ab


@pytest.mark.parametrize("text", TEXTS)
def test_a_dot_general_keeps_its_axes(text):
    dot = Subscripts.parse(text).dot_general(may_swap=False)
    lhs, rhs = arrays(text)
    subscripts = Subscripts.of_dot_general(dot.dimension_numbers, lhs.ndim, rhs.ndim)
    expected = lax.dot_general(lhs, rhs, dot.dimension_numbers)
    np.testing.assert_array_equal(np.einsum(str(subscripts), lhs, rhs), expected)
    assert subscripts.dot_general().permutation == tuple(range(expected.ndim))


@pytest.mark.parametrize("text", TEXTS[:8])
def test_gradients_are_products_by_letters(text):
    lhs, rhs = arrays(text)
    subscripts = Subscripts.parse(text)
    out, pull = jax.vjp(lambda x, y: jax.numpy.einsum(text, x, y), lhs, rhs)
    cotangent = np.asarray(integers(out.shape, seed=2))
    of_lhs, of_rhs = pull(cotangent)
    for gradient, other, expected in (
        (subscripts.transpose_lhs(), rhs, of_lhs), (subscripts.transpose_rhs(), lhs, of_rhs)
    ):  # fmt: skip
        np.testing.assert_array_equal(np.einsum(str(gradient), cotangent, other), expected)


@pytest.mark.parametrize("axes", [(0, None), (None, 1), (2, 0), (1, 1)])
def test_vmap_adds_a_letter(axes):
    text = "mk,kn->nm"
    operands = [
        x if axis is None else np.stack([x, -x, 2 * x], axis)
        for x, axis in zip(arrays(text), axes, strict=True)
    ]
    batched = Subscripts.parse(text).batched(*axes)
    expected = jax.vmap(lambda x, y: jax.numpy.einsum(text, x, y), axes)(*operands)
    np.testing.assert_array_equal(np.einsum(str(batched), *operands), expected)


def test_the_result_may_be_transposed_and_the_sides_swapped():
    rng = random.Random(0)
    lhs, rhs = arrays("bthd,hde->bthe")
    expected = np.einsum("bthd,hde->bthe", lhs, rhs)
    for _ in range(5):
        permutation = rng.sample(range(4), 4)
        permuted = Subscripts.parse("bthd,hde->bthe").permuted(permutation)
        out = np.einsum(str(permuted.swapped()), rhs, lhs)
        np.testing.assert_array_equal(out, expected.transpose(permutation))


def test_letters_by_their_part_in_the_product():
    s = Subscripts.parse("bthd,hdce->hbte")
    assert (s.batch, s.contracted, s.lhs_free, s.rhs_free, s.gate_up) == ("h", "d", "bt", "ce", "c")
    assert next(s.fresh_letters()) == "a"
    assert s.extents((2, 3, 4, 5), (4, 5, 2, 6)) == {
        "b": 2, "t": 3, "h": 4, "d": 5, "c": 2, "e": 6
    }  # fmt: skip


def test_gate_and_up_stand_in_front_of_the_columns():
    assert Subscripts.parse("bmk,kcn->bmn").with_gate_up() == (
        Subscripts.parse("bmk,kcn->bmcn"), 2
    )  # fmt: skip
    assert str(Subscripts.parse("bmk,kcn->bmn").without("c")) == "bmk,kn->bmn"
