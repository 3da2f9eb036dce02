"""Barriers around launches in loops, which keep XLA from taking them into a fusion with slices.

XLA lets a call read its operand in a stack that a loop goes through, and write its result into one,
where the offset follows from the loop's counter: nothing is copied. But of a result that something
else reads, too, as the rest of a layer reads what its gradients need again, another copy of the
call is written, so it runs twice; and a call that reads a number which is also such an offset,
computed from the counter, is an error. Both were so in jaxlib 0.11.2. Behind a barrier XLA finds
neither, and reads operands in place as before.
"""

from __future__ import annotations

from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from .devices import is_whole_program

_BARRIER = "stablehlo.optimization_barrier"


def behind_barrier(value: Any) -> Any:
    """Returns an MLIR value, as a barrier hands it on unless it stands outside of all functions.

    Elsewhere it may be in a loop.
    """
    current: Any = ir.InsertionPoint.current
    if is_whole_program(current.block.owner):
        return value
    return stablehlo.OptimizationBarrierOp([value]).results[0]


def before_barrier(value: Any) -> Any:
    """Returns what the barrier of one MLIR value hands on; any other value itself."""
    operation = value.owner
    is_barrier = getattr(operation, "name", None) == _BARRIER and len(operation.operands) == 1
    return operation.operands[0] if is_barrier else value
