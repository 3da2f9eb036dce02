"""MLIR values: what made them, and the attributes by which operations say what they mean."""

from __future__ import annotations

from typing import Any

from jax.extend.mlir import ir
from jax.interpreters import mlir

from .origins import Step

ROWS = "jax_hopper_gemm.rows"  # of rows that indices pick, zeros where there is none

PRODUCT = "jax_hopper_gemm.product"  # subscripts, of the call's operands in their order
SPANS = "jax_hopper_gemm.spans"  # fields of `Groups`; the sizes are the call's third operand
GATHERED = "jax_hopper_gemm.gathered"  # as in `GroupedAxis`; indices are the fourth operand
MAX_SMS = "jax_hopper_gemm.max_sms"  # as in `Product`
INDEXED = "jax_hopper_gemm.indexed"  # as in `GemmProblem`; the index is the call's third operand
MLIR_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


class MlirValues:
    """The `World` of a program that is being lowered."""

    def step(self, value: Any) -> Step | None:
        operation = value.owner
        if not hasattr(operation, "attributes"):  # a block, of which the value is an argument
            return None
        if ROWS in operation.attributes:
            return _picking(operation)
        if operation.name == "stablehlo.transpose":
            permutation = tuple(operation.attributes["permutation"])
            return Step("transpose", operation.operands[0], permutation)
        if operation.name == "stablehlo.reshape":
            return Step("reshape", operation.operands[0])
        if operation.name == "stablehlo.dynamic_slice":
            return _slicing(operation)
        return None

    def shape(self, value: Any) -> tuple[int, ...]:
        return tuple(value.type.shape)


def _picking(operation: Any) -> Step | None:
    """What fills in zeros is a choice between the picked rows and zeros."""
    if operation.name == "stablehlo.select":
        operation = operation.operands[1].owner
    if getattr(operation, "name", None) != "stablehlo.gather":
        return None
    array, indices = operation.operands
    return Step("rows", array, indices=indices)


def _slicing(operation: Any) -> Step | None:
    stack, index, *_ = operation.operands  # whole axes begin at 0, whatever the other indices are
    is_int32 = index.type.element_type == ir.IntegerType.get_signless(32)
    if not is_int32 or not stack.type.has_static_shape:
        return None
    return Step("slice", stack, indices=index)


def mark_rows(value: Any) -> None:
    """Says of an MLIR value that it is rows of an array, as `lax.gather` picks and fills them."""
    value.owner.attributes[ROWS] = mlir.ir_attribute(True)
