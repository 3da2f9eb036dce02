"""A program: equations, and what is known of them whatever its regions are; and a region."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..fusion.residuals import variables
from ..gemm.dtypes import RESULTS, name_of
from .kinds import SUMS, Along, Kind, kind_of, meets


@dataclass(eq=False)
class Region:
    """What one kernel computes."""

    products: tuple[int, ...]  # numbers of the equations of its products, two of a gate
    bits: int  # the same as a mask of products
    outputs: list[Any] = field(default_factory=list)  # the variables that it stores
    kept: list[Any] = field(default_factory=list)  # the last: only what is computed anew reads them
    equations: list[int] = field(default_factory=list)  # numbers, in order, without the products
    operands: list[Any] = field(default_factory=list)  # the other variables that they read
    # Operands that nothing else reads, or that the program may have been given to overwrite: an
    # argument of which the region makes a result.
    last_read: set[Any] = field(default_factory=set)
    sums: set[Along] = field(default_factory=set)  # axes it reduces, "columns": statistics of rows
    whole: bool = True  # whether all that it reads is in memory

    @property
    def content(self) -> Any:
        """What tells a whole region from others of the same program."""
        lists = self.products, self.outputs, self.kept, self.equations, self.operands
        return *map(tuple, lists), frozenset(self.last_read), frozenset(self.sums)


class Program:
    """The equations of a jaxpr and its results."""

    def __init__(self, equations: list[Any], results: list[Any]):
        self.equations, self.results = equations, results
        self.kinds: list[Kind] = [*map(kind_of, equations)]  # regions make another thing of some
        # The variables that each equation reads.
        self.inputs = [tuple(variables(equation.invars)) for equation in equations]
        self.met = [*map(self._met, range(len(equations)))]
        self.makers = {x: i for i, equation in enumerate(equations) for x in equation.outvars}
        self.uses = Counter(x for inputs in self.inputs for x in inputs)
        self.returned = set(variables(results))

    def _met(self, number: int) -> tuple[Any, ...]:
        """Returns what an equation, if it may be elementwise, reads element by element."""
        equation, inputs = self.equations[number], self.inputs[number]
        if self.kinds[number] not in ("elementwise", "layout") and not converts_sums(equation):
            return ()
        met = [x for x in inputs if meets(x, equation)]
        return inputs if len(met) == len(inputs) else tuple(met)


def converts_sums(equation: Any) -> bool:
    """Whether an equation converts integers, as products are sums of, to floats."""
    if equation.primitive.name != "convert_element_type":
        return False
    before, after = (name_of(x[0].aval.dtype) for x in (equation.invars, equation.outvars))
    return before in SUMS and after in RESULTS
