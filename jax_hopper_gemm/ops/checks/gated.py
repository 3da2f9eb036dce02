"""Checks of gated linear units, dense and grouped."""

from __future__ import annotations

from typing import Any

import numpy as np

from .arguments import COMPLEX, activation_problems, as_arrays, choice_problems, kind
from .ragged import GroupArguments, fail_ragged, group_problems
from .wording import describe, differ, each_text, fail


def check_gated(
    x: Any,
    weights: Any,
    bias: Any,
    row_scale: Any,
    activation: Any,
    save_preactivation: Any,
    implementation: Any,
    groups: GroupArguments,
) -> tuple[Any, tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Checks a gated linear unit; with sizes in `groups` a grouped one, whose rows may be gathered.

    Returns:
      x; the weights: one array or gate and up; the biases: none or gate's and up's; the scale of
      rows: none or one.
    """
    op = "gated_linear_unit"
    lead = () if groups.sizes is None else ("G",)
    x, rights, biases, scale = _gated_arrays(op, x, weights, bias, row_scale)
    rows, of = np.shape(x)[:-1], "x"
    if groups.indices is not None:
        rows, of = np.shape(groups.indices), "the result"
    problems = [
        f"row_scale is {describe(s)}, expected {rows}: one for each row of {of}"
        for s in scale
        if np.ndim(s) != len(rows) or any(map(differ, np.shape(s), rows))
    ]
    for name, arrays in (("bias", biases), ("row_scale", scale)):
        if max(map(kind, arrays), default=0) == COMPLEX > max(map(kind, (x, *rights))):
            problems.append(f"{name} is {each_text(arrays)}, and the products are not complex")
    if np.ndim(x) == 0:
        problems.append(f"x is a scalar, {describe(x)}, expected (..., K)")
    elif lead and np.ndim(x) != 2:
        problems.append(f"x is {describe(x)}, expected (M, K): its rows are in groups")
    problems += _weight_problems(rights, lead)
    if not problems:
        problems = _extent_problems(x, rights, biases, groups)
    if groups.offset is not None and not lead:
        problems.append("group_offset came without group_sizes")
    if groups.indices is not None and not lead:
        problems.append("row_indices came without group_sizes: pass x[row_indices]")
    named_wrong, mistyped = activation_problems(activation)
    problems += named_wrong + choice_problems(save_preactivation, implementation)
    if lead:
        fail_ragged(op, problems, groups, mistyped)
    fail(op, problems, mistyped)
    if len(biases) == 1:
        biases = (biases[0][..., 0, :], biases[0][..., 1, :])
    return x, rights, biases, scale


def _gated_arrays(op: str, x: Any, weights: Any, bias: Any, row_scale: Any) -> tuple[Any, ...]:
    """Returns x, and of each other argument its arrays: none, one, or that of gate and of up."""
    named = {"x": x}
    for name, argument in (("weights", weights), ("bias", bias), ("row_scale", row_scale)):
        if isinstance(argument, tuple | list) and name != "row_scale":
            if len(argument) != 2:
                fail(op, [f"{name} is {len(argument)} arrays, expected one or the pair (gate, up)"])
            named |= {f"{name}[{i}]": each for i, each in enumerate(argument)}
        elif name == "weights" or argument is not None:
            named[name] = argument
    arrays = dict(zip(named, as_arrays(op, **named), strict=True))

    def of(argument: str) -> tuple[Any, ...]:
        return tuple(arrays[name] for name in arrays if name.startswith(argument))

    return arrays["x"], of("weights"), of("bias"), of("row_scale")


def _extent_problems(
    x: Any, rights: tuple[Any, ...], biases: tuple[Any, ...], groups: GroupArguments
) -> list[str]:
    """Returns where extents differ between arrays of the right ranks."""
    problems, sizes, shape = [], groups.sizes, np.shape(rights[0])
    lead = ("G",) if sizes is not None else ()
    lengths, k, n = shape[: len(lead)], shape[len(lead)], shape[-1]
    if differ(np.shape(x)[-1], k):
        names = ", ".join((*lead, "K, 2, N" if len(rights) == 1 else "K, N"))
        problems.append(
            f"K differs: x is {describe(x)}, weights is {each_text(rights)}, expected "
            f"{'(M, K)' if lead else '(..., K)'} and ({names})"
            f"{'' if len(rights) == 1 else ' twice'}"
        )
    if sizes is not None and np.ndim(sizes) != 1:
        problems.append(f"group_sizes is {describe(sizes)}, expected (G,)")
    elif sizes is not None:
        problems += group_problems(lengths[0], rights[0], groups, "weights")
    expected = (*lengths, n) if len(biases) == 2 else (*lengths, 2, n)
    if any(np.ndim(b) != len(expected) or any(map(differ, np.shape(b), expected)) for b in biases):
        problems.append(f"bias is {each_text(biases)}, expected {expected}")
    return problems


def _weight_problems(rights: tuple[Any, ...], lead: tuple[str, ...]) -> list[str]:
    pair, both = (f"({', '.join((*lead, *own))})" for own in (("K", "N"), ("K", "2", "N")))
    if len(rights) == 2:
        problems = [
            f"weights[{i}] is {describe(w)}, expected {pair}"
            for i, w in enumerate(rights)
            if np.ndim(w) != 2 + len(lead)
        ]
        gate, up = map(describe, rights)
        if not problems and gate != up:
            problems.append(f"gate and up differ: weights[0] is {gate}, weights[1] is {up}")
        return problems
    (weights,) = rights
    if np.ndim(weights) == 3 + len(lead) and not differ(np.shape(weights)[-2], 2):
        return []
    stacked = f"stack gate and up with jnp.stack((gate, up), {1 + len(lead)})"
    hint = f"{stacked}, or pass the pair (gate, up)"
    if np.ndim(weights) == 2 and not lead:
        hint = "reshape (K, 2 * N) to (K, 2, N), or pass the pair (gate, up)"
    elif np.ndim(weights) == 3 and np.shape(weights)[0] == 2 and not lead:
        hint = "is it (2, K, N)? Pass the pair (weights[0], weights[1])"
    return [f"weights is {describe(weights)}, expected {both}: {hint}"]
