"""Axes of D along which arrays lie, and layout operations, which only move elements."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal

from .flatten import MOVES, Equation
from .op_table import Uncovered

# For each dimension of an array the letter of D that it goes along; None: constant along it.
Axes = tuple[str | None, ...]

REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min")


class Place:
    """The letters of D, with their roles and extents."""

    def __init__(self, out: str, m: str, n: str, shape: Sequence[int], tile_limit: int):
        self.out = out  # all of them, in order
        self.extents = dict(zip(out, shape, strict=True))
        self.size = prod(shape)
        self.long = frozenset(letter for letter in out if self.extents[letter] > 1)
        self.m, self.n = self.long & set(m), self.long & set(n)  # rows and columns of one matrix
        self.all_m, self.all_n = m, n  # those of any extent
        self.row_fits = prod(self.extents[letter] for letter in n) <= tile_limit  # in one tile
        # Whether matrices are dense, so that two planes of one array have a place.
        self.compact = out == "".join(x for x in out if x not in m + n) + m + n

    def check_rows(self, equation: Equation, axes: Axes) -> None:
        """Raises Uncovered where an array's first axes are not D's rows, all before the columns."""
        rows = self.out[: len(self.out) - len(self.all_n)]
        expected = tuple(x if self.extents[x] > 1 else None for x in rows)
        if axes[: len(rows)] != expected:
            raise Uncovered(equation.name)

    def kind(self, labels: str) -> Literal["scalar", "row", "column", "matrix"]:
        """Returns how an operand varies over a matrix, if it goes along these letters."""
        along_m, along_n = not self.m.isdisjoint(labels), not self.n.isdisjoint(labels)
        if along_m and along_n:
            return "matrix"
        return "row" if along_n else "column" if along_m else "scalar"


def is_layout(equation: Equation) -> bool:
    """Whether an equation moves elements and computes nothing: a sum of one element does not."""
    if equation.name in REDUCTIONS:
        return all(equation.inputs[0].shape[d] == 1 for d in equation.params["axes"])
    return equation.name in MOVES


def moved(equation: Equation, axes: Axes) -> Axes:
    """Returns the axes of a layout operation's output, from those of its input; as `_reshaped`."""
    x, (out,) = equation.inputs[0], equation.outputs
    if equation.name == "transpose":
        return tuple(axes[i] for i in equation.params["permutation"])
    if equation.name == "broadcast_in_dim":
        at = dict(zip(map(int, equation.params["broadcast_dimensions"]), axes, strict=True))
        return tuple(at.get(d) for d in range(len(out.shape)))
    return _reshaped(equation, axes, x.shape, out.shape)


def moved_back(equation: Equation, axes: Axes) -> Axes:
    """Returns the axes of a layout operation's input, from those of its output; as `_reshaped`."""
    x, (out,) = equation.inputs[0], equation.outputs
    if equation.name == "transpose":
        permutation = [int(i) for i in equation.params["permutation"]]
        return tuple(axes[permutation.index(d)] for d in range(len(axes)))
    if equation.name == "broadcast_in_dim":
        return tuple(axes[d] for d in equation.params["broadcast_dimensions"])
    return _reshaped(equation, axes, out.shape, x.shape)


def _reshaped(
    equation: Equation, axes: Axes, source: tuple[int, ...], target: tuple[int, ...]
) -> Axes:
    """Raises Uncovered where a reshape merges or splits axes."""
    kept = [d for d, extent in enumerate(source) if extent > 1]
    if [source[d] for d in kept] != [extent for extent in target if extent > 1]:
        raise Uncovered(equation.name)
    remaining = iter(kept)
    return tuple(axes[next(remaining)] if extent > 1 else None for extent in target)
