"""Ragged products in the three forms that kernels run.

Rows of arrays ("tokens", T of them) are cut into spans, and each span belongs to a group, which
has a matrix of its own, or to none:

    "mk,gkn->mn", "mk,gnk->mn"  rows times their group's matrix of weights
    "mk,mn->gkn"                for each group, the product over its rows

The derivatives of each are again among the three. The letters are always these, but for a letter
"c" in weights that hold gate and up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .contraction import (
    Gemm,
    NotAGemm,
    Roles,
    compact_strides,
    operand_layout,
    split,
    stacked_letter,
    strided_layout,
    up_offset,
)
from .epilogue import EpilogueGraph
from .problem import GemmProblem, Groups, MatrixLayout

ROWS = "mk,gkn->mn"
ROWS_TRANSPOSED = "mk,gnk->mn"
CONTRACTION = "mk,mn->gkn"
GROUPS = "g"
FORMS = (ROWS, ROWS_TRANSPOSED, CONTRACTION)


@dataclass(frozen=True)
class Spans:
    """Which spans of a grouped axis belong to which group.

    An array of sizes cuts the axis into consecutive spans. A negative size counts as 0; spans end
    where the axis ends; what it has left behind the last is one more span. Of every `period`
    spans those from `first` to `first + count - 1` belong to a group each, the others to none.
    The matrix of group j in period p is `p * step + j`.

    There are whole periods of spans: one size less than that.

    Attributes:
      period, count, first: see above.
      step: `count`, or 0 where all periods share one set of matrices.
    """

    period: int
    count: int
    first: int = 0
    step: int = 0

    @classmethod
    def plain(cls, groups: int) -> Spans:
        """Returns the spans of one size for each group; rows behind the last belong to none."""
        return cls(period=groups + 1, count=groups)

    def periods(self, sizes: int) -> int:
        """Returns how many periods an array of `sizes` sizes makes."""
        periods, rest = divmod(sizes + 1, self.period)
        assert rest == 0, f"{sizes} sizes and the rest are no periods of {self.period} spans"
        return periods

    def matrices(self, sizes: int) -> int:
        """Returns how many matrices an array of `sizes` sizes tells apart."""
        return self.count * (self.periods(sizes) if self.step else 1)

    def is_plain(self, sizes: int) -> bool:
        """Whether there is one size for each group, as `jax.lax.ragged_dot` takes them."""
        return (self.period, self.first, self.count) == (sizes + 1, 0, sizes)


def is_contraction(subscripts: str) -> bool:
    """Whether the rows are contracted."""
    return "g" in split(subscripts)[2]


def gate_letter(subscripts: str) -> str:
    """Returns the letter that tells gate from up in weights that hold both, or ""."""
    return stacked_letter(subscripts).replace(GROUPS, "")


def ragged_roles(subscripts: str) -> Roles:
    """Returns the roles of the result's axes."""
    if is_contraction(subscripts):
        return Roles(m="k", n="n", batch="g", swapped=False)
    return Roles(m="m", n="n", batch="", swapped=False)


def ragged_extents(
    subscripts: str, lhs_shape: Sequence[int], rhs_shape: Sequence[int], spans: Spans, sizes: int
) -> dict[str, int]:
    """Returns the extent of each letter; `sizes` is the number of sizes."""
    lhs, rhs, _ = split(subscripts)
    extents = {"g": spans.matrices(sizes)}
    return extents | dict(zip(lhs + rhs, (*lhs_shape, *rhs_shape), strict=True))


def as_grouped_gemm(
    subscripts: str,
    lhs_shape: Sequence[int],
    rhs_shape: Sequence[int],
    ab_dtype: str,
    d_dtype: str,
    spans: Spans,
    sizes: int,
    epilogue: EpilogueGraph | None = None,
    operands: Sequence[str] = (),
    *,
    gathered: Literal["a", "b"] | None = None,
    source: int = 0,
) -> Gemm:
    """Returns the canonical form of a ragged product.

    Args:
      subscripts: one of the forms; the axes of weights may be in another order.
      lhs_shape, rhs_shape, ab_dtype, d_dtype, epilogue: as in `contraction.as_gemm`.
      spans, sizes: which spans belong to which group, and the number of sizes.
      operands: for each operand of the epilogue, the letters of "gmn" (rows) or "gkn" that it
        varies along, in the order of its axes; "g" alone or before "n" is an entry a group.
      gathered, source: as in `Groups`.

    Raises:
      NotAGemm: an extent is zero, or an operand of the epilogue does not lie as a kernel reads it.
    """
    extents = ragged_extents(subscripts, lhs_shape, rhs_shape, spans, sizes)
    if 0 in extents.values():
        raise NotAGemm("an extent is 0")
    _, rhs, _ = split(subscripts)
    count, length, n, k = (extents[letter] for letter in "gmnk")
    groups = Groups(
        "k" if is_contraction(subscripts) else "m",
        sizes, spans.period, spans.count, spans.first, spans.step, gathered, source,
    )  # fmt: skip
    if groups.axis == "k":
        rows = k
        a, b = MatrixLayout("m", k), MatrixLayout("n", n)
        d = MatrixLayout("n", n, k * n)
        contracted = length
    else:
        rows, contracted = length, k
        stride = compact_strides(rhs, extents)
        a, d = MatrixLayout("k", k), MatrixLayout("n", n)
        b = strided_layout("n", (n, stride["n"]), (k, stride["k"]), (count, stride["g"]))
    layouts = []
    letter_of_rows = "k" if groups.axis == "k" else "m"
    for operand, labels in zip(epilogue.operands if epilogue else (), operands, strict=True):
        stride = compact_strides(labels, extents)
        layouts.append(
            operand_layout(
                operand.kind,
                (rows, stride.get(letter_of_rows, 0)),
                (n, stride.get("n", 0)),
                (count, stride.get("g", 0)),
            )
        )
        if operand.kind in ("matrix", "column") and groups.axis == "m" and "g" in labels:
            raise NotAGemm(f"a {operand.kind} that the epilogue reads has an entry for each group")
    problem = GemmProblem(
        rows, n, contracted, count, ab_dtype, d_dtype, a, b, d,
        epilogue=epilogue,
        operands=tuple(layouts),
        up_offset=up_offset(subscripts, rhs_shape, gate_letter(subscripts)),
        groups=groups,
    )  # fmt: skip
    return Gemm(problem, swapped=False)


def weights_in_order(labels: str, subscripts: str) -> bool:
    """Whether weights whose axes have these letters are among the forms, or gate and up of one."""
    order = "".join(x for x in labels if x != gate_letter(subscripts))
    return labels[-1] in "kn" and order in ("gkn", "gnk") and labels[0] == "g"
