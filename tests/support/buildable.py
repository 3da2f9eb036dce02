"""Kernels with an epilogue that dispatch may choose."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from jax_hopper_gemm.dispatch.candidates import (
    all_model_specs,
    measured_specs,
    problem_types,
    refilled_spec,
    specs_on,
)
from jax_hopper_gemm.dispatch.device import Device
from jax_hopper_gemm.dispatch.legality import device_violations
from jax_hopper_gemm.gemm.dtypes import HALVES
from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph
from jax_hopper_gemm.gemm.problem import VarlenAxis
from jax_hopper_gemm.gemm.problem_type import ProblemType
from jax_hopper_gemm.gemm.spec import GemmSpec


def epilogue_specs(
    device: Device,
    graphs: Iterable[EpilogueGraph],
    dtypes: Iterable[str] = HALVES,
    grouped: VarlenAxis | None = None,
) -> list[GemmSpec]:
    """Returns every kernel that `choose` can return on `device` for these epilogues, once each.

    They are of dense products, or of those that groups cut along `grouped`. An epilogue whose
    results have no matrix is taken to have the operands' dtype for D.

    Args:
      dtypes: of A and B.
    """
    if device_violations(device):
        return []
    measured = measured_specs(device)
    specs: dict[GemmSpec, None] = {}
    for graph, dtype in product(graphs, dtypes):
        d_dtype = graph.matrices[0].dtype if graph.matrices else dtype
        for problem_type in problem_types(dtype, d_dtype, graph, grouped):
            specs |= dict.fromkeys(all_model_specs(problem_type))
            alike = (s for s in measured if ProblemType.of_spec(s) == problem_type.plain)
            refilled = (refilled_spec(spec, problem_type) for spec in alike)
            specs |= dict.fromkeys(spec for spec in refilled if spec)
    return specs_on(device, specs)
