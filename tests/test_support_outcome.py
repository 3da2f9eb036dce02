"""The results that epilogues must have, from another point of view."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from support import cases, outcome, random_operands, reference
from support.host_kernels import BY_NAME, EXACT, run_epilogue_on_host

pytestmark = pytest.mark.pure


def test_the_partial_results_add_up_to_the_whole(monkeypatch):
    """An independent look at `outcome.exact`: sums and maxima of the matrix beside them."""
    for name, reduce, axes in (
        ("column_sum", np.sum, (1,)),
        ("row_sum", np.sum, (2,)),
        ("row_max", np.max, (2,)),
    ):
        spec = BY_NAME[name]
        problem, inputs, (_, partial) = run_epilogue_on_host(monkeypatch, spec)
        product = reference.integer_product(inputs.a, inputs.b[0], np.dtype(np.float32))
        assert np.array_equal(reduce(partial, axis=1), reduce(product, axis=axes)), name
    spec = BY_NAME["top_k"]
    problem, inputs, (_, values, columns) = run_epilogue_on_host(monkeypatch, spec)
    product = reference.integer_product(inputs.a, inputs.b[0], np.dtype(np.float32))
    right = jax.lax.top_k(product, values.shape[-1])
    assert np.array_equal(values, right[0]) and np.array_equal(columns, right[1])


@pytest.mark.slow
def test_float32_arithmetic_is_within_the_bounds_of_an_epilogue():
    for name in EXACT:
        if name == "top_k":
            continue
        spec = BY_NAME[name]
        problem, _ = cases.edge_problems(spec, 4)[1]
        inputs = random_operands.normal_inputs(problem, 3)
        results = outcome.exact(problem, spec, inputs)  # NumPy's float32, in another order
        outcome.assert_within_bound(problem, spec, inputs, results, name)
        results[-1][(-1,) * results[-1].ndim] += 100
        with pytest.raises(AssertionError, match=f"{name}.* times the bound"):
            outcome.assert_within_bound(problem, spec, inputs, results, name)


@pytest.mark.parametrize("exactly", [True, False, None])
def test_a_right_kernel_alone_passes(exactly, monkeypatch):
    spec = BY_NAME["row_max"]
    problem, raster_order = cases.edge_problems(spec, 4)[1]
    gpu: Any = None
    wrong = 0

    def computed(gpu, problem, spec, raster_order, inputs, repeats, num_sms):
        integers = bool((inputs.a == np.rint(inputs.a.astype(np.float32))).all())
        assert (integers, repeats, num_sms) == (exactly is not False, 3, 16)
        results = outcome.exact(problem, spec, inputs)
        results[-1][(-1,) * results[-1].ndim] += wrong
        return results

    monkeypatch.setattr(outcome, "run_all", computed)
    outcome.check(gpu, spec, problem, raster_order, 0, 16, 3, exactly)
    wrong = 100
    with pytest.raises(AssertionError, match=spec.name):
        outcome.check(gpu, spec, problem, raster_order, 0, 16, 3, exactly)
