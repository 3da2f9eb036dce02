"""Barriers around launches in loops, which keep XLA from taking them into a fusion with slices.

XLA lets a call read its operand in a stack that a loop goes through, and write its result into one,
where the offset follows from the loop's counter: nothing is copied. But of a result that something
else reads, too, as the rest of a layer reads what its gradients need again, another copy of the
call is written, so it runs twice; and a call that reads the counter itself is an error. Both were
so in jaxlib 0.11.2. Behind a barrier XLA finds neither, and reads operands in place as before.
"""

from __future__ import annotations

from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from .devices import lowers_shard

_BARRIER = "stablehlo.optimization_barrier"


def behind_barrier(value: Any) -> Any:
    """Returns an MLIR value; where that may be in a loop, as a barrier hands it on."""
    return stablehlo.OptimizationBarrierOp([value]).results[0] if _may_be_in_loop() else value


def before_barrier(value: Any) -> Any:
    """Returns what the barrier of one MLIR value hands on; any other value itself."""
    operation = value.owner
    is_barrier = getattr(operation, "name", None) == _BARRIER and len(operation.operands) == 1
    return operation.operands[0] if is_barrier else value


def _may_be_in_loop() -> bool:
    """Whether what is lowered now may run more than once: it is not outside of all functions.

    A shard of a program for several devices is in a module of its own until XLA partitions that.
    """
    current: Any = ir.InsertionPoint.current
    operation = current.block.owner.operation
    if operation.name != "func.func" or lowers_shard():
        return True
    return operation.attributes["sym_name"].value != "main"
