"""Checks of collective GEMMs."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from .arguments import activation_problems, implementation_problems
from .wording import describe, fail


def check_all_gather_matmul(
    x: Any, w: Any, axis_name: Any, bias: Any, activation: Any, implementation: Any
) -> None:
    op = "all_gather_matmul"
    _devices(op, axis_name)
    problems = _operand_problems(x, w, "(..., m, K)") + implementation_problems(implementation)
    if bias is not None and w.ndim == 2 and np.shape(bias) not in ((), (w.shape[1],)):
        problems.append(f"bias is {describe(bias)}, expected ({w.shape[1]},), one value a column")
    named, mistyped = activation_problems(activation)
    fail(op, problems + named, mistyped)


def check_matmul_reduce_scatter(x: Any, w: Any, axis_name: Any, implementation: Any) -> None:
    op = "matmul_reduce_scatter"
    devices = _devices(op, axis_name)
    problems = _operand_problems(x, w, "(..., M, K)") + implementation_problems(implementation)
    if x.ndim >= 2 and x.shape[-2] % devices:
        problems.append(
            f"x is {describe(x)}, whose {x.shape[-2]} rows cannot be divided among the {devices} "
            f"devices along {axis_name!r}: pad them to a multiple of {devices}"
        )
    fail(op, problems)


def _devices(op: str, axis_name: Any) -> int:
    try:
        return lax.axis_size(axis_name)
    except (NameError, TypeError) as error:
        raise ValueError(
            f"{op}: axis_name is {axis_name!r}, expected an axis of the mesh over which the "
            "program is mapped: call it inside jax.shard_map over that axis"
        ) from error


def _operand_problems(x: Any, w: Any, rows: str) -> list[str]:
    problems = []
    if x.ndim < 2:
        problems.append(f"x is {describe(x)}, expected {rows}")
    if w.ndim != 2:
        problems.append(f"w is {describe(w)}, expected (K, N)")
    if not problems and x.shape[-1] != w.shape[0]:
        hint = ". Is w stored (N, K)? Pass w.T" if x.shape[-1] == w.shape[1] else ""
        problems.append(f"K differs: x is {describe(x)}, w is {describe(w)}{hint}")
    return problems
