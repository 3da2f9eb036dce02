"""Products that multiply other numbers than their operands hold: these are converted before.

Some round float32 operands, by their algorithm. Derivatives of attention by
`jax.nn.dot_product_attention` are such: they multiply float32 gradients of logits by an array of
bfloat16, as `BF16_BF16_F32`. What computes such an operand then stores 16 bits, and kernels can
read them. Others multiply 16-bit floats by weights of 8 or 4 bits, as quantized models do, which
kernels read as they are stored.
"""

from __future__ import annotations

from typing import Any

from jax import lax
from jax.extend.core import Jaxpr

from ..fusion.jaxprs import in_place_of
from ..gemm.dtypes import DTYPES, HALVES, converts, name_of

RAGGED = "ragged_dot_general"

_ROUNDED = {DTYPES[name].algorithm: name for name in HALVES}


def with_converted_operands(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a jaxpr whose products have operands of the dtype that they multiply."""
    new: list[Any] = []
    for equation in jaxpr.eqns:
        if dtype := _multiplied(equation):
            params = {"dtype": dtype, "primitive": equation.primitive, **equation.params}
            new += in_place_of(equation, _product, **params)
        else:
            new.append(equation)
    return jaxpr.replace(eqns=new)


def is_jaxs(equation: Any) -> bool:
    """Whether an equation is a product of JAX, grouped or not."""
    return equation.primitive is lax.dot_general_p or equation.primitive.name == RAGGED


def _multiplied(equation: Any) -> str | None:
    """Returns the 16-bit dtype to which a product converts operands; None where it need not."""
    if not is_jaxs(equation):
        return None
    lhs, rhs = (name_of(x.aval.dtype) for x in equation.invars[:2])
    if converts(lhs, rhs):
        return lhs
    if converts(rhs, lhs):
        return rhs
    dtype = _ROUNDED.get(getattr(equation.params["precision"], "name", ""))
    if dtype is None or equation.primitive.name == RAGGED:
        return None
    return dtype if "float32" in (lhs, rhs) and {lhs, rhs} <= {"float32", dtype} else None


def _product(lhs: Any, rhs: Any, *sizes: Any, dtype: str, primitive: Any, **params: Any) -> Any:
    lhs, rhs = (lax.convert_element_type(x, dtype) for x in (lhs, rhs))
    return primitive.bind(lhs, rhs, *sizes, **params)
