"""Evaluation of equations on 16-bit floats in float32: nothing is rounded in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend.core import Literal

from ..fusion.jaxprs import CALLS, ClosedJaxpr, traced
from ..fusion.jumps import tests_for_infinity
from ..fusion.memo import interned, memoised
from ..primitives.define import Rules, accumulator_dtype, define_primitive
from ..primitives.segments import segment_mask

WIDE = np.dtype(np.float32)
_FLOAT16 = jnp.finfo(jnp.float16)
_SMALLEST = np.float32(_FLOAT16.tiny)  # normal number
_STEP = np.float32(_FLOAT16.smallest_subnormal)


@dataclass(frozen=True, eq=False)
class Function:
    """Equations of a program as a function, without being traced anew.

    It has what `fusion.memo` reads of a jaxpr.
    """

    invars: tuple[Any, ...]
    outvars: tuple[Any, ...]
    eqns: tuple[Any, ...]
    constvars: tuple[Any, ...] = ()
    consts: tuple[Any, ...] = ()


def widened(
    function: Function,
    products: int,
    groups: Any = None,
    empty: tuple[int, ...] = (),
    as_stored: bool = False,
) -> ClosedJaxpr:
    """Returns a function of products, the first inputs, as one of their float32 accumulators.

    Its other inputs and its results keep their dtypes. What lies between is computed in float32
    where the function has 16-bit floats. Equal functions give one object.

    Args:
      groups: of ragged products, the sizes of which are the first input after them.
      empty: numbers of inputs that have 0 in the rows of no group.
      as_stored: whether a result is rounded before others are computed from it, as where later
        kernels compare it with statistics of its rows, or decide a jump by it.
    """
    if (known := interned(function)) is None:
        return _widened(function, products, groups, empty, as_stored)
    return _widened_once(known, products, groups, empty, as_stored)


def _widened(
    function: Function, products: int, groups: Any, empty: tuple[int, ...], as_stored: bool
) -> ClosedJaxpr:
    def wide(*args: Any) -> list[Any]:
        inputs = [_wide(x) for x in args]
        for number in empty:  # so that the function is known to keep these zeros
            inputs[number] = segment_mask(inputs[number], args[products], groups)
        results = _evaluate(function, inputs, function.outvars if as_stored else ())
        dtypes = [atom.aval.dtype for atom in function.outvars]
        return list(map(lax.convert_element_type, results, dtypes))

    avals: list[Any] = [x.aval for x in function.invars]
    avals[:products] = [x.update(dtype=accumulator_dtype(x.dtype)) for x in avals[:products]]
    return traced(wide, *avals)


_widened_once = memoised(_widened)


@cache
def _is_narrow(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < WIDE.itemsize


def _wide(x: Any) -> Any:
    return lax.convert_element_type(x, WIDE) if _is_narrow(x.dtype) else x


def _rounded(x: Any, dtype: Any) -> Any:
    """Returns a wide number as it is in a dtype."""
    if not _is_narrow(dtype):
        return x
    if dtype == jnp.float16:
        return as_float16_p.bind(x)
    digits = jnp.finfo(dtype)
    return lax.reduce_precision(x, digits.nexp, digits.nmant)


def _as_float16(x: jax.Array) -> jax.Array:
    """Returns float32 numbers as float16 has them, in float32.

    XLA leaves out a conversion to float16 and back, and `lax.reduce_precision` makes zeros of
    subnormal numbers, as gradients often are.
    """
    steps = lax.round(lax.div(x, lax.full_like(x, _STEP)), lax.RoundingMethod.TO_NEAREST_EVEN)
    small = lax.lt(lax.abs(x), lax.full_like(x, _SMALLEST))
    digits = _FLOAT16.nexp, _FLOAT16.nmant
    return lax.select(
        small, lax.mul(steps, lax.full_like(x, _STEP)), lax.reduce_precision(x, *digits)
    )


as_float16_p = define_primitive(
    "as_float16",
    _as_float16,
    rules=Rules(
        linear_in=(0,), transpose=lambda cotangent, _: [as_float16_p.bind(cotangent)],
        batch=lambda _, operands, axes: (as_float16_p.bind(*operands), *axes),
    ),
)  # fmt: skip


def _evaluate(jaxpr: Any, args: Sequence[Any], stored: Sequence[Any] = ()) -> list[Any]:
    """Returns the results of an open jaxpr without constants, all 16-bit floats wide.

    What equations read of variables that are stored is rounded.
    """
    values = dict(zip(jaxpr.invars, args, strict=True))
    rounded = frozenset(x for x in stored if not isinstance(x, Literal))

    def read(atom: Any) -> Any:
        if isinstance(atom, Literal):
            aval: Any = atom.aval
            return _wide(np.asarray(atom.val, aval.dtype))
        return _rounded(values[atom], atom.aval.dtype) if atom in rounded else values[atom]

    for equation in jaxpr.eqns:
        results = _results(equation, [read(x) for x in equation.invars])
        values.update(zip(equation.outvars, results, strict=True))
    rounded = frozenset[Any]()
    return [read(x) for x in jaxpr.outvars]


def _results(equation: Any, inputs: list[Any]) -> Sequence[Any]:
    name, params = equation.primitive.name, equation.params
    if name == "custom_jvp_call" and (function := _with_rule(params)):
        return function(*inputs)
    if name in CALLS and name != "custom_jvp_call":
        return _evaluate(params[CALLS[name]].jaxpr, inputs)
    dtypes = [x.aval.dtype for x in equation.invars]
    if tests_for_infinity(equation):  # which a number of 16 bits is earlier
        inputs = list(map(_rounded, inputs, dtypes))
    with equation.ctx.manager:
        if name == "convert_element_type":
            dtype = params["new_dtype"]
            if np.dtype(dtype).itemsize == 1:  # it quantizes
                return [_wide(lax.convert_element_type(inputs[0], dtype))]
            return [lax.convert_element_type(inputs[0], WIDE if _is_narrow(dtype) else dtype)]
        if name == "custom_jvp_call":  # its rule is for its own dtypes
            inputs = list(map(lax.convert_element_type, inputs, dtypes))
        results = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(params))
    results = results if equation.primitive.multiple_results else [results]
    return [_wide(x) for x in results]


def _with_rule(params: dict[str, Any]) -> Callable[..., Any] | None:
    """Returns the function of a `custom_jvp_call` and its rule in float32, if it can be had."""
    call, rule = params["call_jaxpr"], params["jvp_jaxpr_fun"]
    if params["num_consts"] or params["symbolic_zeros"]:
        return None
    program, consts, zeros = rule.call_wrapped(*[False] * len(call.in_avals))
    if consts or any(zeros):
        return None
    function = jax.custom_jvp(lambda *wide: _evaluate(call.jaxpr, wide))

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        results = _evaluate(program, [*primals, *tangents])
        return results[: len(results) // 2], results[len(results) // 2 :]

    function.defjvp(derivative)
    return function
