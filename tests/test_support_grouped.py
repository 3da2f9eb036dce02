"""Grouped products on trial: sizes, references and guards do what they claim."""

from __future__ import annotations

import collections
import itertools
from dataclasses import replace
from typing import Any

import group_sizes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import graphs, grouped, grouped_results, outcome, random_grouped, reference, trial
from support.covering import ALL
from support.grouped import Layout
from support.grouped_results import Span
from support.host_kernels import HostGpu, HostLaunch
from support.places import result_places, shape_of
from support.policies import choice_of, grouped_covering_specs, spec_of

from jax_hopper_gemm.dispatch import problem_violations
from jax_hopper_gemm.dispatch.legality import pairing_violations
from jax_hopper_gemm.gemm.groups import GroupedAxis
from jax_hopper_gemm.gemm.legality import violations
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.spec import GemmSpec

pytestmark = pytest.mark.pure

SPECS = grouped_covering_specs()


# Spans


def problem(groups: GroupedAxis, length: int, matrices: int) -> GemmProblem:
    extents = (length, 16, 8) if groups.axis == "m" else (16, 24, length)
    return replace(GemmProblem.dense(*extents, matrices), groups=groups)


def spans(layout: Layout, length: int, sizes: list[int], axis: Any = "m") -> list[Span]:
    of = problem(layout.of_axis(axis), length, layout.matrices)
    return grouped_results.spans(of, np.array(sizes, np.int32))


def test_what_sizes_leave_is_of_no_group():
    assert spans(Layout.plain(2), 9, [3, 4]) == [(0, 3, 0), (3, 7, 1), (7, 9, -1)]


def test_sizes_are_clipped():
    found = spans(Layout.plain(4), 9, [-5, 4, 2**31 - 1, 3])
    assert found == [(0, 0, 0), (0, 4, 1), (4, 9, 2), (9, 9, 3), (9, 9, -1)]


def test_groups_of_other_devices_come_first():
    assert spans(Layout.offset(2), 9, [3, 2, 2]) == [(0, 3, -1), (3, 5, 0), (5, 7, 1), (7, 9, -1)]


def test_a_batch_has_its_own_weights_or_shares_them():
    for shared, second in ((False, [2, 3]), (True, [0, 1])):
        of_batch = spans(Layout.batched(2, 2, shared), 8, [1, 2, 1, 0, 3, 1])
        assert [span.matrix for span in of_batch] == [0, 1, -1, *second, -1, -1]
        assert [span.end for span in of_batch] == [1, 3, 4, 4, 7, 8, 8]


def test_sizes_of_a_batch_are_clipped_to_its_parts():
    assert grouped.of_batch(9, 2, [[3, 9, 1], [-1, 2, 0]]) == [3, 1, 0, 0, 0, 2, 0, 3]


# References


def inputs_of(of: GemmProblem, sizes: np.ndarray, exact=True) -> trial.Inputs:
    make = grouped.integer_inputs if exact else grouped.normal_inputs
    return make(of, sizes, 5)


def plain_spec(axis, **fields) -> GemmSpec:
    majors = ("k", "n") if axis == "m" else ("m", "n")
    return GemmSpec(
        "bfloat16", "bfloat16", "float32", *majors, 128, 64, num_stages=2, grouped=axis, **fields
    )


@pytest.mark.parametrize("b_major", ["n", "k"])
def test_products_of_rows_are_those_of_jax(b_major):
    spec = replace(plain_spec("m"), b_major=b_major)
    of = grouped.problem_of(spec, Layout.plain(6), 150, 24, 40)
    for kind in ("uneven", "half_empty", "under", "one_row", "empty"):
        sizes = group_sizes.KINDS[kind](of.m, 6, 2)
        inputs = inputs_of(of, sizes, exact=False)
        a, b = (jnp.nan_to_num(x.astype(np.float32)) for x in (inputs.a, inputs.b[0]))
        theirs = jax.lax.ragged_dot(a[0], b, jnp.asarray(sizes), precision="highest")
        ours = grouped_results.products(of, inputs, inputs.b[0])[0]
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5, err_msg=kind)
        assert np.any(ours != 0) == (kind != "empty")


