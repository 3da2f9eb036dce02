"""Offsets of 64 bits, on the code that the device runs; integers raise where its would wrap."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from support.graphs import STANDARD
from support.lanes import INT32_LANES, Int32, Int64

from jax_hopper_gemm.dispatch import H200, choose, problem_violations
from jax_hopper_gemm.dispatch.candidates import model_specs
from jax_hopper_gemm.dispatch.layout_legality import MAX_EXTENT, MAX_INT32
from jax_hopper_gemm.dispatch.legality import pairing_violations
from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph, Result
from jax_hopper_gemm.gemm.grid import ceil_div, result_shapes, zero_rows
from jax_hopper_gemm.gemm.group_search import MAX_LENGTH, Part
from jax_hopper_gemm.gemm.groups import GroupedAxis, Groups
from jax_hopper_gemm.gemm.offsets import ZeroRows, element_offset, row_address, vectors_of_part
from jax_hopper_gemm.gemm.problem import GemmProblem, MatrixLayout
from jax_hopper_gemm.gemm.problem_type import ProblemType
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.launch.plan import Int32 as Int32Parameter
from jax_hopper_gemm.launch.plan import make_plan

pytestmark = pytest.mark.pure

SUMS = EpilogueGraph(
    results=(
        Result("matrix", 0, "bfloat16"),
        Result("row_sum", 0),
        Result("row_sumexp", 0),
        Result("column_sum", 0),
        Result("max", 0),
    )
)
SPEC = GemmSpec(
    "bfloat16", "bfloat16", "bfloat16", "k", "n", 128, 128, num_stages=3, epi_stages=2,
    epilogue=SUMS,
)  # fmt: skip
EIGHTS = MAX_EXTENT // 8 * 8
MIB = 2**20


def fits(number: int) -> Int32:
    """Returns an int32 of the device; raises where it is none."""
    return Int32(int(number))


def checked_minimum(a, b) -> Int32:
    return INT32_LANES.minimum(a, b)


def test_checked_integers_widen_and_raise_where_the_devices_wrap():
    largest = Int32(2**31 - 1)
    assert int(Int64(largest) * largest + 1) == (2**31 - 1) ** 2 + 1
    assert type(largest * Int64(2)) is Int64 and type(largest - 1) is Int32
    for overflowing in (lambda: largest + 1, lambda: largest * 2, lambda: Int64(2**62) * 2):
        with pytest.raises(OverflowError):
            overflowing()


def test_element_offsets_are_those_of_row_major_arrays():
    shape = 3, 4, 5, 2
    for index in itertools.product(*map(range, shape)):
        assert element_offset(index, shape[1:], int) == np.ravel_multi_index(index, shape)


@pytest.mark.parametrize(
    ("l", "m", "n"),
    [
        (1, 1310720, 131072),
        (1, EIGHTS, 16),
        (1, 16, EIGHTS),
        (1, 2**22, 2**22 - 128),  # the most tiles
        (2**30 - 1, 8, 8),
        (2**15 - 1, 2**15, 2**14),
    ],
)
def test_the_last_partial_result_lies_where_exact_arithmetic_says(l, m, n):  # noqa: E741
    problem = replace(GemmProblem.dense(m, n, 64, l), epilogue=SUMS)
    assert problem_violations(problem) == [] == pairing_violations(problem, SPEC)
    for shape, _ in result_shapes(problem, SPEC)[1:]:
        last = [fits(extent - 1) for extent in shape]
        offset = element_offset(last, [fits(extent) for extent in shape[1:]], Int64)
        assert type(offset) is Int64 and int(offset) == math.prod(shape) - 1


def test_a_logsumexp_of_more_than_2_31_parts_is_addressed_exactly():
    graph = replace(SUMS, results=SUMS.results[:1] + SUMS.results[2:3])
    problem = replace(GemmProblem.dense(1310720, 262144, 4096), epilogue=graph)
    spec = choose(problem, H200).spec
    assert spec is not None
    (shape, _) = result_shapes(problem, spec)[1]
    _, tiles_n, parts, rows = shape
    last = Int32(0), Int32(tiles_n - 1), parts - 1, Int32(rows - 1)
    offset = int(element_offset(last, (Int32(tiles_n), parts, Int32(rows)), Int64))
    assert offset == tiles_n * 2 * 1310720 - 1
    with pytest.raises(OverflowError):
        Int32(offset)


@pytest.mark.parametrize("a_major", ["k", "m"])
def test_no_coordinate_of_a_tile_past_the_end_of_an_axis_wraps_around(a_major):
    types = ProblemType("bfloat16", "bfloat16", "bfloat16", a_major, "n")
    for spec in model_specs(types):
        for tile in (spec.tile_m * spec.cluster_m, spec.d_tile_n * spec.cluster_n, spec.tile_k):
            fits(ceil_div(MAX_EXTENT, tile) * tile)
    for axis in ("m", "n", "k"):
        longer = GemmProblem.dense(*(MAX_EXTENT + 1 if axis == name else 8 for name in "mnk"))
        assert (
            f"{axis.upper()} is {MAX_EXTENT + 1}, over {MAX_EXTENT}"
            in problem_violations(longer)[0]
        )


# Gathered rows


def gathered(source: int, stride: int, rows: int = 4096) -> GemmProblem:
    problem = GemmProblem.grouped("m", rows, 1024, min(stride, 8192), 8)
    groups = GroupedAxis("m", 8, Groups(9, 8), gathered="a", source_rows=source)
    return replace(problem, groups=groups, a=MatrixLayout("k", stride))


@pytest.mark.parametrize(
    ("source", "stride"),
    [(4194304, 8192), (MAX_INT32, 8), (MAX_INT32, MAX_INT32 // 16 * 8), (3, MAX_INT32 // 16 * 8)],
)
def test_gathered_rows_are_addressed_exactly(source, stride):
    problem = gathered(source, stride)
    assert problem_violations(problem) == []
    spec = choose(problem, H200).spec
    assert spec is not None and spec.gathered == "a"
    row_bytes = fits(stride) * 2  # as the kernel multiplies
    for row in {0, source // 2, source - 1, min(2097152, source - 1)}:
        address = row_address(Int64(2**48), fits(row), row_bytes, Int64)
        assert type(address) is Int64 and int(address) == 2**48 + row * stride * 2


def test_rows_whose_distance_in_bytes_is_no_int32_are_not_gathered():
    (reason,) = problem_violations(gathered(2, 2**30))
    assert "A's rows, picked by indices, are 2147483648 bytes apart, over 2147483647" in reason
    assert "indices pick among 2147483648 rows" in problem_violations(gathered(2**31, 64))[0]


# Zeros of empty groups


def contracted(m: int, n: int, groups: int, d: MatrixLayout | None = None) -> GemmProblem:
    problem = GemmProblem.grouped("k", m, n, 4096, groups)
    return replace(problem, d=d or problem.d)


def filling_spec(problem: GemmProblem) -> GemmSpec:
    spec = next(iter(model_specs(ProblemType.of(problem))))
    assert spec.zero_fill_warp
    return spec


@pytest.mark.parametrize("gap", [0, 3])
def test_parts_cover_each_vector_of_a_matrix_once(gap):
    rows, length, size, matrices = 3, 21, 4, 2
    zeros = ZeroRows(rows, length, length + gap, rows * (length + gap) + 5)
    parts = zeros.parts_of_row(size)
    found = []
    for matrix, part in itertools.product(range(matrices), range(rows * parts)):
        start, first, end = vectors_of_part(zeros, parts, size, Part(matrix, part), int, min)
        assert 0 < end - first <= size
        found += range(start + first, start + end)
    expected = [
        matrix * zeros.matrix_stride + row * zeros.row_stride + vector
        for matrix, row, vector in itertools.product(range(matrices), range(rows), range(length))
    ]
    assert found == expected


@pytest.mark.parametrize(
    "problem",
    [
        contracted(2**17, 2**17 - 64, 1),  # one row of nearly 2**31 vectors
        contracted(2**17, 2**17 - 64, 40),
        contracted(2**10, 2**10, 2**20),
        contracted(2**17, 8, 2**13 - 1, MatrixLayout("n", 16, 2**21)),  # a part for each row
    ],
    ids=["vectors", "matrices", "groups", "parts"],
)
def test_zeros_of_the_largest_matrices_lie_where_exact_arithmetic_says(problem):
    spec = filling_spec(problem)
    assert problem_violations(problem) == [] == pairing_violations(problem, spec)
    exact, size = zero_rows(problem), spec.zero_part
    zeros = ZeroRows(*map(fits, exact))
    parts_of_row = zeros.parts_of_row(size)
    parts = zeros.rows * parts_of_row
    fits(problem.l * int(parts) + H200.num_sms)  # counted by the warps of all CTAs
    for matrix, part in itertools.product((0, problem.l - 1), (0, int(parts) - 1)):
        start, first, end = vectors_of_part(
            zeros, parts_of_row, size, Part(fits(matrix), fits(part)), Int64, checked_minimum
        )
        row, piece = divmod(part, int(parts_of_row))
        assert int(start) == matrix * exact.matrix_stride + row * exact.row_stride
        assert int(first) == piece * size and int(end) == min((piece + 1) * size, exact.vectors)
        fits(int(end) + 4 * 32)  # where a lane stops that writes four at a time


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (contracted(2**17, 2**17, 1), "2147483648 vectors of 16 bytes without a gap"),
        (
            contracted(8, 8, 2, MatrixLayout("n", 8, 2**34)),
            "2147483648 vectors of 16 bytes from a matrix to the next",
        ),
        (
            contracted(8, 8, 1, MatrixLayout("n", 2**34)),
            "2147483648 vectors of 16 bytes from a row to the next",
        ),
        (contracted(2**18, 8, 2**13, MatrixLayout("n", 16, 2**22)), "2147483648 parts"),
    ],
)
def test_zeros_that_a_kernel_cannot_count_are_left_to_xla(problem, words):
    assert any(words in reason for reason in pairing_violations(problem, filling_spec(problem)))
    decision = choose(problem, H200, kernel_only=True)
    assert decision.spec is None and words in decision.reason


# Launch parameters


def scalars(l: int, stride: int) -> GemmProblem:  # noqa: E741
    graph = STANDARD["alpha_beta"]
    layouts = [
        MatrixLayout("n", 64, 64 * 64 if o.kind == "matrix" else stride) for o in graph.operands
    ]
    problem = GemmProblem.dense(64, 64, 64, l, d_dtype=graph.matrices[0].dtype)
    return replace(problem, epilogue=graph, operands=tuple(layouts))


def test_scalars_too_far_apart_for_int32_offsets_are_refused():
    assert problem_violations(scalars(2, MAX_INT32)) == []
    assert problem_violations(scalars(MIB, 2047)) == []
    (first, *_) = problem_violations(scalars(MIB + 2, 2048))
    assert "a scalar for each matrix, the last of them 2147485696 elements behind" in first


def test_a_stride_that_no_matrix_uses_is_no_parameter():
    problem = scalars(1, 2**40)
    assert problem_violations(problem) == []
    spec = choose(problem, H200, kernel_only=True).spec
    assert spec is not None
    params = make_plan(problem, spec, RasterOrder(), H200.num_sms).params
    numbers = [p.value for p in params if isinstance(p, Int32Parameter)]
    assert all(-(2**31) <= number < 2**31 for number in numbers)


def test_groups_that_int32_cannot_count_are_refused():
    rows = GemmProblem.grouped("m", 4096, 64, 64, 8)
    apart = replace(rows, groups=GroupedAxis("m", 8, Groups(2**31, 8)))
    assert "runs repeat every 2147483648, over 2147483647" in problem_violations(apart)[0]
    many = replace(rows, l=MAX_LENGTH + 1)
    assert f"B has {MAX_LENGTH + 1} matrices, over {MAX_LENGTH}" in problem_violations(many)[0]


def test_a_result_of_an_unknown_dtype_is_a_reason_and_no_exception():
    (first, *_) = problem_violations(GemmProblem.dense(64, 64, 64, d_dtype="float64"))
    assert first.startswith("D is float64: ask for ")
