"""Every error that a user's arguments can cause: what came, what was expected, the way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from ..routing import array_text

IMPLEMENTATIONS = (None, "hopper", "xla")
SCALARS = (bool, int, float, complex)


def as_arrays(op: str, **operands: Any) -> list[Any]:
    """Returns the operands, those with a `__jax_array__` method as the array it gives.

    Raises:
      TypeError: an operand is neither an array nor a scalar.
    """
    arrays = [
        convert() if (convert := getattr(x, "__jax_array__", None)) else x
        for x in operands.values()
    ]
    problems = [
        f"{name} is a {type(x).__name__}, expected an array: convert it with jnp.asarray"
        for name, x in zip(operands, arrays, strict=True)
        if not (hasattr(x, "shape") and hasattr(x, "dtype")) and not isinstance(x, SCALARS)
    ]
    if problems:
        raise TypeError(f"{op}: {'; '.join(problems)}")
    return arrays


def check_implementation(op: str, implementation: Any) -> None:
    if implementation not in IMPLEMENTATIONS:
        _fail(op, [f"implementation is {implementation!r}, expected None, 'hopper' or 'xla'"])


def check_matmul(a: Any, b: Any) -> None:
    """Checks ranks, K and batch axes by the rules of `jnp.matmul`."""
    problems = [
        f"{name} is a scalar, {describe(x)}, expected at least one axis: scale with *"
        for name, x in (("a", a), ("b", b))
        if np.ndim(x) == 0
    ]
    if problems:
        _fail("matmul", problems)
    a_shape, b_shape = np.shape(a), np.shape(b)
    given = f"a is {describe(a)}, b is {describe(b)}"
    k_a, k_b = a_shape[-1], b_shape[max(len(b_shape) - 2, 0)]
    if _differ(k_a, k_b):
        hint = ""
        if len(a_shape) == len(b_shape) == 2 and not _differ(k_a, b_shape[1]):
            hint = (
                ". Is b stored (N, K)? Contract it with dot_general(a, b, (((1,), (1,)), ((), ())))"
            )
        problems.append(f"K differs: {given}{hint}")
    for x, y in zip(reversed(a_shape[:-2]), reversed(b_shape[:-2]), strict=False):
        if _differ(x, y) and 1 not in (x, y):
            problems.append(
                f"batch axes {a_shape[:-2]} and {b_shape[:-2]} do not broadcast: {given}"
            )
            break
    _fail("matmul", problems)


def check_dot_general(lhs: Any, rhs: Any, dimension_numbers: Any) -> Any:
    """Returns `dimension_numbers` as nested tuples of plain integers; None stays None.

    Checks that axes exist, appear once, and have equal extents in both operands.
    """
    if dimension_numbers is None:
        return None
    try:
        (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = (
            tuple(tuple(int(axis) for axis in axes) for axes in pair) for pair in dimension_numbers
        )
    except (TypeError, ValueError):
        raise TypeError(
            f"dot_general: dimension_numbers is {dimension_numbers!r}, expected "
            "((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)), each a sequence of axes"
        ) from None
    problems = []
    for name, x, axes in (
        ("lhs", lhs, lhs_contracting + lhs_batch),
        ("rhs", rhs, rhs_contracting + rhs_batch),
    ):
        if any(not 0 <= axis < np.ndim(x) for axis in axes):
            problems.append(
                f"{name} axes {axes} are not all between 0 and {np.ndim(x) - 1}: "
                f"{name} is {describe(x)}"
            )
        elif len(set(axes)) < len(axes):
            problems.append(f"{name} axes {axes} repeat: each is contracted or batched once")
    for kind, lhs_axes, rhs_axes in (
        ("contracting", lhs_contracting, rhs_contracting),
        ("batch", lhs_batch, rhs_batch),
    ):
        if len(lhs_axes) != len(rhs_axes):
            problems.append(f"{kind} axes {lhs_axes} and {rhs_axes} do not pair up")
        elif not problems:
            lhs_extents = tuple(np.shape(lhs)[axis] for axis in lhs_axes)
            rhs_extents = tuple(np.shape(rhs)[axis] for axis in rhs_axes)
            if any(map(_differ, lhs_extents, rhs_extents)):
                problems.append(
                    f"{kind} axes {lhs_axes} and {rhs_axes} have extents {lhs_extents} and "
                    f"{rhs_extents}: lhs is {describe(lhs)}, rhs is {describe(rhs)}"
                )
    _fail("dot_general", problems)
    return (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)


def check_einsum(subscripts: Any, operands: Sequence[Any]) -> None:
    """Checks what must hold before `jnp.einsum` parses the subscripts."""
    if not isinstance(subscripts, str):
        raise TypeError(
            f"einsum: subscripts is a {type(subscripts).__name__}, expected a string such as "
            "'mk,kn->mn'"
        )
    if len(operands) != 2:
        _fail(
            "einsum",
            [f"{len(operands)} operands came, expected two: use jnp.einsum, or chain products"],
        )
    inputs = subscripts.replace(" ", "").split("->")[0].split(",")
    problems = []
    if len(inputs) != 2:
        problems.append(f"subscripts {subscripts!r} name {len(inputs)} operands, expected two")
    extents: dict[str, Any] = {}
    for labels, x in zip(inputs, operands, strict=False):
        if "." in labels:  # jnp.einsum checks what an ellipsis stands for
            continue
        if len(labels) != np.ndim(x):
            problems.append(
                f"subscripts {labels!r} name {len(labels)} axes of an operand that is {describe(x)}"
            )
            continue
        for label, extent in zip(labels, np.shape(x), strict=True):
            known = extents.setdefault(label, extent)
            if known == 1:
                extents[label] = extent
            elif _differ(known, extent) and extent != 1:
                problems.append(f"{label!r} in {subscripts!r} is {known} and {extent}")
    _fail("einsum", problems)


def describe(x: Any) -> str:
    """Returns an array as JAX prints it: "bf16[128,4096]"."""
    return array_text(np.shape(x), jax.dtypes.result_type(x).name)


def _differ(x: Any, y: Any) -> bool:
    """Whether two extents are known and unequal; symbolic ones are JAX's to compare."""
    return isinstance(x, int) and isinstance(y, int) and x != y


def _fail(op: str, problems: Sequence[str]) -> NoReturn | None:
    if problems:
        raise ValueError(f"{op}: {'; '.join(problems)}")
    return None
