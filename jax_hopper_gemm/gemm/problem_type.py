"""What a problem and the kernels that may run it have in common."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from .epilogue_graph import EpilogueGraph
from .problem import GemmProblem, Major, VarlenAxis
from .spec import GemmSpec


@dataclass(frozen=True)
class ProblemType:
    """The type of a problem: the fields that it and its kernel have in common."""

    a_dtype: str
    b_dtype: str
    d_dtype: str
    a_major: Major
    b_major: Major
    epilogue: EpilogueGraph | None = None
    grouped: VarlenAxis | None = None
    gathered: Literal["a", "b"] | None = None
    indexed: Literal["a", "b"] | None = None
    promoted: bool = False
    a_block: int = 0
    b_block: int = 0
    nested: bool = False
    bf16_terms: int = 0
    k_group: int = 0
    simt_width: int = 0
    d_major: Major = "n"
    loose_d: bool = False
    panels: int = 1

    @classmethod
    def of(cls, problem: GemmProblem) -> ProblemType:
        """Returns the type of a problem."""
        p = problem
        grouped, gathered = (p.groups.axis, p.groups.gathered) if p.groups else (None, None)
        return cls(
            p.a_dtype, p.b_dtype, p.d_dtype, p.a.major, p.b.major, p.epilogue, grouped, gathered,
            p.indexed, p.promoted, p.a_scales.block if p.a_scales else 0,
            p.b_scales.block if p.b_scales else 0, bool(p.outer), p.bf16_terms, p.k_group,
            p.simt_width, p.d.major, p.loose_d, max(1, len(p.panels)),
        )  # fmt: skip

    @classmethod
    def of_spec(cls, spec: GemmSpec) -> ProblemType:
        """Returns the type of the problems that a kernel runs."""
        return cls(*(getattr(spec, field.name) for field in fields(cls)))

    @property
    def plain(self) -> ProblemType:
        """The same of the product that a measured table holds."""
        return replace(
            self, epilogue=None, gathered=None, indexed=None, nested=False, promoted=False,
            a_block=0, b_block=0, bf16_terms=0, k_group=0, simt_width=0, loose_d=False,
            panels=1,
        )  # fmt: skip
