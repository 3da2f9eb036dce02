"""Groups along an axis of a product, and the three forms of a ragged product.

An int32 array of sizes, known only where the program runs, cuts an axis into consecutive runs. A
negative size counts as 0, runs end where the axis ends, and what the sizes leave of the axis is one
more run. A run belongs to a group, which has a matrix of its own, or to none. `Groups` is the rule
that says which; `GroupedAxis` is that rule on an axis of a GEMM.

Products of T rows ("tokens") in groups have four forms:

    VARLEN_M_KN  "mk,gkn->mn"  rows times their group's matrix of weights, stored (G, K, N)
    VARLEN_M_NK  "mk,gnk->mn"  the same, the weights stored (G, N, K)
    VARLEN_K     "mk,mn->gkn"  for each group, the product over its rows
    VARLEN_K_T   "km,nm->gkn"  the same of transposes, as tensor cores read 8 bits

The first two are each other's dgrad, and the others are their wgrad. Its GEMM contracts the rows,
so there it is K that groups cut. Of transposes TMA reads no box that begins or ends at any row: in
the last form all runs are multiples of `PROMOTION_K` rows long, padded with zeros. The letters are
always these, but for one of gate and up in weights that hold both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .subscripts import Subscripts

VARLEN_M_KN = Subscripts.parse("mk,gkn->mn")
VARLEN_M_NK = Subscripts.parse("mk,gnk->mn")
VARLEN_K = Subscripts.parse("mk,mn->gkn")
VARLEN_K_T = Subscripts.parse("km,nm->gkn")
FORMS = (VARLEN_M_KN, VARLEN_M_NK, VARLEN_K)  # those that users and derivatives ask for
DGRAD = {VARLEN_M_KN: VARLEN_M_NK, VARLEN_M_NK: VARLEN_M_KN}  # by the form of the product
GROUP = "g"  # letter of the groups

VarlenAxis = Literal["m", "k"]


@dataclass(frozen=True)
class Groups:
    """The rule by which runs of an axis belong to groups.

    Of every `period` runs those from `first` to `first + count - 1` belong to a group each, the
    others to none. The run that the sizes leave over never belongs to one. The matrix of group j in
    period p is `p * step + j`.
    """

    period: int
    count: int
    first: int = 0
    step: int = 0  # `count`, or 0 where all periods share one set of matrices

    @classmethod
    def plain(cls, count: int) -> Groups:
        """Returns the rule of one size for each group; rows behind the last belong to none."""
        return cls(period=count + 1, count=count)

    def is_plain(self, num_sizes: int) -> bool:
        """Whether there is one size for each group, as `jax.lax.ragged_dot` takes them."""
        return (self.period, self.first, self.count) == (num_sizes + 1, 0, num_sizes)

    def periods(self, num_sizes: int) -> int:
        """Returns how many periods the runs make, which must be whole ones."""
        periods, extra = divmod(num_sizes + 1, self.period)
        assert extra == 0, f"{num_sizes + 1} runs are no whole periods of {self.period}"
        return periods

    def total(self, num_sizes: int) -> int:
        """Returns how many groups there are."""
        periods, runs = divmod(num_sizes, self.period)
        return periods * self.count + self._among_first(runs)

    def matrices(self, num_sizes: int) -> int:
        """Returns one more than the highest index of a group's matrix; 0 if there is no group."""
        periods, extra = divmod(num_sizes + 1, self.period)
        # Whole periods, whose number may be symbolic.
        if extra == 0 and self.first + self.count < self.period:
            return self.count * (periods if self.step else 1)
        periods, runs = divmod(num_sizes, self.period)
        whole = (periods - 1) * self.step + self.count if periods else 0
        begun = self._among_first(runs)
        return max(whole, periods * self.step + begun if begun else 0)

    def matrix_of(self, run: int, num_sizes: int) -> int:
        """Returns the index of a run's matrix; -1 for a run that belongs to no group."""
        period, place = divmod(run, self.period)
        place -= self.first
        if not (run < num_sizes and 0 <= place < self.count):
            return -1
        return period * self.step + place

    def _among_first(self, runs: int) -> int:
        """Returns how many of the first runs of a period belong to groups."""
        return min(max(runs - self.first, 0), self.count)


@dataclass(frozen=True)
class GroupedAxis:
    """An axis of a GEMM that is cut into groups.

    "m" (varlen_m): rows of A and D, each run multiplied by its group's matrix of B; rows that
    belong to no group are 0 in D. "k" (varlen_k): the contracted axis of A and B, each group having
    its own matrix of D; it is 0 for an empty run.
    """

    axis: VarlenAxis
    num_sizes: int  # how many sizes cut the axis
    rule: Groups  # which runs belong to which group
    # An operand whose elements along the axis are rows of a longer array, gathered by an int32
    # array of indices. An index that no row has stands for zeros.
    gathered: Literal["a", "b"] | None = None
    source_rows: int = 0  # of that longer array

    @classmethod
    def of(cls, subscripts: Subscripts, rule: Groups, num_sizes: int) -> GroupedAxis:
        """Returns the grouped axis of a ragged product."""
        return cls("k" if is_varlen_k(subscripts) else "m", num_sizes, rule)

    @property
    def total(self) -> int:
        """How many groups there are."""
        return self.rule.total(self.num_sizes)

    @property
    def matrices(self) -> int:
        """One more than the highest index of a group's matrix; 0 where there are no groups."""
        return self.rule.matrices(self.num_sizes)


def is_varlen_k(subscripts: Subscripts) -> bool:
    """Whether a ragged product contracts its rows."""
    return GROUP in subscripts.out


def gate_up_letter(subscripts: Subscripts) -> str:
    """Returns the letter that tells gate from up in weights that hold both, or ""."""
    return subscripts.gate_up.replace(GROUP, "")


def weights_in_order(subscripts: Subscripts) -> bool:
    """Whether the weights' axes are in the order of one of the forms, or of gate and up of one."""
    letters, order = subscripts.rhs, subscripts.without(gate_up_letter(subscripts)).rhs
    return letters[-1] in "kn" and order in ("gkn", "gnk") and letters[0] == GROUP
