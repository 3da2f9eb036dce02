"""A product of two arrays, written as subscripts, seen as one batch of matrix products.

Arrays are dense and row-major, their axes in any order. A tensor map addresses a matrix whose
elements are adjacent along one index and equally far apart along the other, plus one batch
index with a stride of its own (0: all matrices are the same). So axes that serve the same role
and lie evenly one inside the other count as one long axis, and the order of the axes is a
matter of strides: nothing is transposed in memory. What does not come down to that form is
`NotAGemm`, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from .problem import GemmProblem, Major, MatrixLayout


class NotAGemm(ValueError):
    """The product is not one strided batch of matrix products; the message says why."""


@dataclass(frozen=True)
class Gemm:
    """A product in canonical form.

    Attributes:
      problem: extents and layouts.
      swapped: whether A is the right operand and B the left one. D is row-major, so its last
        axis is N: when that axis comes from the left operand, D = (lhs rhs) is computed as the
        transpose of rhs^T lhs^T.
    """

    problem: GemmProblem
    swapped: bool


@dataclass(frozen=True)
class Axis:
    """An index of the product: its extent and its stride, in elements, in A, B and D.

    A stride is 0 in an array that the index does not appear in.
    """

    extent: int
    a: int
    b: int
    d: int

    def encloses(self, inner: Axis) -> bool:
        """Whether one step of this index spans all of `inner`, in every array."""
        return all(getattr(self, array) == getattr(inner, array) * inner.extent for array in "abd")


UNIT = Axis(1, 0, 0, 0)


def split(subscripts: str) -> tuple[str, str, str]:
    """Returns the labels of the left operand, the right operand and the result."""
    operands, out = subscripts.split("->")
    lhs, rhs = operands.split(",")
    return lhs, rhs, out


def as_gemm(
    subscripts: str,
    lhs_shape: Sequence[int],
    rhs_shape: Sequence[int],
    ab_dtype: str,
    d_dtype: str,
) -> Gemm:
    """Returns the canonical form of a product.

    Args:
      subscripts: "mk,kn->mn", one letter an axis. No letter repeats within an array and each
        stands in at least two of the three.
      lhs_shape, rhs_shape: extents, by the letters of the operands.
      ab_dtype, d_dtype: as in `GemmProblem`.

    Raises:
      NotAGemm: an extent is zero, or the axes of a role do not merge.
    """
    lhs, rhs, out = split(subscripts)
    extents = dict(zip(lhs + rhs, (*lhs_shape, *rhs_shape), strict=True))
    if 0 in extents.values():
        raise NotAGemm("an extent is 0")
    kept = [label for label in out if extents[label] > 1]
    swapped = bool(kept) and kept[-1] not in rhs
    if kept and kept[-1] in lhs and kept[-1] in rhs:
        raise NotAGemm("the result's last axis is a batch axis, so no matrix of it is row-major")
    a, b = (rhs, lhs) if swapped else (lhs, rhs)
    m, n, k, batch = _roles(a, b, out, extents)
    return Gemm(
        GemmProblem(
            m.extent, n.extent, k.extent, batch.extent, ab_dtype, d_dtype,
            a=_layout("m", (m.extent, m.a), (k.extent, k.a), (batch.extent, batch.a)),
            b=_layout("n", (n.extent, n.b), (k.extent, k.b), (batch.extent, batch.b)),
            d=_layout("n", (n.extent, n.d), (m.extent, m.d), (batch.extent, batch.d)),
        ),
        swapped,
    )  # fmt: skip


def _roles(a: str, b: str, out: str, extents: dict[str, int]) -> tuple[Axis, Axis, Axis, Axis]:
    """Returns M, N, K and the batch, each as one axis.

    Axes of M that do not merge are batch axes along which B stands still; likewise for N.
    """
    strides_a, strides_b, strides_d = (_strides(labels, extents) for labels in (a, b, out))
    roles: dict[tuple[bool, bool], list[Axis]] = {}
    for label in dict.fromkeys(out + a):
        if extents[label] > 1:
            strides = (strides.get(label, 0) for strides in (strides_a, strides_b, strides_d))
            role = roles.setdefault((label in out, label in a and label in b), [])
            role.append(Axis(extents[label], *strides))
    free = roles.get((True, False), [])
    m, spilled_m = _matrix_axis([axis for axis in free if axis.a], "a")
    n, spilled_n = _matrix_axis([axis for axis in free if axis.b], "d")
    contracted = _merged(roles.get((False, True), []), "a")
    if len(contracted) > 1:
        raise NotAGemm(
            "the contracted axes do not lie evenly one inside the other in both operands"
        )
    batch = _merged([*roles.get((True, True), []), *spilled_m, *spilled_n], "d")
    if len(batch) > 1:
        raise NotAGemm(
            "the batch axes do not lie evenly one inside the other in both operands and the result"
        )
    return m, n, (contracted or [UNIT])[0], (batch or [UNIT])[0]


def _strides(labels: str, extents: dict[str, int]) -> dict[str, int]:
    return {label: prod(extents[x] for x in labels[i + 1 :]) for i, label in enumerate(labels)}


def _matrix_axis(axes: list[Axis], array: str) -> tuple[Axis, list[Axis]]:
    """Returns the axis of one matrix, and those left over.

    The axis is the one along which `array` is contiguous, else the longest.
    """
    merged = _merged(axes, "d")
    if not merged:
        return UNIT, []
    best = max(merged, key=lambda axis: (getattr(axis, array) == 1, axis.extent))
    return best, [axis for axis in merged if axis is not best]


def _merged(axes: list[Axis], array: str) -> list[Axis]:
    """Returns `axes` from outer to inner in `array`, those that enclose their neighbour joined."""
    merged: list[Axis] = []
    for axis in sorted(axes, key=lambda axis: -getattr(axis, array)):
        if merged and merged[-1].encloses(axis):
            merged[-1] = Axis(merged[-1].extent * axis.extent, axis.a, axis.b, axis.d)
        else:
            merged.append(axis)
    return merged


def _layout(
    name: Major, own: tuple[int, int], other: tuple[int, int], batch: tuple[int, int]
) -> MatrixLayout:
    """Returns the layout of one array from its (extent, stride) pairs.

    Args:
      name: the index that only this operand has; for D the contiguous one.
      own, other: that index, and the matrix's other one.
      batch: the batch index.

    Strides along an index of extent 1 mean nothing. They are given as in a compact array, so
    that equal problems compare equal.
    """
    (own_extent, own_stride), (other_extent, other_stride) = own, other
    if other_extent > 1 and other_stride == 1:
        major, contiguous, leading = "k", other_extent, (own_extent, own_stride)
    elif own_extent > 1 and own_stride == 1:
        major, contiguous, leading = name, own_extent, (other_extent, other_stride)
    elif own_extent == other_extent == 1:
        major, contiguous, leading = ("k" if name == "m" else name), 1, (1, 1)
    else:
        raise NotAGemm(
            "an operand's last axis is a batch axis: no matrix of it has adjacent elements"
        )
    leading_stride = leading[1] if leading[0] > 1 else contiguous
    batch_stride = batch[1] if batch[0] > 1 else own_extent * other_extent
    return MatrixLayout(major, leading_stride, batch_stride)
