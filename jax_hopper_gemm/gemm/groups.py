"""Ragged products in the three forms that kernels run.

Rows of arrays ("tokens", T of them) are cut into spans, and each span belongs to a group, which
has a matrix of its own, or to none:

    "mk,gkn->mn", "mk,gnk->mn"  rows times their group's matrix of weights
    "mk,mn->gkn"                for each group, the product over its rows

The derivatives of each are again among the three. The letters are always these, but for a letter
"c" in weights that hold gate and up.
"""

from __future__ import annotations

from dataclasses import dataclass

from .subscripts import Subscripts

ROWS = Subscripts.parse("mk,gkn->mn")
ROWS_TRANSPOSED = Subscripts.parse("mk,gnk->mn")
CONTRACTION = Subscripts.parse("mk,mn->gkn")
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


def is_contraction(subscripts: Subscripts) -> bool:
    """Whether the rows are contracted."""
    return GROUPS in subscripts.out


def gate_up_letter(subscripts: Subscripts) -> str:
    """Returns the letter that tells gate from up in weights that hold both, or ""."""
    return subscripts.gate_up.replace(GROUPS, "")


def weights_in_order(subscripts: Subscripts) -> bool:
    """Whether the weights' axes are in the order of one of the forms, or of gate and up of one."""
    labels, order = subscripts.rhs, subscripts.without(gate_up_letter(subscripts)).rhs
    return labels[-1] in "kn" and order in ("gkn", "gnk") and labels[0] == GROUPS
