"""Grouped kernels on memory with guards, and NaNs in all that no result depends on.

Every pair of policies, and every kernel that dispatch can choose.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from support import direct, graphs, random_grouped, reference, trial
from support.grouped import Layout, edge_cases, integer_inputs, problem_of
from support.grouped_results import assert_exact
from support.places import result_places
from support.policies import chosen_specs, grouped_covering_specs

from jax_hopper_gemm.gemm.dtypes import HALVES
from jax_hopper_gemm.gemm.raster import RasterOrder

SPECS = grouped_covering_specs()
CHOSEN = [spec for spec in chosen_specs() if spec.grouped and spec not in SPECS]
FEW_SMS = 8  # so that a persistent grid wraps around on problems that are quickly checked


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_grouped_kernel_is_right_at_its_edges_and_writes_only_its_results(spec, gpu, checked):
    for case in edge_cases(spec, FEW_SMS, exact=graphs.is_exact(spec.graph)):
        case.run(gpu, FEW_SMS)
    checked(spec)


@pytest.mark.parametrize("spec", CHOSEN, ids=lambda spec: spec.name)
def test_kernel_that_dispatch_chooses_is_right(spec, gpu, checked):
    for case in edge_cases(spec, FEW_SMS, exact=True)[:4]:
        case.run(gpu, FEW_SMS)
    checked(spec)


@pytest.mark.parametrize("spec", SPECS[::3], ids=lambda spec: spec.name)
def test_grouped_kernel_is_right_on_a_full_gpu(spec, gpu):
    case = edge_cases(spec, gpu.device.num_sms, exact=graphs.is_exact(spec.graph))[2]
    case.run(gpu)


@pytest.mark.parametrize("spec", [*SPECS, *CHOSEN[::5]], ids=lambda spec: spec.name)
def test_grouped_kernel_gives_the_same_bits_in_20_repeats(spec, gpu):
    edge_cases(spec, FEW_SMS, exact=False)[1].run(gpu, repeats=20)


@pytest.mark.parametrize("spec", SPECS[::7], ids=lambda spec: spec.name)
def test_bits_do_not_depend_on_how_many_sms_there_are(spec, gpu):
    case = edge_cases(spec, FEW_SMS, exact=False)[1]
    inputs = case.inputs()
    run = [
        trial.run_all(gpu, case.problem, spec, case.raster_order, inputs, num_sms=num_sms)
        for num_sms in (4, 31, None)
    ]
    for results in run[1:]:
        for first, other in zip(run[0], results, strict=True):
            assert (first.view("u1") == other.view("u1")).all()


@pytest.mark.parametrize("seed", range(random_grouped.COUNT))
def test_random_grouped_product_is_right(seed, gpu):
    random_grouped.case(seed).run(gpu)


def test_random_products_cover_what_they_should():
    cases = [random_grouped.case(seed) for seed in range(random_grouped.COUNT)]
    forms = Counter((case.spec.grouped, case.spec.b_major) for case in cases)
    assert min(forms[form] for form in (("m", "n"), ("m", "k"), ("k", "n"))) >= 60
    assert {case.spec.a_dtype for case in cases} == set(HALVES)
    assert any(len(case.sizes) > 1000 for case in cases)


@pytest.mark.parametrize("axis", ["m", "k"])
def test_a_launch_reads_the_sizes_that_are_there_when_it_runs(axis, gpu):
    spec = next(s for s in SPECS if s.grouped == axis and not (s.epilogue or s.gathered))
    problem = problem_of(spec, Layout.plain(4), *((301, 88, 72) if axis == "m" else (88, 72, 301)))
    length = problem.m if axis == "m" else problem.k
    sizes = np.array([1, 130, 65, length - 196], np.int32)
    inputs = integer_inputs(problem, sizes, 0)
    values = [inputs.a, *inputs.b, *inputs.operands, sizes]
    places = [place for (place,) in reference.input_places(problem)]
    buffers = [gpu.upload(trial.guarded([p], [v])) for p, v in zip(places, values, strict=True)]
    (result,) = result_places(problem, spec)
    itemsize = jnp.dtype(result.dtype).itemsize
    output = gpu.allocate(result.end * itemsize)
    parts = [
        buffer.part(trial.GUARD * jnp.dtype(place.dtype).itemsize)
        for buffer, place in zip(buffers, places, strict=True)
    ]
    launch = direct.prepare(gpu, problem, spec, RasterOrder(), [*parts, output])
    for order in itertools.permutations(range(4)):
        now = np.ascontiguousarray(sizes[list(order)])
        buffers[-1].write(trial.guarded([places[-1]], [now]))
        output.fill(trial.POISON)
        launch()
        gpu.synchronize()
        got = result.view(output.download(result.dtype))
        assert_exact(problem, spec, replace(inputs, sizes=now), [got], f"{spec.name}, {now}")
