"""Kernels that cut a float32 matrix into bfloat16 parts, stored as `bf16_parts` describes.

    x (B, R, C)  ->  parts (B, R, stored C), or (B, stored R, C)

A CTA takes `ROWS` x `COLUMNS` of it, a thread `VECTOR` columns of every eighth row of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .bf16_parts import RUN_K
from .matrix_pass import WARPS, PassSpec

VECTOR = 4  # columns of a thread: 16 bytes
ROWS, COLUMNS = RUN_K, 32 * VECTOR  # whole runs along either
LINES = ROWS // WARPS  # rows of a thread


@dataclass(frozen=True)
class CutSpec(PassSpec):
    """One kernel.

    Raises:
      ValueError: there is no such kernel.
    """

    KIND = "cut"
    parts: int  # of a number: 2 or 3
    along: Literal["rows", "columns"]  # the index that K is
    aligned: bool = True  # whether rows begin at multiples of 16 bytes; along rows they must

    def __post_init__(self) -> None:
        kinds = ("rows", True), ("columns", True), ("columns", False)
        if self.parts not in (2, 3) or (self.along, self.aligned) not in kinds:
            raise ValueError(f"no kernel cuts so: {self}")

    @property
    def name(self) -> str:
        """A name a person understands in a profile."""
        return f"jhg_cut_{self.parts}_parts_along_{self.along}{'' if self.aligned else '_loose'}"


def place_of(index, part, parts: int):
    """Returns where a part of an element lies along K; the device traces this, too."""
    return index // RUN_K * (RUN_K * parts) + part * RUN_K + index % RUN_K
