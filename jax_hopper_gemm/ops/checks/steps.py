"""Checks of epilogues, and of the results of users' functions while traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ...gemm.product import Options
from .arguments import choice_problems, function_problems, is_array, named_arrays, not_numbers
from .wording import counted, describe, dtypes_text, fail


def check_steps(
    op: str, epilogue: Any, operands: Any, plain: bool, options: Options
) -> tuple[Any, ...]:
    """Checks the arguments that all products share, and returns the operands of the epilogue.

    `plain`: the product has no epilogue at all.
    """
    problems, mistyped = [], function_problems("epilogue", epilogue)
    preferred = options.preferred_element_type
    if not isinstance(operands, tuple | list):
        mistyped.append(
            f"epilogue_operands is a {type(operands).__name__}, expected a tuple of arrays: (x,)"
        )
        operands = ()
    elif operands and epilogue is None:
        problems.append(
            f"{len(operands)} epilogue_operands came without an epilogue, the function that takes "
            "them after the product"
        )
    if plain and isinstance(preferred, tuple | list):
        problems.append(
            f"preferred_element_type is {dtypes_text(preferred)}, expected one dtype: only the "
            "results of an epilogue have one each"
        )
    problems += choice_problems(options.save_preactivation, options.implementation)
    fail(op, problems, mistyped)
    named = {f"epilogue_operands[{i}]": x for i, x in enumerate(operands)}
    return tuple(named_arrays(op, named, keys=True))


def call(op: str, name: str, function: Callable[..., Any], *arrays: Any) -> Any:
    """Returns `function(*arrays)` of a user's function; its exception is the cause of our error."""
    try:
        return function(*arrays)
    except Exception as error:
        arguments = ", ".join(map(describe, arrays))
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"{op}: {name} failed when it was traced with ({arguments}): "
            f"{type(error).__name__}: {error}"
        ) from error


def check_effects(op: str, closed: Any) -> None:
    """Checks that a kernel may compute a jaxpr: that it reads no Ref and keeps no order."""
    if any(isinstance(x, jax.Ref) for x in closed.consts):
        raise TypeError(
            f"{op}: the function after the product reads or writes a Ref that it closes over: read "
            "it before, and pass what it holds as epilogue_operands"
        )
    if any(type(x).__name__.startswith("Ordered") for x in closed.effects):
        raise NotImplementedError(
            f"{op}: the function after the product has a callback with ordered=True, which no "
            "kernel keeps in order: leave ordered out, or pass implementation='xla'"
        )


def check_activated(op: str, out: Any, y: Any) -> None:
    """Checks that an activation returned one array of its argument's shape."""
    if not is_array(out):
        raise TypeError(
            f"{op}: activation returned a {type(out).__name__}, expected an array: a function of "
            "several results is an epilogue"
        )
    if np.shape(out) != np.shape(y):
        raise ValueError(
            f"{op}: activation returned {describe(out)} for {describe(y)}, expected the same "
            "shape: a function that is not elementwise is an epilogue"
        )


def results(op: str, out: Any) -> tuple[Any, ...]:
    """Returns the results of an epilogue, checked, as a tuple of arrays."""
    arrays = out if type(out) is tuple else (out,)
    wrong = [type(x).__name__ for x in arrays if not is_array(x)]
    if not arrays or wrong:
        got = f"a {wrong[0]}" if wrong else "an empty tuple"
        got = f"a tuple with {got}" if wrong and arrays is out else got
        hint = ". Has it a return statement?" if out is None else ""
        if arrays is not out and isinstance(out, list | tuple):
            hint = ": return tuple(...) of it"
        raise TypeError(
            f"{op}: epilogue returned {got}, expected an array or a tuple of arrays{hint}"
        )
    for what in filter(None, map(not_numbers, arrays)):
        raise TypeError(f"{op}: epilogue returned {what}")
    return arrays


def check_result_dtypes(op: str, out: Sequence[Any], preferred: Any) -> None:
    """Checks that a tuple of dtypes has one for each result."""
    if preferred is not None and len(preferred) != len(out):
        returned = ", ".join(map(describe, out))
        raise ValueError(
            f"{op}: preferred_element_type has {counted(preferred, 'dtype')}, "
            f"{dtypes_text(preferred)}, and there {'is' if len(out) == 1 else 'are'} "
            f"{counted(out, 'result')}, {returned}: expected one for each"
        )
