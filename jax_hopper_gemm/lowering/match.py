"""What an MLIR program says of products: which one a value is the result of, and its launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from jax.extend.mlir.dialects import stablehlo

from ..gemm.groups import GroupedAxis, Groups
from ..gemm.options import Options
from ..gemm.subscripts import Subscripts
from ..launch import ffi_target
from .call import Call
from .route import Request

# Attributes of a launch that say which bare product it holds.
PRODUCT = "jax_hopper_gemm.product"  # subscripts, of the call's operands in their order
SPANS = "jax_hopper_gemm.spans"  # fields of `Groups`; the sizes are the call's third operand
GATHERED = "jax_hopper_gemm.gathered"  # as in `GroupedAxis`; indices are the fourth operand
MAX_SMS = "jax_hopper_gemm.max_sms"  # as in `Product`
INDEXED = "jax_hopper_gemm.indexed"  # as in `GemmProblem`; the index is the call's third operand
MLIR_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


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


@dataclass(frozen=True)
class Launch:
    """The attributes of one FFI call."""

    digest: str  # of the kernel, when the program was lowered
    spec: str  # `GemmSpec.to_json()` of that version
    name: str  # what errors call it
    plan: tuple[int, ...]  # the encoded `LaunchPlan`


def launches_in(module: Any) -> list[Launch]:
    """Returns the launches of a StableHLO module, in its order."""
    found = []
    for call in custom_calls(module, ffi_target.TARGET):
        config = call.attributes["mhlo.backend_config"]
        digest, spec, name = (config[field].value for field in ("digest", "spec", "name"))
        found.append(Launch(digest, spec, name, tuple(config["plan"])))
    return found


def custom_calls(module: Any, target: str) -> Iterator[Any]:
    """Yields the custom calls of `target`."""
    for operation in _operations(module.operation):
        if operation.name == "stablehlo.custom_call":
            if operation.attributes["call_target_name"].value == target:
                yield operation


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _operations(inner.operation)
