"""Wording of messages: names of arrays, and one error for all problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ...gemm.dtypes import short_name
from ...lowering.request import array_text

P = ParamSpec("P")
R = TypeVar("R")

PARTS = ("matmul", "dot_general", "ragged_dot", "gated_linear_unit", "route_tokens", "grouped_mlp")


def describe(x: Any) -> str:
    """Returns an array as JAX prints it: "bf16[128,4096]"; a quantized one by its values' dtype."""
    return array_text(np.shape(x), jax.dtypes.result_type(getattr(x, "values", x)).name)


def each_text(arrays: Sequence[Any]) -> str:
    return " and ".join(map(describe, arrays))


def counted(things: Sequence[Any], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def dtypes_text(dtypes: Sequence[Any]) -> str:
    """Returns dtypes as JAX prints them: "(bf16, f32)"."""
    names = (short_name(jnp.dtype(x).name) if x is not None else "None" for x in dtypes)
    return f"({', '.join(names)})"


def differ(x: Any, y: Any) -> bool:
    """Whether two extents are known and unequal; symbolic ones are JAX's to compare."""
    return isinstance(x, int) and isinstance(y, int) and x != y


def less(x: Any, y: Any) -> bool:
    """Whether two extents are known and the first is the smaller one."""
    return isinstance(x, int) and isinstance(y, int) and x < y


class ShapeError(ValueError, TypeError):
    """Shapes or axes of operands do not fit.

    JAX raises TypeError for most of these, numpy ValueError: code that expects either works.
    """


def fail(
    op: str, problems: Sequence[str], mistyped: Sequence[str] = (), misshapen: Sequence[str] = ()
) -> NoReturn | None:
    """Raises one error for all problems.

    It is a TypeError if a type is among them, else ShapeError if the operands' shapes or axes are,
    else ValueError.
    """
    if problems or mistyped or misshapen:
        error = TypeError if mistyped else ShapeError if misshapen else ValueError
        raise error(f"{op}: {'; '.join([*mistyped, *misshapen, *problems])}")
    return None


def names_itself(function: Callable[P, R]) -> Callable[P, R]:
    """Lets errors of the products that a function is made of name the function in their place."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError, NotImplementedError) as error:
            part, _, problem = str(error).partition(": ")
            if part in PARTS:
                error.args = (f"{function.__name__}: {problem}",)
            raise

    return run
