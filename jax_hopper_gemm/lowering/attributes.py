"""The attributes of a launch: what the FFI library is told of a kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..fusion.memo import memoised
from ..gemm.kernel_params import KernelSpec
from ..gemm.problem import GemmProblem
from ..gemm.spec import GemmSpec
from ..launch.plan import LaunchPlan


def product_attributes(problem: GemmProblem, spec: GemmSpec, plan: LaunchPlan) -> dict[str, Any]:
    extents = f"M={problem.m} N={problem.n} K={problem.k} L={problem.l}"
    return launch_attributes(spec, plan, extents)


@memoised
def launch_attributes(spec: KernelSpec, plan: LaunchPlan, extents: str) -> dict[str, Any]:
    """Returns the attributes of an FFI call; errors name the kernel and the extents."""
    from ..cubin import digest_of_json  # brings cuda-python with it

    spec_json = spec.to_json()
    return {
        "digest": digest_of_json(spec_json),
        "spec": spec_json,
        "name": f"{spec.name} {extents}",
        "plan": np.array(plan.encode(), np.int64),
    }
