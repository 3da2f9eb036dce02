"""Checks that all products share: arrays, names of activations, functions, choices."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..activations import ACTIVATIONS
from .wording import describe, fail

IMPLEMENTATIONS = (None, "hopper", "xla")
SCALARS = (bool, int, float, complex)
COMPLEX = 2


def as_arrays(op: str, optional: Mapping[str, Any] | None = None, **operands: Any) -> list[Any]:
    """Returns the operands, checked; those with a `__jax_array__` method converted by it.

    After them come the `optional` ones, of which None stays None.
    """
    return named_arrays(op, {**operands, **(optional or {})}, optional or ())


def named_arrays(
    op: str, operands: Mapping[str, Any], optional: Container[str] = (), *, keys: bool = False
) -> list[Any]:
    """Returns operands likewise, by names that are no words; `keys` of random numbers, too."""
    arrays = [as_jax_array(x) for x in operands.values()]
    problems = [
        f"{name} is {wrong}"
        for name, x in zip(operands, arrays, strict=True)
        if not (x is None and name in optional) and (wrong := not_numbers(x, keys))
    ]
    fail(op, [], problems)
    return arrays


def as_jax_array(x: Any) -> Any:
    """Returns what an object's `__jax_array__` method makes of it; others as they are."""
    return convert() if (convert := getattr(x, "__jax_array__", None)) else x


def not_numbers(x: Any, keys: bool = False) -> str | None:
    """Returns what an argument is in place of an array of numbers, or keys; None if it is one."""
    if not is_array(x):
        way = "convert it with jnp.asarray"
        if hasattr(x, "dequantize"):
            way = "its dequantize() is one; beside 16 bits weights stay as they are"
        return f"a {type(x).__name__}, expected an array: {way}"
    if isinstance(x, jax.Ref):
        return "a Ref, expected an array: read it, as in ref[...]"
    if isinstance(x, jax.ShapeDtypeStruct):
        return "a ShapeDtypeStruct, expected an array: jax.eval_shape and explain take shapes"
    if isinstance(x, np.ndarray | np.generic):
        try:
            jax.typeof(x)
        except (TypeError, ValueError) as error:  # JAX says what it takes
            return f"a {type(x).__name__}, expected an array of numbers: {error}"
    if not keys and isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return f"{describe(x)}, expected numbers"
    return None  # NOTE: what else has a shape and a dtype may be Qwix's, which then multiplies


def as_cotangent_dtype(op: str, dtype: Any) -> np.dtype | None:
    """Returns the dtype of cotangents, checked, as JAX holds it; None for None."""
    if dtype is None:
        return None
    checked = _as_dtype(dtype)
    if checked is None or not jnp.issubdtype(checked, jnp.floating):
        raise TypeError(
            f"{op}: cotangent_dtype is {dtype!r}, expected a real floating-point dtype, such as "
            "jnp.bfloat16, or None"
        )
    return jax.dtypes.canonicalize_dtype(checked)


def as_result_dtype(op: str, dtype: Any, *, several: bool = True) -> Any:
    """Returns the dtype of the result, checked; None for None, a tuple for `several` or a list."""
    if several and isinstance(dtype, tuple | list):
        return tuple(as_result_dtype(op, x, several=False) for x in dtype)
    if dtype is not None and _as_dtype(dtype) is None:
        kinds = "jnp.float32, or a tuple of them for several results," if several else "jnp.float32"
        raise TypeError(
            f"{op}: preferred_element_type is {dtype!r}, expected a dtype such as {kinds} or None"
        )
    return dtype


def _as_dtype(dtype: Any) -> np.dtype | None:
    """Returns what JAX takes for a dtype; None if it takes it for none."""
    try:
        hash(dtype)  # an array has a dtype and is none
        found = jnp.dtype(dtype)
    except (TypeError, ValueError):
        return None
    return found if found == np.bool_ or jnp.issubdtype(found, jnp.number) else None


