"""Products whose algorithm rounds their float32 operands: these are rounded before the product.

Derivatives of attention by `jax.nn.dot_product_attention` are such: they multiply float32
gradients of logits by an array of bfloat16, as `BF16_BF16_F32`. What computes such an operand then
stores 16 bits, and kernels can read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend.core import Jaxpr

from ..fusion.jaxprs import spliced, traced_once
from ..gemm.dtypes import DTYPES, HALVES, name_of

_ROUNDED = {DTYPES[name].algorithm: name for name in HALVES}


def with_rounded_operands(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a jaxpr whose products have the operands that their algorithms multiply."""
    if not any(map(_rounds, jaxpr.eqns)):
        return jaxpr
    new: list[Any] = []
    for equation in jaxpr.eqns:
        dtype = _rounds(equation)
        new += [equation] if dtype is None else _rounded(equation, dtype)
    return jaxpr.replace(eqns=new)


def _rounds(equation: Any) -> str | None:
    """Returns the 16-bit dtype to which a product rounds float32 operands; None for another one."""
    if equation.primitive is not lax.dot_general_p:
        return None
    dtype = _ROUNDED.get(getattr(equation.params["precision"], "name", ""))
    if dtype is None:
        return None
    names = {name_of(x.aval.dtype) for x in equation.invars}
    return dtype if "float32" in names <= {"float32", dtype} else None


def _rounded(equation: Any, dtype: str) -> Sequence[Any]:
    avals = [x.aval for x in equation.invars]
    with equation.ctx.manager:  # of its mesh
        return spliced(equation, traced_once(_product, *avals, rounded=dtype, **equation.params))


def _product(lhs: Any, rhs: Any, *, rounded: str, **params: Any) -> Any:
    lhs, rhs = (lax.convert_element_type(x, rounded) for x in (lhs, rhs))
    return lax.dot_general_p.bind(lhs, rhs, **params)
