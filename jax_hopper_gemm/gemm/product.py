"""A product for any extents: what is multiplied, and how it is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .groups import Groups, gate_up_letter
from .options import Options
from .subscripts import Subscripts


@dataclass(frozen=True)
class Product:
    """The static parameters of a product of two arrays."""

    # A ragged product has one of the forms in `gemm.groups`, or "mk,gkcn->mn" where its weights
    # hold gate and up.
    subscripts: Subscripts
    options: Options = Options()
    out_sharding: Any = None  # that of the result
    # Of a ragged product, which runs of its rows belong to which group. The sizes that cut the
    # rows are one more operand, behind the right one.
    groups: Groups | None = None
    # How many axes `vmap` put in front of those of a ragged product with an epilogue: of the left
    # operand, the sizes and the result, and of the right operands unless all share them, which
    # those of a contraction do not.
    batch: int = 0

    @property
    def gate_up(self) -> str:
        """The letter that tells gate from up in a right operand that holds both, or ""."""
        return gate_up_letter(self.subscripts) if self.groups else self.subscripts.gate_up

    @property
    def num_sizes_operands(self) -> int:
        """How many operands hold sizes of groups: 1 or 0."""
        return 1 if self.groups else 0

    def gate_up_axis(self) -> int | None:
        """Returns the axis of gate and up in a result that holds both; None where none does."""
        if not self.gate_up:
            return None
        return self.batch + 1 if self.groups else self.subscripts.with_gate_up()[1]

    def with_options(self, **named: Any) -> Product:
        return replace(self, options=replace(self.options, **named))
