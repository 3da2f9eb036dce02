"""Trials find what a kernel does wrong, with one that runs on the host."""

from __future__ import annotations

import numpy as np
import pytest
from support import cases, outcome, random_operands, reference, trial
from support.host_kernels import BY_NAME, EXACT, run_epilogue_on_host, run_on_host
from support.places import result_places
from support.recording_driver import SPEC

pytestmark = pytest.mark.pure


def trial_problem():
    problem, _ = cases.edge_problems(SPEC, num_sms=4)[1]
    return problem, *random_operands.integers(problem, 0)


def test_trial_accepts_a_right_kernel(monkeypatch):
    problem, a, b = trial_problem()
    result = run_on_host(monkeypatch, problem, a, b, repeats=3)
    assert np.array_equal(result, reference.integer_product(a, b, result.dtype))


def test_trial_leaves_unwritten_elements_poisoned(monkeypatch):
    def skip(launches, d, flat):
        d[1, 2, 3] = np.frombuffer(bytes([trial.POISON] * 4), np.float32)[0]

    result = run_on_host(monkeypatch, *trial_problem(), skip)
    assert np.argwhere(np.isnan(result)).tolist() == [[1, 2, 3]]


def test_trial_finds_a_write_outside(monkeypatch):
    problem, a, b = trial_problem()
    for index in (problem.n, reference.num_elements(problem, "d")):  # after a row, after the end

        def stray(launches, d, flat, index=index):
            flat[index] = 1

        with pytest.raises(AssertionError, match=f"wrote 1 elements outside, the first {index}"):
            run_on_host(monkeypatch, problem, a, b, stray)


def test_trial_finds_a_write_before_the_start():
    problem, _, _ = trial_problem()
    (place,) = result_places(problem, SPEC)
    bits = np.full(place.end + 2 * trial.GUARD, 2**32 - 1, np.uint32)
    trial.assert_untouched_outside(place, bits, "kernel")
    bits[3] = 0
    with pytest.raises(AssertionError, match=f"the first -{trial.GUARD - 3} elements"):
        trial.assert_untouched_outside(place, bits, "kernel")


def test_inputs_have_nans_wherever_no_element_is():
    problem, a, b = trial_problem()
    flat = trial.guarded(reference.input_places(problem)[0], [a])
    values = reference.view(problem, "a", flat[trial.GUARD :])
    assert np.array_equal(values, a)
    assert np.isnan(flat.astype(np.float32)).sum() == flat.size - a.size


def test_trial_finds_a_repeat_with_other_bits(monkeypatch):
    def waver(launches, d, flat):
        d[0, 0, 0] += launches == 2

    with pytest.raises(AssertionError, match="run 2 gave other bits in 1 elements"):
        run_on_host(monkeypatch, *trial_problem(), waver, repeats=4)


@pytest.mark.slow
def test_trial_accepts_a_right_kernel_with_an_epilogue(monkeypatch):
    for name in EXACT:
        spec = BY_NAME[name]
        problem, inputs, results = run_epilogue_on_host(monkeypatch, spec)
        outcome.assert_exact(results, outcome.exact(problem, spec, inputs), name)


def test_trial_finds_one_wrong_part_of_a_reduction(monkeypatch):
    def spoil(results):
        results[1][0, 1, 3] += 1

    spec = BY_NAME["column_sum"]
    problem, inputs, results = run_epilogue_on_host(monkeypatch, spec, spoil)
    with pytest.raises(AssertionError, match=r"1 of \d+ elements of result 1 .* \[0 1 3\]"):
        outcome.assert_exact(results, outcome.exact(problem, spec, inputs), "kernel")


def test_trial_finds_a_part_of_a_reduction_that_was_not_written(monkeypatch):
    def spoil(results):
        results[1].view(np.uint32)[2, 0, 0] = 2**32 - 1

    spec = BY_NAME["amax"]
    problem, inputs, results = run_epilogue_on_host(monkeypatch, spec, spoil)
    with pytest.raises(AssertionError, match="elements of result 1 differ"):
        outcome.assert_exact(results, outcome.exact(problem, spec, inputs), "kernel")
