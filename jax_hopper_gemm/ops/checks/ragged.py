"""Checks of ragged products: groups of rows, their sizes, an offset into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..ragged_axes import RaggedAxes
from .arguments import COMPLEX, activation_problems, implementation_problems, kind
from .dense import checked_axes, factor_problems, kind_problems
from .wording import describe, differ, fail, less


@dataclass(frozen=True)
class GroupArguments:
    """What a user says of groups: arrays, or None where they are not given."""

    sizes: Any = None  # `group_sizes`
    offset: Any = None  # `group_offset`
    indices: Any = None  # `row_indices`


def check_ragged_dot(
    lhs: Any,
    rhs: Any,
    groups: GroupArguments,
    implementation: Any,
    bias: Any = None,
    activation: Any = None,
) -> None:
    """Checks what `ragged_dot` takes: ranks, K, and the number of groups."""
    op, misshapen, problems, sizes = "ragged_dot", [], [], groups.sizes
    for name, x, rank, expected in (
        ("lhs", lhs, 2, "(M, K)"), ("rhs", rhs, 3, "(G, K, N)"), ("group_sizes", sizes, 1, "(G,)"),
    ):  # fmt: skip
        if np.ndim(x) != rank:
            hint = ": other axes are ragged_dot_general's" if np.ndim(x) > rank else ""
            misshapen.append(f"{name} is {describe(x)}, expected {expected}{hint}")
    if not misshapen:
        k = np.shape(lhs)[1]
        if differ(k, np.shape(rhs)[1]):
            hint = ". Is rhs stored (G, N, K)? Pass jnp.swapaxes(rhs, 1, 2)"
            hint = "" if differ(k, np.shape(rhs)[2]) else hint
            misshapen.append(f"K differs: lhs is {describe(lhs)}, rhs is {describe(rhs)}{hint}")
        misshapen += group_problems(np.shape(rhs)[0], rhs, groups)
        if bias is not None:
            problems += _group_bias_problems(bias, rhs)
            if kind(bias) == COMPLEX > max(kind(lhs), kind(rhs)):
                problems.append(f"bias is {describe(bias)}, and the product is not complex")
    named, mistyped = activation_problems(activation)
    problems += named + implementation_problems(implementation)
    fail_ragged(op, problems, groups, mistyped, misshapen)


def _group_bias_problems(bias: Any, rhs: Any) -> list[str]:
    expected = (np.shape(rhs)[0], np.shape(rhs)[-1])
    if np.ndim(bias) == 2 and not any(map(differ, np.shape(bias), expected)):
        return []
    hint = ""
    if np.ndim(bias) == 1 and not differ(np.shape(bias)[0], expected[1]):
        hint = ". One for all groups? Pass jnp.broadcast_to(bias, (G, N)), or add it in epilogue"
    return [
        f"bias is {describe(bias)}, expected {expected}, a row for each matrix of rhs, "
        f"{describe(rhs)}{hint}"
    ]


def check_group_operands(op: str, operands: Sequence[Any], rhs: Any) -> None:
    """Checks that an operand with an axis of groups has as many groups as the weights."""
    groups = np.shape(rhs)[0]
    problems = [
        f"epilogue_operands[{i}] is {describe(x)}, expected ({groups}, 1, N) or ({groups}, 1, 1), "
        f"an entry for each group of {describe(rhs)}, or at most two axes, which broadcast to "
        "(M, N)"
        for i, x in enumerate(operands)
        if np.ndim(x) > 3
        or (np.ndim(x) == 3 and (differ(np.shape(x)[0], groups) or np.shape(x)[1] != 1))
    ]
    fail(op, problems)


def group_problems(count: Any, rhs: Any, groups: GroupArguments, name: str = "rhs") -> list[str]:
    """Returns whether sizes and the `count` of groups of weights are not as many."""
    all_groups = np.shape(groups.sizes)[-1]
    if groups.offset is None:
        if not differ(count, all_groups):
            return []
        hint = ""
        if less(count, all_groups):
            hint = f". Does {name} hold some of the groups? Say from which one on with group_offset"
    elif less(all_groups, count):
        hint = ": group_sizes are those of all groups"
    else:
        return []
    sizes = describe(groups.sizes)
    return [f"G differs: {name} is {describe(rhs)}, group_sizes is {sizes}{hint}"]


def fail_ragged(
    op: str,
    problems: Sequence[str],
    groups: GroupArguments,
    mistyped: Sequence[str] = (),
    misshapen: Sequence[str] = (),
) -> None:
    """Raises for all problems, with those that sizes, offset and indices have by themselves."""
    sizes, offset, indices = groups.sizes, groups.offset, groups.indices
    problems, mistyped = list(problems), list(mistyped)
    if indices is not None and np.ndim(indices) != 1:
        problems.append(f"row_indices is {describe(indices)}, expected (M,)")
    named = (("group_sizes", sizes), ("group_offset", offset), ("row_indices", indices))
    for name, x in named:
        if x is not None and not jnp.issubdtype(jax.dtypes.result_type(x), np.integer):
            mistyped.append(f"{name} is {describe(x)}, expected integers")
    if not mistyped and isinstance(sizes, np.ndarray) and (least := np.min(sizes, initial=0)) < 0:
        problems.append(f"group_sizes has a negative size, {least}: expected 0 or more")
    if offset is not None:
        if np.shape(offset) not in ((), (1,)):
            problems.append(f"group_offset is {describe(offset)}, expected a scalar or (1,)")
        elif not mistyped and isinstance(offset, int | np.ndarray | np.generic):
            first, count = int(np.reshape(offset, ())), np.shape(sizes)[-1:]
            if first < 0 or (count and less(count[0], first)):
                problems.append(
                    f"group_offset is {first}, expected the number of a group: group_sizes is "
                    f"{describe(sizes)}"
                )
    fail(op, problems, mistyped, misshapen)


def check_ragged_dot_general(
    lhs: Any,
    rhs: Any,
    numbers: Any,
    groups: GroupArguments,
    implementation: Any,
    terms: Mapping[str, Any],
    preferred: Any,
) -> lax.RaggedDotDimensionNumbers:
    """Returns the checked dimension numbers as tuples of plain integers.

    `terms` are alpha, beta and c by name, without those that are None.
    """
    op = "ragged_dot_general"
    expected = "ragged_dot_dimension_numbers"
    if not isinstance(numbers, lax.RaggedDotDimensionNumbers):
        raise TypeError(
            f"{op}: {expected} is a {type(numbers).__name__}, expected a "
            "jax.lax.RaggedDotDimensionNumbers"
        )
    checked = checked_axes(op, lhs, rhs, numbers.dot_dimension_numbers)
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = checked
    ragged = _axes_of(op, "lhs_ragged_dimensions", numbers)
    group_axes = _axes_of(op, "rhs_group_dimensions", numbers)
    if len(ragged) != 1 or not 0 <= ragged[0] < np.ndim(lhs):
        wrong = f"lhs_ragged_dimensions is {ragged}, expected one axis of lhs, {describe(lhs)}"
        fail(op, [], misshapen=[wrong])
    (axis,) = ragged
    role = "batch" if axis in lhs_batch else "contracted" if axis in lhs_contracting else "free"
    misshapen = _group_axis_problems(group_axes, role, rhs, (*rhs_contracting, *rhs_batch))
    valid = lax.RaggedDotDimensionNumbers(checked, ragged, group_axes)
    problems, sizes = [], groups.sizes
    if groups.offset is not None and role != "free":
        problems.append("group_offset came, and rhs has no axis of groups that it could be into")
    if np.ndim(sizes) == 0:
        misshapen.append(f"group_sizes is a scalar, {describe(sizes)}, expected (G,)")
    elif not (misshapen or problems):
        axes = RaggedAxes.of(valid, np.ndim(lhs), np.ndim(rhs))
        lead = lhs_batch[: lhs_batch.index(axis)] if role == "batch" else lhs_batch + axes.outer
        outer, own = tuple(np.shape(lhs)[axis] for axis in lead), np.shape(sizes)[:-1]
        if own and (len(own) != len(outer) or any(map(differ, own, outer))):
            ways = f"(G,) or ({', '.join([*map(str, outer), 'G'])})" if outer else "(G,)"
            misshapen.append(
                f"group_sizes is {describe(sizes)}, expected {ways}: lhs is {describe(lhs)}"
            )
        if role == "free":
            misshapen += group_problems(np.shape(rhs)[group_axes[0]], rhs, groups)
        if terms and role == "contracted":
            shape = np.shape(sizes)[-1], *axes.of_result(np.shape(lhs), np.shape(rhs))
            problems += factor_problems(terms, "product")
            problems += kind_problems(lhs, rhs, terms, preferred)
            c = terms.get("c")
            if c is not None and (np.ndim(c) != len(shape) or any(map(differ, np.shape(c), shape))):
                problems.append(f"c is {describe(c)}, expected the result's shape {shape}")
    if terms and role != "contracted":
        problems.append(_no_sum(terms, role == "batch"))
    problems += implementation_problems(implementation)
    fail_ragged(op, problems, groups, misshapen=misshapen)
    return valid


def _axes_of(op: str, name: str, numbers: Any) -> tuple[int, ...]:
    try:
        return tuple(map(index, getattr(numbers, name)))
    except TypeError:
        came = getattr(numbers, name)
        raise TypeError(f"{op}: {name} is {came!r}, expected a sequence of axes") from None


def _group_axis_problems(
    axes: tuple[int, ...], role: str, rhs: Any, taken: tuple[int, ...]
) -> list[str]:
    """Returns the problem of rhs's axes of groups beside a ragged axis of this role, if any."""
    came = f"rhs_group_dimensions is {axes}, expected "
    if role != "free":
        return [f"{came}none: the ragged axis is a {role} one"] if axes else []
    if len(axes) == 1 and axes[0] not in taken and 0 <= axes[0] < np.ndim(rhs):
        return []
    return [
        f"{came}one axis of rhs, {describe(rhs)}, that is neither contracted nor a batch axis: "
        "the ragged axis is a free one of lhs"
    ]


def _no_sum(terms: Mapping[str, Any], batch: bool) -> str:
    came = ", ".join(terms)
    if batch:
        return (
            f"{came} came, and the ragged axis is a batch one: call dot_general, which this "
            "product is, with an epilogue"
        )
    product = "alpha * y" if "alpha" in terms else "y"
    added = {"beta": " + beta * c", "c": " + c"}
    total = product + next((text for name, text in added.items() if name in terms), "")
    names = [name for name in ("alpha", "beta", "c") if name in total]
    return (
        f"{came} came, and the ragged axis is a free one of lhs: call ragged_dot with "
        f"epilogue=lambda y, {', '.join(names)}: {total}, epilogue_operands=({', '.join(names)},)"
    )
