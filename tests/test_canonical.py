"""Canonical forms, checked by computing them with NumPy strides."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jax_hopper_gemm.dispatch.canonical import Gemm, NotAGemm, Roles, ShapedProduct, as_gemm, roles
from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph, Operand, Result
from jax_hopper_gemm.gemm.problem import GemmProblem, MatrixLayout
from jax_hopper_gemm.gemm.subscripts import Subscripts

pytestmark = pytest.mark.pure


def product(subscripts: str, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> ShapedProduct:
    parsed = Subscripts.parse(subscripts)
    return ShapedProduct(parsed, lhs, "bfloat16", rhs, "bfloat16", "bfloat16")


def gemm(subscripts: str, lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...]) -> Gemm:
    return as_gemm(product(subscripts, lhs_shape, rhs_shape))


def matrices(
    memory: np.ndarray,
    layout: MatrixLayout,
    rows: tuple[str, int],
    cols: tuple[str, int],
    problem: GemmProblem,
) -> np.ndarray:
    """Returns the (batch axes, rows, cols) view that a layout describes."""
    step = {layout.major: 1}
    axes = problem.batch_axes(layout)[::-1]
    strides = [stride if extent > 1 else 0 for extent, stride in axes]
    strides += [step.get(name, layout.leading_stride) for name, _ in (rows, cols)]
    assert memory.flags.c_contiguous
    return np.lib.stride_tricks.as_strided(
        memory,
        (*(extent for extent, _ in axes), rows[1], cols[1]),
        tuple(s * memory.itemsize for s in strides),
    )


def run(found: Gemm, lhs: np.ndarray, rhs: np.ndarray, out_shape: tuple[int, ...]) -> np.ndarray:
    p = found.problem
    a, b = (rhs, lhs) if found.swap_ab else (lhs, rhs)
    out = np.full(out_shape, np.nan)
    m, n, k = ("m", p.m), ("n", p.n), ("k", p.k)
    matrices(out, p.d, m, n, p)[...] = matrices(a, p.a, m, k, p) @ matrices(b, p.b, k, n, p)
    return out


def random_product(rng: random.Random) -> tuple[str, dict[str, int]]:
    letters = rng.sample("abcdefgh", 8)
    batch, m, n, k = ([letters.pop() for _ in range(rng.choice((0, 0, 1, 1, 2)))] for _ in range(4))
    arrays = []
    for labels in (batch + m + k, batch + k + n, batch + m + n):
        if rng.random() < 0.6:
            rng.shuffle(labels)
        arrays.append("".join(labels))
    extents = {letter: rng.choice((1, 2, 3, 4)) for letter in "abcdefgh"}
    return "{},{}->{}".format(*arrays), extents


@pytest.mark.parametrize("seed", range(20))
def test_the_strided_problem_is_the_product(seed):
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    canonical = nested = 0
    for _ in range(150):
        subscripts, extents = random_product(rng)
        lhs_labels, rhs_labels = subscripts.split("->")[0].split(",")
        lhs, rhs = (
            numbers.integers(-4, 5, [extents[x] for x in labels]).astype(float)
            for labels in (lhs_labels, rhs_labels)
        )
        try:
            found = gemm(subscripts, lhs.shape, rhs.shape)
        except NotAGemm:
            continue
        expected = np.einsum(subscripts, lhs, rhs)
        np.testing.assert_array_equal(run(found, lhs, rhs, expected.shape), expected)
        canonical += 1
        nested += bool(found.problem.outer)
    assert canonical > 70 and nested > 1


@pytest.mark.parametrize("a_major", ["k", "m"])
@pytest.mark.parametrize("b_major", ["n", "k"])
@pytest.mark.parametrize("batch", [1, 3])
def test_all_operand_layouts_are_compact_problems(a_major, b_major, batch):
    m, n, k = 8, 16, 32
    lhs, rhs = ("lmk" if a_major == "k" else "lkm"), ("lkn" if b_major == "n" else "lnk")
    extents = {"l": batch, "m": m, "n": n, "k": k}
    lhs_shape, rhs_shape = (tuple(extents[x] for x in labels) for labels in (lhs, rhs))
    found = gemm(f"{lhs},{rhs}->lmn", lhs_shape, rhs_shape)
    assert found == Gemm(
        GemmProblem.dense(m, n, k, batch, a_major=a_major, b_major=b_major), swap_ab=False
    )


def test_leading_axes_fold_into_m():
    assert gemm("btk,kn->btn", (3, 5, 8), (8, 16)).problem == GemmProblem.dense(15, 16, 8)


def test_a_shared_operand_has_batch_stride_0():
    problem = gemm("mk,lkn->lmn", (8, 16), (3, 16, 32)).problem
    assert (problem.m, problem.l, problem.a.batch_stride) == (8, 3, 0)
    assert (problem.b.batch_stride, problem.d.batch_stride) == (16 * 32, 8 * 32)


def test_a_batch_between_the_matrix_axes_is_a_stride():
    problem = gemm("bthd,hde->bthe", (2, 3, 4, 16), (4, 16, 32)).problem
    assert (problem.m, problem.l) == (6, 4)
    assert problem.a == MatrixLayout("k", leading_stride=4 * 16, batch_stride=16)
    assert problem.d == MatrixLayout("n", leading_stride=4 * 32, batch_stride=32)


@pytest.mark.parametrize(
    "subscripts, extents, m, outer",
    [
        ("bthd,bshd->bhts", {"b": 2, "t": 16, "h": 3, "d": 8, "s": 24}, 16, (2,)),
        ("bhts,bshd->bthd", {"b": 2, "t": 16, "h": 3, "d": 8, "s": 24}, 16, (2,)),
        ("btkgd,bskd->bkgts", {"b": 2, "t": 16, "k": 3, "g": 4, "d": 8, "s": 24}, 16, (2, 3)),
        ("bkgts,bskd->btkgd", {"b": 2, "t": 16, "k": 3, "g": 4, "d": 8, "s": 24}, 16, (2, 3)),
        ("btkgd,bskd->bkgts", {"b": 2, "t": 1, "k": 3, "g": 4, "d": 8, "s": 24}, 4, (2,)),
        ("becd,edf->becf", {"b": 2, "e": 3, "c": 16, "d": 8, "f": 24}, 16, (2,)),
        ("bhtd,hds->bhts", {"b": 2, "h": 3, "t": 16, "d": 8, "s": 24}, 16, (2,)),
    ],
)
def test_axes_that_do_not_lie_evenly_nest(subscripts, extents, m, outer):
    numbers = np.random.default_rng(0)
    lhs, rhs = (
        numbers.integers(-4, 5, [extents[x] for x in labels]).astype(float)
        for labels in subscripts.split("->")[0].split(",")
    )
    found = gemm(subscripts, lhs.shape, rhs.shape)
    expected = np.einsum(subscripts, lhs, rhs)
    assert (found.problem.m, found.problem.outer) == (m, outer)
    np.testing.assert_array_equal(run(found, lhs, rhs, expected.shape), expected)
    read_once = lhs.size + rhs.size + expected.size
    assert found.problem.bytes == 2 * read_once, "what is broadcast is read once"


def test_a_vector_of_the_epilogue_varies_along_any_axes_of_a_nested_batch():
    shapes = (2, 16, 3, 8), (2, 24, 3, 8)
    problem = fused("bthd,bshd->bhts", *shapes, graph("row", "row"), "hs", "bs").problem
    of_heads, of_batch = problem.operands
    assert (of_heads.batch_stride, of_heads.outer_strides) == (24, (0,))
    assert (of_batch.batch_stride, of_batch.outer_strides) == (0, (24,))
    assert roles(product("bthd,bshd->bhts", *shapes)).batch == "bh"


def test_operands_swap_when_the_result_ends_with_the_left_operands_axis():
    found = gemm("mk,kn->nm", (8, 16), (16, 32))
    assert found.swap_ab
    assert (found.problem.m, found.problem.n) == (32, 8)
    assert (found.problem.a.major, found.problem.b.major) == ("m", "k")


def test_a_matrix_times_a_vector_is_one_row():
    found = gemm("mk,k->m", (64, 128), (128,))
    assert (found.problem.m, found.problem.n, found.swap_ab) == (1, 64, True)


@pytest.mark.parametrize(
    "subscripts, lhs_shape, rhs_shape, reason",
    [
        ("mk,kn->mn", (8, 0), (0, 8), "an extent is 0"),
        ("lmk,lkn->mnl", (2, 4, 8), (2, 8, 4), "last axis is a batch axis"),
        ("mkl,lkn->lmn", (4, 8, 2), (2, 8, 4), "last axis is a batch axis"),
        ("kml,lkn->lmn", (8, 1, 2), (2, 8, 4), "last axis is a batch axis"),
        ("amb,ban->mn", (2, 4, 8), (8, 2, 16), "contracted axes"),
        ("abcdtk,dcbask->abcdts", (2, 3, 4, 5, 6, 8), (5, 4, 3, 2, 7, 8),
         "the batch axes do not lie evenly one inside the other .* but as 4, over 3"),
        ("abcdek,kn->edcban", (2, 3, 2, 3, 2, 8), (8, 6),
         "axes 'e', 'c', 'b', 'a' of one operand alone .* nor to 3 batch axes"),
        ("axbcdk,xkn->xdcban", (2, 3, 3, 2, 3, 8), (3, 8, 6),
         "axes 'c', 'b', 'a' .* nor with the batch axes to 3 batch axes"),
    ],
)  # fmt: skip
def test_what_is_not_one_strided_batch_says_why(subscripts, lhs_shape, rhs_shape, reason):
    with pytest.raises(NotAGemm, match=reason):
        gemm(subscripts, lhs_shape, rhs_shape)


def graph(*kinds: str, accumulators: int = 1, planes: int = 1) -> EpilogueGraph:
    operands = tuple(Operand(kind, "float32") for kind in kinds)  # pyright: ignore
    results = tuple(Result("matrix", 0, "bfloat16", plane=i, planes=planes) for i in range(planes))
    return EpilogueGraph(accumulators, operands, results=results)


def fused(
    subscripts: str, lhs: tuple[int, ...], rhs: tuple[int, ...], epilogue: EpilogueGraph, *labels
) -> Gemm:
    return as_gemm(product(subscripts, lhs, rhs), epilogue, labels)


@pytest.mark.parametrize(
    "subscripts, lhs_shape, rhs_shape, labels, expected",
    [
        ("mk,kn->mn", (8, 16), (16, 32), (), Roles("m", "n", "", False)),
        ("btk,kn->btn", (3, 5, 8), (8, 16), (), Roles("bt", "n", "", False)),
        ("btk,kn->btn", (3, 5, 8), (8, 16), ("n", "bt", "btn"), Roles("bt", "n", "", False)),
        ("btk,kn->btn", (3, 5, 8), (8, 16), ("bn",), Roles("t", "n", "b", False)),
        ("btk,kn->btn", (3, 5, 8), (8, 16), ("t",), Roles("t", "n", "b", False)),
        ("mk,kn->nm", (8, 16), (16, 32), (), Roles("n", "m", "", True)),
        ("bthd,hde->bthe", (2, 3, 4, 16), (4, 16, 32), (), Roles("bt", "e", "h", False)),
        ("ambk,kn->ambn", (1, 8, 1, 16), (16, 32), (), Roles("amb", "n", "", False)),
        ("mk,kcn->mn", (8, 16), (16, 2, 32), (), Roles("m", "n", "", False)),
    ],
)
def test_operands_decide_which_axes_are_rows(subscripts, lhs_shape, rhs_shape, labels, expected):
    assert roles(product(subscripts, lhs_shape, rhs_shape), labels) == expected


def test_operands_of_an_epilogue_are_read_as_they_lie():
    epilogue = graph("matrix", "row", "column", "scalar")
    shapes = (3, 8, 64), (64, 16)
    found = fused("lmk,kn->lmn", *shapes, epilogue, "lmn", "n", "lm", "").problem
    assert (found.m, found.l) == (24, 1)  # all of them merge
    assert found.operands == (
        MatrixLayout("n", 16, 24 * 16), MatrixLayout("n", 16, 16), MatrixLayout("m", 24, 24),
        MatrixLayout("n", 1, 1),
    )  # fmt: skip
    found = fused("lmk,kn->lmn", *shapes, epilogue, "mn", "ln", "lm", "l").problem
    assert (found.m, found.l) == (8, 3)
    assert found.operands == (
        MatrixLayout("n", 16, 0), MatrixLayout("n", 16, 16), MatrixLayout("m", 8, 8),
        MatrixLayout("n", 1, 1),
    )  # fmt: skip


def test_an_operand_may_have_a_batch_axis_between_the_others():
    epilogue, shapes = graph("matrix"), ((2, 3, 4, 16), (4, 16, 32))
    problem = fused("bthd,hde->bthe", *shapes, epilogue, "bthe").problem
    assert problem.operands == (MatrixLayout("n", leading_stride=4 * 32, batch_stride=32),)
    problem = fused("bthd,hde->bthe", *shapes, epilogue, "hbte").problem
    assert problem.operands == (MatrixLayout("n", leading_stride=32, batch_stride=6 * 32),)


def test_gate_and_up_lie_in_one_array():
    problem = fused("mk,kcn->mn", (8, 16), (16, 2, 32), graph(accumulators=2)).problem
    assert problem.b == MatrixLayout("n", 64, 16 * 32) and problem.up_offset == 32
    problem = fused("mk,cnk->mn", (8, 16), (2, 32, 16), graph(accumulators=2)).problem
    assert problem.b == MatrixLayout("k", 16, 16 * 32) and problem.up_offset == 32 * 16


@pytest.mark.parametrize(
    "subscripts, lhs_shape, rhs_shape, epilogue, labels, reason",
    [
        ("mk,kn->mn", (8, 4), (4, 16), graph("matrix"), "nm", "axes are in another order"),
        ("btk,kn->btn", (3, 5, 8), (8, 16), graph("column"), "tb", "axes are in another order"),
        ("mk,kcn->nm", (8, 4), (4, 2, 16), graph(accumulators=2), None, "the left operand"),
        ("bthd,hde->bthe", (2, 3, 4, 8), (4, 8, 16), graph(planes=2), None, "side by side"),
        ("abmk,kn->abmn", (2, 3, 4, 8), (8, 16), graph("scalar"), "n", "varies within a scalar"),
    ],
)  # fmt: skip
def test_what_no_kernel_reads_says_why(subscripts, lhs_shape, rhs_shape, epilogue, labels, reason):
    with pytest.raises(NotAGemm, match=reason):
        fused(subscripts, lhs_shape, rhs_shape, epilogue, *([labels] if labels else []))
