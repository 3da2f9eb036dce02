"""The type of a problem: what a kernel that runs it must have been compiled for."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from .epilogue_graph import EpilogueGraph
from .problem import GemmProblem, Major, VarlenAxis
from .spec import GemmSpec


@dataclass(frozen=True)
class ProblemType:
    """Fields that a problem and its kernel have in common, as in `GemmSpec`."""

    a_dtype: str
    b_dtype: str
    d_dtype: str
    a_major: Major
    b_major: Major
    epilogue: EpilogueGraph | None = None
    grouped: VarlenAxis | None = None
    gathered: Literal["a", "b"] | None = None
    indexed: Literal["a", "b"] | None = None

    @classmethod
    def of(cls, problem: GemmProblem) -> ProblemType:
        """Returns the type of a problem."""
        p = problem
        grouped, gathered = (p.groups.axis, p.groups.gathered) if p.groups else (None, None)
        return cls(
            p.a_dtype, p.b_dtype, p.d_dtype, p.a.major, p.b.major, p.epilogue, grouped, gathered,
            p.indexed,
        )  # fmt: skip

    @classmethod
    def of_spec(cls, spec: GemmSpec) -> ProblemType:
        """Returns the type of the problems that a kernel runs."""
        return cls(*(getattr(spec, field.name) for field in fields(cls)))

    @property
    def plain(self) -> ProblemType:
        """The same of the product that a measured table holds."""
        return replace(self, epilogue=None, gathered=None, indexed=None)
