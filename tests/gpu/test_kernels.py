"""Every dense kernel that dispatch can choose, and pair of policies, on memory with guards.

Families of kernels go through the same tests: 16 bits, each standard epilogue, 8 bits, float32.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from support import bounds, cases, graphs, outcome, random_operands, reference, trial
from support.policies import (
    chosen_epilogue_specs,
    chosen_specs,
    cluster_k_specs,
    covering_specs,
    eight_bit_specs,
    epilogue_covering_specs,
    large_cluster_specs,
    nested_specs,
    parts_specs,
    short_box_specs,
    stacked_specs,
    stored_parts_specs,
    tf32_specs,
)

from jax_hopper_gemm.dispatch import problem_violations
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec

ALONE = [s for s in dict.fromkeys((*covering_specs(), *chosen_specs())) if not s.grouped]
ON_SEVERAL = chosen_specs(comm_overlap=True)
SPECS = list(dict.fromkeys((*ALONE, *(s for s in ON_SEVERAL if not s.grouped))))
FEW_SMS = 16  # so that a persistent grid wraps around on problems that are quickly checked
RANDOM_PROBLEMS = 320


@dataclass(frozen=True)
class Family:
    """Kernels of one kind.

    Attributes:
      specs: the kernels.
      on_full_gpu: those that also run on all SMs.
      random: the number of random problems.
    """

    specs: Sequence[GemmSpec]
    on_full_gpu: Sequence[GemmSpec]
    random: int = 0

    @staticmethod
    def every_third(specs: Sequence[GemmSpec], random: int) -> Family:
        return Family(specs, specs[::3], random)


WITH_EPILOGUES = list(dict.fromkeys((*epilogue_covering_specs(), *chosen_epilogue_specs())))
FAMILIES = {
    "16": Family(SPECS, covering_specs()),
    "epilogue": Family(WITH_EPILOGUES, WITH_EPILOGUES[::2], 200),
    "clusters": Family(large_cluster_specs(), large_cluster_specs(), 60),
    "cluster_k": Family(cluster_k_specs(), cluster_k_specs(), 60),
    "8": Family.every_third([s for s in eight_bit_specs() if not s.grouped], 60),
    "float32": Family.every_third(
        [s for s in (*parts_specs(), *tf32_specs()) if not (s.grouped or s.split_k)], 100
    ),
    "parts": Family.every_third([*stored_parts_specs()], 60),
}


def of_families(field: str, exact: bool = False) -> pytest.MarkDecorator:
    """Parametrises a test over kernels of all families, whose names begin the ids."""
    return pytest.mark.parametrize(
        "spec",
        [
            pytest.param(spec, id=f"{name}-{spec.name}")
            for name, family in FAMILIES.items()
            for spec in getattr(family, field)
            if not exact or graphs.is_exact(spec.graph)
        ],
    )


@of_families("specs", exact=True)
def test_kernel_is_exact_on_integers_and_writes_only_its_results(spec, gpu, checked):
    for seed, (problem, raster_order) in enumerate(cases.edge_problems(spec, FEW_SMS)):
        outcome.check(gpu, spec, problem, raster_order, seed, FEW_SMS, exactly=True)
    checked(spec)


@of_families("specs")
def test_kernel_is_within_the_bound_and_repeats_its_bits(spec, gpu, checked):
    problem, raster_order = cases.edge_problems(spec, FEW_SMS)[1]
    outcome.check(gpu, spec, problem, raster_order, 0, FEW_SMS, 20, exactly=False)
    checked(spec)


@pytest.mark.parametrize("spec", WITH_EPILOGUES, ids=lambda spec: spec.name)
def test_epilogue_is_within_the_bound_at_all_edges(spec, gpu):
    for seed, (problem, raster_order) in enumerate(cases.edge_problems(spec, FEW_SMS)):
        outcome.check(gpu, spec, problem, raster_order, seed, FEW_SMS, exactly=False)


@of_families("on_full_gpu")
def test_kernel_is_right_on_a_full_gpu(spec, gpu):
    for problem, raster_order in cases.edge_problems(spec, gpu.device.num_sms)[2:]:
        outcome.check(gpu, spec, problem, raster_order, 0)


@pytest.mark.parametrize(
    ("name", "seed"), [(name, i) for name, family in FAMILIES.items() for i in range(family.random)]
)
def test_random_problem_is_right(name, seed, gpu):
    rng = random.Random(seed)
    spec = rng.choice(FAMILIES[name].specs)
    problem, raster_order = cases.random_problem(rng, spec, max_extent=1500)
    num_sms = rng.choice((FEW_SMS, gpu.device.num_sms))
    outcome.check(gpu, spec, problem, raster_order, seed, num_sms, exactly=False)


@pytest.mark.parametrize("spec", stacked_specs(), ids=lambda spec: spec.name)
def test_kernel_reads_the_matrix_of_a_stack_that_the_gpu_names(spec, gpu, checked):
    for problem, raster_order in cases.stacked_problems(spec, FEW_SMS):
        assert problem_violations(problem) == []
        inputs = random_operands.integer_inputs(problem, 0)
        for index in (-5, 0, 1, problem.stack - 1, problem.stack + 7):
            given = replace(inputs, index=np.array([index], np.int32))
            (result,) = trial.run_all(gpu, problem, spec, raster_order, given, num_sms=FEW_SMS)
            nearest = np.clip([index], 0, problem.stack - 1)
            a = inputs.a[nearest] if spec.indexed == "a" else inputs.a
            b = inputs.b[0][nearest] if spec.indexed == "b" else inputs.b[0]
            expected = reference.integer_product(a, b, result.dtype)
            np.testing.assert_array_equal(result, expected, f"matrix {index} of {problem}")
    checked(spec)


def fill_shared_memory_with_nans(gpu, spec):
    """Runs the kernel on whole tiles of NaNs, so that no row of a stage holds numbers."""
    n = spec.d_tile_n * (1 if spec.graph.needs_whole_rows else 3)
    problem = cases.padded(spec, spec.tile_m * gpu.device.num_sms, n, spec.tile_k * spec.num_stages)
    inputs = random_operands.normal_inputs(problem, 0)
    nans = replace(
        inputs, a=np.full_like(inputs.a, np.nan), b=tuple(np.full_like(b, np.nan) for b in inputs.b)
    )
    trial.run_all(gpu, problem, spec, RasterOrder(), nans)


@pytest.mark.parametrize("spec", short_box_specs(), ids=lambda spec: spec.name)
def test_kernel_with_short_boxes_uses_no_row_that_it_does_not_load(spec, gpu, checked):
    fill_shared_memory_with_nans(gpu, spec)
    for seed, (problem, raster_order) in enumerate(
        (*cases.short_problems(spec), *cases.edge_problems(spec, FEW_SMS))
    ):
        outcome.check(gpu, spec, problem, raster_order, seed, FEW_SMS, repeats=3)
    checked(spec)


@pytest.mark.parametrize("spec", nested_specs(), ids=lambda spec: spec.name)
def test_kernel_finds_the_matrices_of_a_nested_batch(spec, gpu, checked):
    for seed, (problem, raster_order) in enumerate(cases.nested_problems(spec)):
        outcome.check(gpu, spec, problem, raster_order, seed, FEW_SMS, repeats=3)
    checked(spec)


@pytest.mark.parametrize("seed", range(RANDOM_PROBLEMS))
def test_large_random_problem_is_within_the_bound_in_some_rows(seed, gpu):
    rng = random.Random(seed)
    spec = rng.choice(ALONE)
    problem, raster_order = cases.random_problem(rng, spec)
    assert problem_violations(problem) == []
    a, b = random_operands.normals(problem, seed)
    result = trial.run(gpu, problem, spec, raster_order, a, b)
    assert np.isfinite(result.astype(np.float32)).all(), "not every element was written"
    rows = cases.rows_to_check(problem)
    exact, magnitude = (f(a[:, rows], b) for f in (reference.product, reference.magnitude))
    what = f"{spec.name} on {problem} along {raster_order}"
    bounds.assert_within_bound(
        result[:, rows], exact, magnitude, problem.k, what, operands=spec.a_dtype
    )