def test_products_of_columns_are_those_of_jax():
    of = grouped.problem_of(plain_spec("k"), Layout.plain(5), 40, 24, 150)
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (0,)), ((), ())),
        lhs_ragged_dimensions=[1],
        rhs_group_dimensions=[],
    )
    for kind in ("uneven", "half_empty", "under", "single"):
        sizes = group_sizes.KINDS[kind](of.k, 5, 2)
        inputs = inputs_of(of, sizes, exact=False)
        a, b = (np.nan_to_num(x[0].astype(np.float32)) for x in (inputs.a, inputs.b[0]))
        theirs = jax.lax.ragged_dot_general(a, b, jnp.asarray(sizes), numbers, precision="highest")
        ours = grouped_results.products(of, inputs, inputs.b[0])
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5, err_msg=kind)
        assert np.any(ours != 0), kind


def test_products_of_chosen_rows_are_rows_of_all():
    of = grouped.problem_of(plain_spec("m"), Layout.offset(4), 90, 24, 40)
    inputs = inputs_of(of, np.array([7, 20, 0, 33, 4], np.int32))
    rows = np.array([8, 9, 26, 59, 62])
    whole = grouped_results.products(of, inputs, inputs.b[0])
    chosen = grouped_results.products(of, inputs, inputs.b[0], rows=rows)
    assert np.array_equal(chosen, whole[:, rows]) and np.any(chosen != 0)


def test_what_belongs_to_no_group_is_nan():
    spec = plain_spec("m", epilogue=graphs.residual("float32", "float32"), epi_load_stages=2)
    of = grouped.problem_of(spec, Layout.offset(3), 40, 24, 16)
    inputs = inputs_of(of, np.array([5, 10, 0, 9], np.int32))
    rows = [*range(5), *range(24, 40)]
    for array in (inputs.a[0], inputs.operands[0][0]):
        found = np.flatnonzero(np.isnan(array.astype(np.float32)).all(axis=1))
        assert found.tolist() == rows
    weights = np.isnan(inputs.b[0].astype(np.float32)).all(axis=(1, 2))
    assert weights.tolist() == [False, True, False]


def test_gathered_rows_come_from_their_source():
    of = grouped.problem_of(plain_spec("m"), Layout.plain(2), 6, 24, 8)
    assert of.groups
    of = replace(of, groups=replace(of.groups, gathered="a", source_rows=4))
    assert shape_of(of, "a") == (1, 4, 8)
    a = np.arange(32, dtype=np.float32).reshape(1, 4, 8)
    b = np.ones((2, 8, 24), np.float32) * [[[1]], [[2]]]
    indices = np.array([3, 3, 0, 4, -1, 0], np.int32)
    inputs = trial.Inputs(a, (b,), sizes=np.array([2, 3], np.int32), indices=indices)
    total = a[0].sum(axis=1)
    expected = [total[3], total[3], 2 * total[0], 0, 0, 0]
    assert np.array_equal(grouped_results.products(of, inputs, b)[0, :, 0], expected)


def test_rows_that_nobody_picks_are_nan():
    spec = next(s for s in SPECS if s.gathered and s.grouped == "m")
    of = grouped.problem_of(spec, Layout.plain(2), 60, 64, 16)
    inputs = inputs_of(of, np.array([5, 10], np.int32))
    assert inputs.indices is not None and of.groups
    picked = {int(i) for i in inputs.indices[:15] if 0 <= i < of.groups.source_rows}
    numbers = ~np.isnan(inputs.a[0].astype(np.float32)).all(axis=1)
    assert set(np.flatnonzero(numbers)) == picked


# Problems


def test_covering_specs_are_legal_and_cover_all_pairs():
    assert all(violations(spec) == [] for spec in SPECS)
    assert all(spec_of(choice_of(spec)) == spec for spec in SPECS)
    pairs = {(s.grouped, s.warp_schedule, s.tile_scheduler, s.a_dtype) for s in SPECS}
    assert len(pairs) == 16


