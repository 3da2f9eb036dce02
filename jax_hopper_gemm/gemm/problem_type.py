"""What a problem and the kernels that may run it have in common."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from functools import cached_property
from typing import Literal

from .dtypes import DTYPES, converts
from .epilogue_graph import EpilogueGraph
from .problem import GemmProblem, Major, VarlenAxis


@dataclass(frozen=True)
class ProblemType:
    """The type of a problem: the fields that it and its kernel have in common."""

    a_dtype: str
    b_dtype: str
    d_dtype: str
    a_major: Major  # "k" or "m"
    b_major: Major  # "k" or "n"
    _: KW_ONLY
    epilogue: EpilogueGraph | None = None
    grouped: VarlenAxis | None = None  # the axis that is cut into groups, see `GroupedAxis`
    gathered: Literal["a", "b"] | None = None  # the operand whose rows are picked by indices
    indexed: Literal["a", "b"] | None = None  # the operand that is one matrix of a stack
    # Whether the tensor cores' sums, of few digits, are added up in float32 each `PROMOTION_K` of K
    promoted: bool = False
    # Rows of A, and columns of B, that share a scale for each `PROMOTION_K` of K; 0: no scales.
    a_block: int = 0
    b_block: int = 0
    nested: bool = False  # whether the batch has up to three axes, see `GemmProblem.outer`
    # Of float32 operands, how many products of their bfloat16 parts are summed, see `bf16_parts`.
    # Operands of bfloat16 are these parts (`reads_parts`), float32 ones are cut by the kernel.
    bf16_terms: int = 0
    # Elements of K of a column of B that share a float32 scale, where B is converted; 0: no scales.
    k_group: int = 0
    # Of float32 operands that FMA units multiply, elements of a vector that a thread moves along
    # lines of M or N: 4, or 1 where these are no multiples of 16 bytes; 0: tensor cores do. Of such
    # kernels (`simt`) the warp schedule, `cluster` and `epi` fields mean nothing.
    simt_width: int = 0
    d_major: Major = "n"  # or "m": D, and matrices that the epilogue reads, are stored (N, M)
    # Whether rows of D may begin and end anywhere: threads store them, not TMA, which would write
    # on to the next multiple of 16 bytes.
    loose_d: bool = False
    # Arrays that B and D are, side by side: each begins with a tile; see `GemmProblem.panels`.
    panels: int = 1

    @classmethod
    def of(cls, problem: GemmProblem) -> ProblemType:
        """Returns the type of a problem."""
        p = problem
        grouped, gathered = (p.groups.axis, p.groups.gathered) if p.groups else (None, None)
        return ProblemType(
            p.a_dtype, p.b_dtype, p.d_dtype, p.a.major, p.b.major, epilogue=p.epilogue,
            grouped=grouped, gathered=gathered, indexed=p.indexed, promoted=p.promoted,
            a_block=p.a_scales.block if p.a_scales else 0,
            b_block=p.b_scales.block if p.b_scales else 0, nested=bool(p.outer),
            bf16_terms=p.bf16_terms, k_group=p.k_group, simt_width=p.simt_width,
            d_major=p.d.major, loose_d=p.loose_d, panels=max(1, len(p.panels)),
        )  # fmt: skip

    @classmethod
    def of_spec(cls, spec: ProblemType) -> ProblemType:
        """Returns the type of the problems that a kernel, a `GemmSpec`, runs."""
        return ProblemType(**{f.name: getattr(spec, f.name) for f in fields(ProblemType)})

    @property
    def rounds_operands(self) -> bool:
        """Whether the tensor cores read fewer digits than operands have: TMA rounds to these."""
        row = DTYPES.get(self.a_dtype)
        return bool(row and row.rounding_map and not (self.bf16_terms or self.simt_width))

    @cached_property
    def b_in_registers(self) -> bool:
        """Whether the tensor cores take B from registers.

        There it becomes A's dtype, where it has fewer bits. Float32 in TF32, which they read in
        shared memory along K alone, may lie across it.
        """
        across = self.rounds_operands and self.b_major == "n"
        return across or converts(self.a_dtype, self.b_dtype)

    @property
    def plain(self) -> ProblemType:
        """The same of the product that a measured table holds."""
        return ProblemType(
            self.a_dtype, self.b_dtype, self.d_dtype, self.a_major, self.b_major,
            grouped=self.grouped, d_major=self.d_major,
        )  # fmt: skip
