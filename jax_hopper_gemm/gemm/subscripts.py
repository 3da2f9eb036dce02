"""Subscripts of a product of two arrays: a letter for each axis, as in "mk,kn->mn"."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

DimensionNumbers = tuple[
    tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]
]


@dataclass(frozen=True)
class DotGeneral:
    """A product as `lax.dot_general` followed by `lax.transpose`."""

    swap_ab: bool  # whether the right operand comes first
    dimension_numbers: DimensionNumbers  # of the operands in that order
    permutation: tuple[int, ...]  # of the transpose
    order: tuple[int, ...]  # the permutation that takes it back


@dataclass(frozen=True, repr=False)
class Subscripts:
    """The letters of the axes of two operands and of their product.

    No letter repeats within an array. Letters of both operands are batch axes where the result has
    them, else contracted; letters of one operand are free. A letter of the right operand alone has
    no place in the product: it tells gate from up, two right operands in one array.
    """

    lhs: str
    rhs: str
    out: str

    @classmethod
    def parse(cls, text: str) -> Subscripts:
        """Returns the subscripts that `str` writes as `text`."""
        operands, out = text.split("->")
        lhs, rhs = operands.split(",")
        return cls(lhs, rhs, out)

    @classmethod
    def of_dot_general(cls, dimension_numbers: Any, lhs_ndim: int, rhs_ndim: int) -> Subscripts:
        """Returns the subscripts of a `lax.dot_general`."""
        (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = dimension_numbers
        lhs, fresh = string.ascii_letters[:lhs_ndim], iter(string.ascii_letters[lhs_ndim:])
        pairs = zip((*rhs_contracting, *rhs_batch), (*lhs_contracting, *lhs_batch), strict=True)
        shared = {rhs_axis: lhs[lhs_axis] for rhs_axis, lhs_axis in pairs}
        rhs = "".join(shared.get(axis) or next(fresh) for axis in range(rhs_ndim))
        subscripts = cls(lhs, rhs, "")
        batch = "".join(lhs[axis] for axis in lhs_batch)
        return replace(subscripts, out=batch + subscripts.lhs_free + subscripts.rhs_free)

    def __str__(self) -> str:
        return f"{self.lhs},{self.rhs}->{self.out}"

    __repr__ = __str__

    @property
    def batch(self) -> str:
        """Letters of all three arrays, in the order of the result."""
        return "".join(x for x in self.out if x in self.lhs and x in self.rhs)

    @property
    def contracted(self) -> str:
        """Letters of both operands that the result lacks, in the order of the left operand."""
        return "".join(x for x in self.lhs if x in self.rhs and x not in self.out)

    @property
    def lhs_free(self) -> str:
        return "".join(x for x in self.lhs if x not in self.rhs)

    @property
    def rhs_free(self) -> str:
        return "".join(x for x in self.rhs if x not in self.lhs)

    @property
    def columns(self) -> str:
        """Letters of the right operand alone, in the order of the result."""
        return "".join(x for x in self.out if x in self.rhs and x not in self.lhs)

    @property
    def gate_up(self) -> str:
        """The letter that tells gate from up in a right operand that holds both, or ""."""
        return "".join(x for x in self.rhs if x not in self.lhs + self.out)

    def extents(self, lhs_shape: Sequence[int], rhs_shape: Sequence[int]) -> dict[str, int]:
        """Returns the extent of each letter of the operands."""
        return dict(zip(self.lhs + self.rhs, (*lhs_shape, *rhs_shape), strict=True))

    def fresh_letters(self) -> Iterator[str]:
        """Yields letters that no array has."""
        return (x for x in string.ascii_letters if x not in self.lhs + self.rhs + self.out)

    def transpose_lhs(self) -> Subscripts:
        """Returns the left operand's gradient, a product of the cotangent and the right operand."""
        return Subscripts(self.out, self.rhs, self.lhs)

    def transpose_rhs(self) -> Subscripts:
        """Returns the right operand's gradient, a product of the cotangent and the left operand."""
        return Subscripts(self.out, self.lhs, self.rhs)

    def swapped(self) -> Subscripts:
        """Returns the same product with the operands in the other order."""
        return Subscripts(self.rhs, self.lhs, self.out)

    def permuted(self, permutation: Sequence[int]) -> Subscripts:
        """Returns the product followed by a transpose."""
        return replace(self, out="".join(self.out[axis] for axis in permutation))

    def without(self, letter: str) -> Subscripts:
        """Returns the product without an axis, or `self` where the letter is ""."""
        return Subscripts(*(x.replace(letter, "") for x in (self.lhs, self.rhs, self.out)))

    def batched(self, lhs_axis: int | None, rhs_axis: int | None) -> Subscripts:
        """Returns the product with one more letter, in front of the result's.

        The operands have the new axis at `lhs_axis` and `rhs_axis`; None: an operand lacks it.
        """
        new = next(self.fresh_letters())

        def insert(letters: str, axis: int | None) -> str:
            return letters if axis is None else letters[:axis] + new + letters[axis:]

        return Subscripts(insert(self.lhs, lhs_axis), insert(self.rhs, rhs_axis), new + self.out)

    def with_gate_up(self) -> tuple[Subscripts, int]:
        """Returns the subscripts whose result keeps the letter of gate and up, and that axis.

        The letter stands in front of the axes that end the result and belong to the right operand
        alone: the result's matrices have rows of gate and up side by side.
        """
        axis = len(self.out.rstrip(self.rhs_free))
        return replace(self, out=self.out[:axis] + self.gate_up + self.out[axis:]), axis

    def dot_general(self, *, may_swap: bool = True) -> DotGeneral:
        """Returns the form whose operands stand in the order that needs no transpose, if one does.

        They change places only if `may_swap`.
        """
        natural = self.batch + self.lhs_free + self.rhs_free
        reverse = self.batch + self.rhs_free + self.lhs_free
        swap_ab = may_swap and reverse == self.out != natural
        ordered, out = (self.swapped(), reverse) if swap_ab else (self, natural)
        contracted, batch = ordered.contracted, ordered.batch

        def axes(of: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
            return tuple(map(ordered.lhs.index, of)), tuple(map(ordered.rhs.index, of))

        permutation, order = tuple(map(out.index, self.out)), tuple(map(self.out.index, out))
        return DotGeneral(swap_ab, (axes(contracted), axes(batch)), permutation, order)
