"""Matching: which product an MLIR value is the result of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from jax.extend.mlir.dialects import stablehlo

from ..gemm.groups import GroupedAxis, Groups
from ..gemm.product import Options
from ..gemm.subscripts import Subscripts
from .call import Call
from .mlir_values import (
    GATHERED,
    INDEXED,
    MAX_SMS,
    MLIR_DTYPES,
    PRODUCT,
    SPANS,
)
from .route import Request


def product_at(value: Any) -> Call | None:
    """Returns the bare product that an MLIR value is the result of, if it is one.

    Either is a launch of ours or a product of XLA's. Nothing else may use the value yet: the
    product would be computed for that as well.
    """
    operation = value.owner
    if not hasattr(operation, "results"):  # a block, of which the value is an argument
        return None
    if value != operation.results[0] or list(value.uses):
        return None
    if PRODUCT in operation.attributes:
        subscripts = Subscripts.parse(operation.attributes[PRODUCT].value)
    elif operation.name == "stablehlo.dot_general":
        subscripts = _subscripts(operation)
    else:
        return None
    lhs, rhs, *others = list(operation.operands)
    indexed = operation.attributes[INDEXED].value if INDEXED in operation.attributes else None
    if (request := request_between(subscripts, lhs, rhs, value, indexed)) is None:
        return None
    limit = operation.attributes[MAX_SMS].value if MAX_SMS in operation.attributes else None
    request = replace(request, options=Options(max_sms=limit))
    if SPANS in operation.attributes:
        rule = Groups(*map(int, operation.attributes[SPANS].value.split(",")))
        sizes, *rows = others
        groups = GroupedAxis.of(subscripts, rule, sizes.type.shape[0])
        call = Call(replace(request, groups=groups), (lhs, rhs), sizes=sizes)
        if GATHERED in operation.attributes:
            call = call.gathered_by(operation.attributes[GATHERED].value, rows[0])
        return call
    return Call(request, (lhs, rhs), index=others[0] if indexed else None)


def request_between(
    subscripts: Subscripts,
    lhs: Any,
    rhs: Any,
    out: Any,
    indexed: Literal["a", "b"] | None = None,
) -> Request | None:
    """Returns the bare product of two MLIR values; None for dtypes that no kernel stores.

    Args:
      indexed: the operand that is one array of the stack given here, as in `Request`.
    """
    if any(str(x.type.element_type) not in MLIR_DTYPES for x in (lhs, rhs, out)):
        return None
    (lhs_shape, lhs_dtype), (rhs_shape, rhs_dtype), (_, out_dtype) = map(_typed, (lhs, rhs, out))
    request = Request(subscripts, lhs_shape, lhs_dtype, rhs_shape, rhs_dtype, out_dtype)
    if indexed is None:
        return request
    field = "lhs_shape" if indexed == "a" else "rhs_shape"
    stack, *shape = getattr(request, field)
    named: dict[str, Any] = {field: tuple(shape)}
    return replace(request, indexed=indexed, stack=stack, **named)


def is_launch(value: Any) -> bool:
    """Whether an MLIR value that `product_at` knows is the result of a kernel of ours."""
    return PRODUCT in value.owner.attributes


def _subscripts(operation: Any) -> Subscripts:
    """Returns the subscripts of a stablehlo.dot_general."""
    numbers = stablehlo.DotDimensionNumbers(operation.attributes["dot_dimension_numbers"])
    contracting = numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions
    batch = numbers.lhs_batching_dimensions, numbers.rhs_batching_dimensions
    ranks = (len(operand.type.shape) for operand in operation.operands)
    return Subscripts.of_dot_general((contracting, batch), *ranks)


def _typed(value: Any) -> tuple[tuple[int, ...], str]:
    return tuple(value.type.shape), MLIR_DTYPES[str(value.type.element_type)]
