"""How the products of a request are to be summed, as its dtypes and its precision ask."""

from __future__ import annotations

from typing import Any

from jax.lax import DotAlgorithmPreset, Precision

from ..gemm.bf16_parts import PRESETS
from ..gemm.dtypes import DTYPES, OPERANDS
from .request import Request


def sums_of(request: Request) -> dict[str, Any]:
    """Returns the problem's fields that say how products are summed; none: as tensor cores do."""
    if _is_simt(request):
        return {"simt": True}
    if terms := _bf16_terms(request):
        return {"bf16_terms": terms}
    return {"promoted": True} if _is_promoted(request) else {}


def precision_violation(request: Request) -> str | None:
    """Returns why no kernel sums as the precision asks."""
    precision = request.options.precision
    if precision is None or isinstance(precision, tuple | Precision):
        return None
    # Products of two operands are exact in float32, where the kernels add them: no `Precision`
    # asks for more, and the dtype's algorithms ask for just that.
    if precision == DotAlgorithmPreset.DEFAULT or reads_any_major(request):
        return None
    if request.lhs_dtype in OPERANDS:
        row = DTYPES[request.lhs_dtype]
        if getattr(precision, "name", None) in (row.algorithm, row.promoted_algorithm):
            return None
    return f"precision is {precision}; kernels for {request.lhs_dtype} accumulate in float32"


def _bf16_terms(request: Request) -> int:
    """Returns of how many products of bfloat16 parts those of float32 numbers are to be sums."""
    if (request.lhs_dtype, request.rhs_dtype) != ("float32", "float32"):
        return 0
    name = getattr(request.options.precision, "name", None)
    return next((terms for terms, preset in PRESETS.items() if preset == name), 0)


def reads_any_major(request: Request) -> bool:
    """Whether kernels for the precision pass float32 through registers, from any layout."""
    return _bf16_terms(request) > 0 or _is_simt(request)


def _is_simt(request: Request) -> bool:
    """Whether the products of float32 numbers are to be summed in IEEE float32."""
    if (request.lhs_dtype, request.rhs_dtype) != ("float32", "float32"):
        return False
    precision = request.options.precision
    precisions = precision if isinstance(precision, tuple) else (precision,)
    return not {Precision.HIGHEST, DotAlgorithmPreset.F32_F32_F32}.isdisjoint(precisions)


def _is_promoted(request: Request) -> bool:
    """Whether a product of 8-bit floats keeps all digits of float32 in its sums.

    As XLA has it: any `Precision` but the default asks for that, and an algorithm by its name.
    """
    row, precision = DTYPES.get(request.lhs_dtype), request.options.precision
    if row is None or not row.promoted_algorithm or precision is None:
        return False
    if isinstance(precision, DotAlgorithmPreset):
        return precision.name == row.promoted_algorithm
    precisions = precision if isinstance(precision, tuple) else (precision,)
    return any(x not in (None, Precision.DEFAULT) for x in precisions)
