"""A region of a program: what one kernel computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .kinds import Along


@dataclass(eq=False)
class Region:
    """What one kernel computes.

    Attributes:
      products: numbers of the equations of its products, two of a gate.
      bits: the same as a mask of products.
      outputs: the variables that it stores; the last ones are
      kept: those that nothing reads but what is computed anew.
      equations: numbers of its equations, in order, the products left out.
      operands: the other variables that they read.
      last_read: operands that nothing else reads, or that the program may have been given to
        overwrite: an argument of which the region makes a result.
      sums: along which axes it reduces, "columns" for statistics of rows.
      whole: whether all that it reads is in memory.
    """

    products: tuple[int, ...]
    bits: int
    outputs: list[Any] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    equations: list[int] = field(default_factory=list)
    operands: list[Any] = field(default_factory=list)
    last_read: set[Any] = field(default_factory=set)
    sums: set[Along] = field(default_factory=set)
    whole: bool = True

    @property
    def content(self) -> Any:
        """What tells a whole region from others of the same program."""
        lists = self.products, self.outputs, self.kept, self.equations, self.operands
        return *map(tuple, lists), frozenset(self.last_read), frozenset(self.sums)