def test_edge_cases_are_legal_and_meet_what_they_should():
    for spec in SPECS[::9]:
        cases = grouped.edge_cases(spec, 16, exact=False)
        for case in cases:
            reasons = problem_violations(case.problem) + pairing_violations(case.problem, spec)
            assert reasons == [], spec.name
            assert len(case.sizes) == (case.problem.groups or pytest.fail("no groups")).num_sizes
        lengths = [case.problem.m if spec.grouped == "m" else case.problem.k for case in cases]
        totals = [sum(case.sizes) for case in cases]
        assert any(total < length for total, length in zip(totals, lengths, strict=True)), spec.name
        assert any(total > length for total, length in zip(totals, lengths, strict=True)), spec.name
        assert any(len(case.sizes) > 64 for case in cases), spec.name
        assert any(min(case.sizes) < 0 for case in cases), spec.name


def test_random_cases_are_legal_and_various():
    cases = [random_grouped.case(seed) for seed in range(random_grouped.COUNT)]
    for case in cases:
        assert problem_violations(case.problem) + pairing_violations(case.problem, case.spec) == []
    forms = collections.Counter((case.spec.grouped, case.spec.b_major) for case in cases)
    assert set(forms) == {("m", "n"), ("m", "k"), ("k", "n")} and min(forms.values()) >= 60
    assert sum(case.exact for case in cases) >= 80
    assert sum(len(case.sizes) > 1000 for case in cases) >= 10
    assert sum(min(case.sizes) < 0 for case in cases) >= 20
    assert {case.problem.groups.rule.step > 0 for case in cases if case.problem.groups} == {
        True,
        False,
    }
    assert len({case.spec for case in cases}) > 100
    assert random_grouped.case(7) == cases[7]


# Trials, with a kernel that computes on the host what it should


