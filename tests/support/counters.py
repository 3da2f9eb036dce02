"""The dynamic scheduler's counter, in memory that nobody clears."""

from __future__ import annotations

from typing import Any

import numpy as np
from support import cases, grouped, random_operands, trial
from support.covering import ALL, covering_subset
from support.policies import all_specs

from jax_hopper_gemm.gemm.spec import GemmSpec

FLAG_BYTES = 8


def dynamic_specs() -> list[GemmSpec]:
    """Returns a dynamic kernel of each kind of groups, warp schedule and size of cluster."""
    found: dict[tuple, GemmSpec] = {}
    for spec in filter(lambda spec: spec.dynamic and not spec.epilogue, all_specs()):
        found.setdefault(kind_of(spec), spec)
    return list(found.values())


def few_dynamic_specs() -> list[GemmSpec]:
    """Returns some of them that together have all of these choices."""
    whole = dynamic_specs()
    return whole if ALL else covering_subset(whole, lambda spec: enumerate(kind_of(spec)))


def kind_of(spec: GemmSpec) -> tuple:
    return spec.grouped, spec.warp_schedule, (spec.cluster_m, spec.cluster_n)


def check(gpu: Any, spec: GemmSpec, num_sms: int, launches: int = 3) -> None:
    """Checks that a launch frees the flag, and that the next one gives the same bits.

    A replay of a CUDA graph may find the counter as the one before it has left it.
    """
    if spec.grouped:
        case = grouped.edge_cases(spec, num_sms, exact=False)[2]
        problem, order, inputs = case.problem, case.raster_order, case.inputs()
    else:
        problem, order = cases.edge_problems(spec, num_sms)[-1]
        inputs = random_operands.normal_inputs(problem, 0)
    on_gpu = trial.uploaded(gpu, problem, spec, order, inputs, num_sms)
    (counter,) = on_gpu.launch.workspaces
    counter.fill(trial.POISON)
    first: list[np.ndarray] = []
    for _ in range(launches):
        for output in on_gpu.outputs:
            output.fill(trial.POISON)
        on_gpu.launch()
        gpu.synchronize()
        flag = counter.download("uint8")[:FLAG_BYTES]
        assert not flag.any(), "the flag is not free"
        bits = [output.download("uint8") for output in on_gpu.outputs]
        first = first or bits
        for one, other in zip(first, bits, strict=True):
            assert np.array_equal(one, other)