def is_array(x: Any) -> bool:
    return (hasattr(x, "shape") and hasattr(x, "dtype")) or isinstance(x, SCALARS)


def strong_dtype(x: Any) -> Any:
    """Returns the dtype of an array; None for None and for numbers, which fit any dtype."""
    if x is None or isinstance(x, SCALARS) or jax.typeof(x).weak_type:
        return None
    return jax.dtypes.result_type(x)


def kind(x: Any) -> int:
    """Returns 0 for integers and truth values, 1 for floats, 2 for complex numbers."""
    dtype = x if isinstance(x, np.dtype) else jax.dtypes.result_type(x)
    if jnp.issubdtype(dtype, np.complexfloating):
        return COMPLEX
    return int(jnp.issubdtype(dtype, np.floating))


def bits(x: Any) -> int:
    """Returns how many bits a number of an array has."""
    dtype = jax.dtypes.result_type(x)
    if dtype == np.bool_:
        return 1
    return (jnp.finfo if kind(dtype) else jnp.iinfo)(dtype).bits


def check_accelerated(op: str, function: Any, implementation: Any, fuse: Any) -> None:
    """Checks a function to accelerate and how."""
    if not callable(function):
        raise TypeError(
            f"{op}: function is a {type(function).__name__}, expected a function: pass the "
            "function itself, not what it returns"
        )
    fail(op, implementation_problems(implementation))
    if not isinstance(fuse, bool):
        raise TypeError(f"{op}: fuse is {fuse!r}, expected True or False")


def check_unchanged(argument: Any, leaves: list[Any]) -> None:
    """Checks that a function stored no new array in an argument, which its caller would lose.

    Every leaf of the argument must be among `leaves`: those of the argument before the call, and
    of the function's result.
    """
    there = set(map(id, leaves))
    if any(id(leaf) not in there for leaf in jax.tree.leaves(argument)):
        raise ValueError(
            f"accelerate: the function changes a {type(argument).__name__} that it is given, and "
            "the caller's would stay as it is. Return what is new in it; for Flax nnx modules and "
            "optimizers use jax_hopper_gemm.nn.accelerate, which changes the caller's"
        )


def check_max_sms(limit: Any) -> None:
    """Checks that a limit of SMs is None or an integer of at least 1."""
    if limit is None:
        return
    if isinstance(limit, bool | Tracer) or not hasattr(limit, "__index__"):
        raise TypeError(
            f"max_sms: limit is a {type(limit).__name__}, expected an integer, or None for no limit"
        )
    if limit < 1:
        raise ValueError(f"max_sms: limit is {limit}, expected at least 1, or None for no limit")


def activation_problems(activation: Any) -> tuple[list[str], list[str]]:
    """Returns what is wrong with an activation's name, and with its type."""
    if not isinstance(activation, str):
        return [], function_problems("activation", activation)
    if activation in ACTIVATIONS:
        return [], []
    names = ", ".join(ACTIVATIONS)
    return [f"activation is {activation!r}, expected a function or one of {names}"], []


def function_problems(name: str, function: Any) -> list[str]:
    """Returns the reasons, by its type, why an activation or epilogue is invalid."""
    if function is None:
        return []
    if not callable(function):
        return [f"{name} is a {type(function).__name__}, expected a function"]
    try:
        hash(function)
    except TypeError:
        return [
            f"{name} is a {type(function).__name__}, which cannot be hashed: pass a function, and "
            "the arrays that it needs as epilogue_operands"
        ]
    return []


def implementation_problems(implementation: Any) -> list[str]:
    if isinstance(implementation, str | None) and implementation in IMPLEMENTATIONS:
        return []
    return [f"implementation is {implementation!r}, expected None, 'hopper' or 'xla'"]


def choice_problems(save_preactivation: Any, implementation: Any) -> list[str]:
    problems = implementation_problems(implementation)
    if not isinstance(save_preactivation, bool):
        problems.insert(0, f"save_preactivation is {save_preactivation!r}, expected True or False")
    return problems
