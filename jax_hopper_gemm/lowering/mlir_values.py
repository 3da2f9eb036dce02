"""What lies beneath an MLIR value: arrays that a kernel can read where XLA would make a copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.extend.mlir import ir
from jax.interpreters import mlir

ROWS = "jax_hopper_gemm.rows"  # of rows that indices pick, zeros where there is none


def look_through_transpose(
    value: Any, labels: str, shape: tuple[int, ...]
) -> tuple[Any, str, tuple[int, ...]]:
    """Returns the array that `value` is a transpose of, or `value`, with its letters and shape."""
    operation = value.owner
    if getattr(operation, "name", None) != "stablehlo.transpose":  # a block has no name
        return value, labels, shape
    axis_of = {source: i for i, source in enumerate(operation.attributes["permutation"])}
    order = [axis_of[source] for source in range(len(labels))]
    return operation.operands[0], "".join(labels[i] for i in order), tuple(shape[i] for i in order)


@dataclass(frozen=True)
class Indexed:
    """One array of a stack.

    Attributes:
      stack: MLIR value (S, ...).
      index: MLIR value, () int32; XLA takes the nearest that there is for one outside.
    """

    stack: Any
    index: Any


def look_through_index(value: Any) -> Indexed | None:
    """Returns the stack that an MLIR value is one array of, if it is.

    As `stack[i]` takes it.
    """
    if getattr(value.owner, "name", None) != "stablehlo.reshape":
        return None
    part = value.owner.operands[0].owner
    if getattr(part, "name", None) != "stablehlo.dynamic_slice":
        return None
    stack, index, *_ = part.operands  # whole axes begin at 0, whatever the other indices are
    if not stack.type.has_static_shape:
        return None
    shape, one = list(stack.type.shape), list(part.results[0].type.shape)
    if one != [1, *shape[1:]] or list(value.type.shape) != shape[1:]:
        return None
    is_int32 = index.type.element_type == ir.IntegerType.get_signless(32)
    return Indexed(stack, index) if is_int32 else None


def mark_rows(value: Any) -> None:
    """Says of an MLIR value that it is rows of an array, as `lax.gather` picks and fills them."""
    value.owner.attributes[ROWS] = mlir.ir_attribute(True)


def look_through_gather(value: Any) -> tuple[Any, Any] | None:
    """Returns the array and the indices (T, 1) that marked rows come from; None for other values.

    What fills in zeros is a choice between the picked rows and zeros. `jax.vmap` may have given
    them further axes, and taken these away again.
    """
    operation = _look_through_reshapes(value).owner
    if not hasattr(operation, "attributes") or ROWS not in operation.attributes:
        return None
    if operation.name == "stablehlo.select":
        operation = operation.operands[1].owner
    if getattr(operation, "name", None) != "stablehlo.gather":
        return None
    array, indices = operation.operands
    return array, indices


def _look_through_reshapes(value: Any) -> Any:
    """Returns the value that reshapes lead back to, if it has the same shape; else `value`."""
    beneath = value
    while getattr(beneath.owner, "name", None) == "stablehlo.reshape":
        beneath = beneath.owner.operands[0]
        if beneath.type == value.type:
            return beneath
    return value


PRODUCT = "jax_hopper_gemm.product"  # subscripts, of the call's operands in their order

SPANS = "jax_hopper_gemm.spans"  # fields of `Groups`; the sizes are the call's third operand

GATHERED = "jax_hopper_gemm.gathered"  # as in `GroupedAxis`; indices are the fourth operand


MAX_SMS = "jax_hopper_gemm.max_sms"  # as in `Product`

INDEXED = "jax_hopper_gemm.indexed"  # as in `GemmProblem`; the index is the call's third operand

MLIR_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