def try_on_host(monkeypatch, case: grouped.Case, spoil=lambda results, parts: None):
    """Runs and checks `case` with a kernel that is right; `spoil` then does what a bug would.

    The kernel takes whole matrices of rows of no group for zeros, as kernels do.
    """

    def prepare(gpu, problem, spec, raster_order, parts, num_sms):
        def flat(part, dtype):
            itemsize = jnp.dtype(dtype).itemsize
            return part[: part.size // itemsize * itemsize].view(jnp.dtype(dtype))

        buffers = reference.input_places(problem)
        pairs = zip(parts, buffers, strict=False)
        read = [p.view(flat(part, p.dtype)) for part, places in pairs for p in places]
        places = result_places(problem, spec)
        rest = zip(parts[len(buffers) :], places, strict=True)
        written = [place.view(flat(part, place.dtype)) for part, place in rest]
        count = 1 + problem.graph.accumulators
        indices = [read.pop()] if spec.gathered else [None]
        sizes = read.pop()
        seen = trial.Inputs(read[0], tuple(read[1:count]), tuple(read[count:]), sizes, indices[0])

        def launch():
            for array, right in zip(written, right_results(problem, spec, seen), strict=True):
                array[:] = right
            spoil(written, parts)

        return HostLaunch(launch)

    monkeypatch.setattr(trial, "prepare", prepare)
    gpu: Any = HostGpu()
    inputs = case.inputs()
    results = trial.run_all(gpu, case.problem, case.spec, case.raster_order, inputs)
    case.check(inputs, results)


def right_results(of, spec, inputs) -> list[np.ndarray]:
    """What a kernel writes, of operands in float32, without a look at what checks it."""
    matrices = grouped_results.matrix_of_rows(of, inputs.sizes)
    sums = []
    for b in inputs.b:
        a, b = (x.astype(np.float32) for x in grouped_results.gathered(of, inputs, b))
        if spec.grouped == "m":
            rows = [
                row @ b[i] if i >= 0 else np.zeros(of.n, np.float32)
                for row, i in zip(a[0], matrices, strict=True)
            ]
            sums.append(np.stack(rows)[None])
        else:
            each = [a[0][:, matrices == i] @ b[0][matrices == i] for i in range(of.l)]
            sums.append(np.stack(each))
    operands = outcome.broadcast_operands(of, inputs)
    if spec.grouped == "m":
        owner = np.maximum(matrices, 0)
        operands = [
            x[owner].swapaxes(0, 1) if operand.kind in ("row", "scalar") else x
            for operand, x in zip(of.graph.operands, operands, strict=True)
        ]
    values = outcome.exact_values(of.graph, sums, operands)
    if spec.grouped == "m":
        belongs = (matrices >= 0)[None, :, None]
        values = [np.where(belongs, value, 0).astype(np.float32) for value in values]
    stored = [values[result.value] for result in of.graph.results]
    return outcome.arrays_of(of.graph, spec, stored, sums[0].shape)


EXACT = [spec for spec in SPECS if graphs.is_exact(spec.graph)]


@pytest.mark.slow
def test_a_right_kernel_passes(monkeypatch):
    for spec in EXACT[:: 5 if ALL else 20]:
        for case in grouped.edge_cases(spec, 1, exact=True)[3:]:
            try_on_host(monkeypatch, case)


def case_of(axis: Any, exact: bool) -> grouped.Case:
    spec = plain_spec(axis)
    layout, extents = Layout.plain(3), (70, 24, 40) if axis == "m" else (40, 24, 70)
    of = grouped.problem_of(spec, layout, *extents)
    return grouped.Case(of, spec, random_grouped.RasterOrder(), (20, 0, 31), 3, exact)


def test_a_right_kernel_passes_either_check(monkeypatch):
    for axis, exact in itertools.product("mk", (True, False)):
        try_on_host(monkeypatch, case_of(axis, exact))


def spoil_rows_of_the_next_group(results, parts):
    results[0][0, 20:22] = results[0][0, 18:20]


def spoil_a_row_of_no_group(results, parts):
    results[0][0, 69] = 1e-3


def skip_a_row_of_no_group(results, parts):
    results[0].view(np.uint32)[0, 51] = 2**32 - 1


def skip_an_element(results, parts):
    results[0].view(np.uint32)[0, 19, 3] = 2**32 - 1


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_rows_of_the_next_group,
        spoil_a_row_of_no_group,
        skip_a_row_of_no_group,
        skip_an_element,
    ],
)
def test_a_wrong_row_is_found(spoil, monkeypatch):
    for exact in (True, False):
        with pytest.raises(AssertionError, match=r"not 0|differ|times the bound"):
            try_on_host(monkeypatch, case_of("m", exact), spoil)


def leave_an_empty_group(results, parts):
    results[0].view(np.uint32)[1] = 2**32 - 1


def miss_the_last_row(results, parts):
    results[0][2] *= 30 / 31


@pytest.mark.parametrize("spoil", [leave_an_empty_group, miss_the_last_row])
def test_a_wrong_group_is_found(spoil, monkeypatch):
    for exact in (True, False):
        with pytest.raises(AssertionError, match=r"differ|times the bound"):
            try_on_host(monkeypatch, case_of("k", exact), spoil)


def test_a_write_outside_is_found(monkeypatch):
    case = case_of("m", True)
    (place,) = result_places(case.problem, case.spec)
    for index in (case.problem.n, place.end):  # after a row, after the end

        def overwrite(results, parts, index=index):
            parts[-1].view(np.float32)[index] = 7.0

        with pytest.raises(AssertionError, match="wrote 1 elements outside"):
            try_on_host(monkeypatch, case, overwrite)


def test_a_write_to_an_input_is_found(monkeypatch):
    for number, offset in ((0, 0), (1, 9), (2, 0), (2, 12)):

        def overwrite(results, parts, number=number, offset=offset):
            parts[number][offset] ^= 1

        with pytest.raises(AssertionError, match=f"input {number}, was written to: 1 bytes"):
            try_on_host(monkeypatch, case_of("m", True), overwrite)


def test_sizes_lie_between_large_ones():
    case = case_of("m", True)
    sizes = np.array(case.sizes, np.int32)
    flat = trial.guarded(reference.input_places(case.problem)[-1], [sizes])
    around = np.delete(flat, trial.GUARD + np.arange(3))
    assert (around > case.problem.m).all() and flat[trial.GUARD] == 20
