"""Errors of an epilogue's operations, in each form that `Arithmetic` gives them.

They bound what `kernels/epilogue/op_codegen.py` computes; tests hold the code to them.
Errors of instructions are those of the PTX ISA (ex2.approx and lg2.approx 2**-22, rcp.approx
1 ulp, tanh.approx 2**-11, div.full 2 ulp, sqrt.approx 2**-23, rsqrt.approx 2**-22.9), those of
libdevice's functions the ulps of the CUDA Programming Guide, section "Mathematical Functions".
"""

from __future__ import annotations

from dataclasses import dataclass

from jax_hopper_gemm.gemm.epilogue_arithmetic import NORMAL, Form
from jax_hopper_gemm.gemm.epilogue_graph import Node

ULP = 2.0**-23  # of float32, relative to the number, at most
ROUNDING = 2.0**-24  # relative error of an operation that rounds to nearest
SUBNORMAL = 2.0**-149  # the smallest number of float32
EXPONENT_LIMIT = 104.0  # beyond it exp is 0 or infinite in float32


@dataclass(frozen=True)
class Error:
    """How far an operation's result may be from that of an exact one on the same arguments.

    At most (relative + per_argument * min(|argument|, 104)) * |result| + absolute.
    """

    relative: float = 0.0
    absolute: float = 0.0
    per_argument: float = 0.0


_EXACT, _ROUNDED = Error(), Error(ROUNDING, SUBNORMAL)
# x * log2(e) errs by its own rounding and by that of the constant, 1.5 * 2**-24 of it in all.
_ERRORS: dict[str, Error] = {
    **dict.fromkeys(("add", "sub", "mul", "square"), _ROUNDED),
    "div": Error(2 * ULP, 2 * SUBNORMAL),
    "sqrt": Error(ULP, SUBNORMAL),
    "rsqrt": Error(2 * ULP),
    "exp": Error(2 * ULP, SUBNORMAL),
    "exp2": Error(2 * ULP, SUBNORMAL),
    "expm1": Error(ULP, SUBNORMAL),
    "log": Error(ULP),
    "log1p": Error(ULP, SUBNORMAL),
    "tanh": Error(2 * ULP, SUBNORMAL),
    "logistic": Error(5 * ULP, NORMAL),
    "erf": Error(2 * ULP, SUBNORMAL),
    "erfc": Error(4 * ULP, NORMAL),
    "sin": Error(3 * ULP, SUBNORMAL),
    "cos": Error(3 * ULP, SUBNORMAL),
    "pow": Error(8 * ULP, SUBNORMAL),
}
_FAST_ERRORS: dict[str, Error] = {
    "exp": Error(2.0**-21, NORMAL, 1.5 * ROUNDING),
    "exp2": Error(2.0**-21, NORMAL),
    "expm1": Error(2.0**-18, SUBNORMAL, 1.5 * ROUNDING),
    "log1p": Error(2.0**-18, SUBNORMAL),
    "tanh": Error(2.0**-18, SUBNORMAL),
    "logistic": Error(2.0**-20, NORMAL, 1.5 * ROUNDING),
    # The exponent is -x * x, up to 88 at x = 9.4: an error for each unit of x, times 9.4.
    "erfc": Error(2.0**-17, NORMAL, 9.4 * 1.5 * ROUNDING),
}
_APPROX_ERRORS: dict[str, Error] = {"tanh": Error(2.0**-10.9, SUBNORMAL)}


def error_of(node: Node, form: Form) -> Error:
    """Returns the error of a node's operation in a form; none where it is exact."""
    if node.op == "integer_pow":
        return Error(ROUNDING * multiplications(abs(node.params[0])) * 1.01, SUBNORMAL)
    tables = {"accurate": _ERRORS, "fast": _FAST_ERRORS, "approx": _APPROX_ERRORS}
    return tables[form].get(node.op) or _ERRORS.get(node.op, _EXACT)


def multiplications(exponent: int) -> int:
    """Returns how many roundings are in x ** exponent by repeated squaring, factors' included."""
    return max(0, exponent - 1)  # each factor of x**n carries the error of one product but one
