"""Kernels that dispatch may choose: to be built ahead of programs, and to be tried by the tuner."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

from ..gemm.dtypes import OPERANDS, RESULTS
from ..gemm.epilogue_graph import EpilogueGraph
from ..gemm.legality import GATHERABLE
from ..gemm.problem import GemmProblem, Major, VarlenAxis
from ..gemm.problem_type import ProblemType
from ..gemm.spec import GemmSpec, RasterOrder
from .candidates import dynamic_spec, model_specs, refilled_spec, tuner_specs
from .configs import RASTER_ORDERS
from .device import Device
from .legality import device_violations, pairing_violations, problem_violations
from .user_tables import tables_of

AXES: tuple[VarlenAxis | None, ...] = (None, "m", "k")
# How operands may be stored, for each grouped axis.
A_MAJORS: dict[VarlenAxis | None, tuple[Major, ...]] = {
    None: ("k", "m"), "m": ("k",), "k": ("m",),
}  # fmt: skip
B_MAJORS: dict[VarlenAxis | None, tuple[Major, ...]] = {
    None: ("n", "k"), "m": ("n", "k"), "k": ("n",),
}  # fmt: skip


def legal_specs(problem: GemmProblem, device: Device) -> list[tuple[GemmSpec, RasterOrder]]:
    """Returns every kernel and order of tiles that the tuner may try on `problem`."""
    if device_violations(device) or problem_violations(problem):
        return []
    specs = tuner_specs(ProblemType.of(problem))
    legal = (spec for spec in specs if not pairing_violations(problem, spec))
    return list(product(legal, RASTER_ORDERS))


def table_specs(device: Device, dtypes: Iterable[tuple[str, str]] | None = None) -> list[GemmSpec]:
    """Returns every kernel without an epilogue that `choose` can return on `device`, once each.

    Dense ones first, then grouped ones, then what tables hold besides.

    Args:
      dtypes: pairs, of A's and B's dtype and of D's, to restrict to; None means all of them.
    """
    if device_violations(device):
        return []
    pairs = list(product(OPERANDS, RESULTS)) if dtypes is None else list(dtypes)
    specs: dict[GemmSpec, None] = {}
    for axis, (dtype, d_dtype) in product(AXES, pairs):
        for problem_type in problem_types(dtype, d_dtype, None, axis):
            specs |= dict.fromkeys(model_specs(problem_type))
    for measured in measured_specs(device):
        if (measured.a_dtype, measured.d_dtype) in pairs:
            plain = ProblemType.of_spec(measured)
            gathering = (replace(plain, gathered=g) for g in GATHERABLE[plain.grouped])
            refilled = (refilled_spec(measured, problem_type) for problem_type in gathering)
            specs |= dict.fromkeys((measured, *(spec for spec in refilled if spec)))
    return specs_on(device, specs)


def problem_types(
    dtype: str, d_dtype: str, graph: EpilogueGraph | None, axis: VarlenAxis | None
) -> list[ProblemType]:
    """Returns the types of legal problems with these dtypes, epilogue and grouped axis."""
    majors = product(A_MAJORS[axis], B_MAJORS[axis])
    gathered = (None, *GATHERABLE[axis])
    return [
        ProblemType(dtype, dtype, d_dtype, a_major, b_major, graph, axis, operand)
        for (a_major, b_major), operand in product(majors, gathered)
    ]


def measured_specs(device: Device) -> list[GemmSpec]:
    """Returns the kernels of the tables for a kind of GPU."""
    tables = tables_of(replace(device, comm_overlap=False))
    return [entry.spec for table in tables for entry in table.entries.values()]


def specs_on(device: Device, specs: Iterable[GemmSpec]) -> list[GemmSpec]:
    """Returns the kernels that `choose` returns on `device` where these are for a GPU alone."""
    if not device.comm_overlap:
        return list(specs)
    return list(dict.fromkeys(dynamic_spec(spec) or spec for spec in specs))
