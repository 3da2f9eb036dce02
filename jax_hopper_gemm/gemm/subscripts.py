"""Subscripts of a product of two arrays, and `jax.lax.dot_general` by them."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any


def split(subscripts: str) -> tuple[str, str, str]:
    """Returns the labels of the left operand, the right operand and the result."""
    operands, out = subscripts.split("->")
    lhs, rhs = operands.split(",")
    return lhs, rhs, out


def stacked_letter(subscripts: str) -> str:
    """Returns the letter that tells gate from up in a right operand that holds both, or ""."""
    lhs, rhs, out = split(subscripts)
    return "".join(letter for letter in rhs if letter not in lhs + out)


def stacked_result(subscripts: str) -> tuple[str, int]:
    """Returns the subscripts whose result keeps the letter of gate and up, and that axis.

    The letter stands in front of the axes that end the result and belong to the right operand
    alone: the result's matrices have rows of gate and up side by side.
    """
    lhs, rhs, out = split(subscripts)
    axis = len(out.rstrip("".join(set(rhs) - set(lhs))))
    return f"{lhs},{rhs}->{out[:axis]}{stacked_letter(subscripts)}{out[axis:]}", axis


@dataclass(frozen=True)
class DotGeneral:
    """A product as `lax.dot_general`, its operands `swap_ab` or not, and then `lax.transpose`.

    Attributes:
      swapped: whether the right operand comes first.
      params: all parameters of `lax.dot_general_p`.
      permutation: that of the transpose.
    """

    swap_ab: bool
    params: dict[str, Any]
    permutation: tuple[int, ...]


def from_subscripts(
    subscripts: str, precision: Any, preferred_element_type: Any, out_sharding: Any
) -> DotGeneral:
    """Returns the form whose operands stand in the order that needs no transpose, if one does."""
    lhs, rhs, out = split(subscripts)
    batch = "".join(x for x in out if x in lhs and x in rhs)
    free_lhs = "".join(x for x in lhs if x not in rhs)
    free_rhs = "".join(x for x in rhs if x not in lhs)
    # A precision may tell the operands apart: only one that does not lets them change places.
    symmetric = precision is None or (isinstance(precision, tuple) and precision[0] == precision[1])
    swap_ab = symmetric and batch + free_rhs + free_lhs == out != batch + free_lhs + free_rhs
    if swap_ab:
        lhs, rhs, free_lhs, free_rhs = rhs, lhs, free_rhs, free_lhs
    dot_out = batch + free_lhs + free_rhs
    contracting = [x for x in lhs if x in rhs and x not in out]
    params = {
        "dimension_numbers": (
            (tuple(map(lhs.index, contracting)), tuple(map(rhs.index, contracting))),
            (tuple(map(lhs.index, batch)), tuple(map(rhs.index, batch))),
        ),
        "precision": precision,
        "preferred_element_type": preferred_element_type,
        "out_sharding": rearranged(out_sharding, tuple(map(out.index, dot_out))),
    }
    return DotGeneral(swap_ab, params, tuple(map(dot_out.index, out)))


def to_subscripts(dimension_numbers: Any, lhs_ndim: int, rhs_ndim: int) -> str:
    """Returns the subscripts of a `lax.dot_general`."""
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = dimension_numbers
    lhs, fresh = string.ascii_letters[:lhs_ndim], iter(string.ascii_letters[lhs_ndim:])
    pairs = zip((*rhs_contracting, *rhs_batch), (*lhs_contracting, *lhs_batch), strict=True)
    shared = {rhs_axis: lhs[lhs_axis] for rhs_axis, lhs_axis in pairs}
    rhs = "".join(shared.get(axis) or next(fresh) for axis in range(rhs_ndim))
    batch = "".join(lhs[axis] for axis in lhs_batch)
    free = "".join(x for x in lhs + rhs if (x in lhs) != (x in rhs))
    return f"{lhs},{rhs}->{batch}{free}"


def permuted_result(subscripts: str, permutation: tuple[int, ...]) -> str:
    """Returns the subscripts of the product followed by a transpose."""
    lhs, rhs, out = split(subscripts)
    return f"{lhs},{rhs}->{''.join(out[axis] for axis in permutation)}"


def rearranged(sharding: Any, permutation: tuple[int, ...]) -> Any:
    """Returns the sharding of the array whose axis i is axis `permutation[i]`; None stays None."""
    if sharding is None:
        return None
    partitions = padded_partitions(sharding, len(permutation))
    return with_partitions(sharding, tuple(partitions[axis] for axis in permutation))


def padded_partitions(sharding: Any, ndim: int) -> tuple[Any, ...]:
    """Returns one entry of the partition spec for each of `ndim` axes."""
    given = tuple(sharding.spec)
    return given + (None,) * (ndim - len(given))


def with_partitions(sharding: Any, partitions: tuple[Any, ...]) -> Any:
    return sharding.update(spec=sharding.spec.update(partitions=partitions))
