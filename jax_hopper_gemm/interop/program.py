"""A program: equations, and what is known of them whatever its regions are."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..fusion.residuals import variables
from ..gemm.dtypes import RESULTS, name_of
from .kinds import SUMS, Kind, kind_of, meets


class Program:
    """The equations of a jaxpr and its results.

    Attributes:
      kinds: of the equations; regions make another thing of some.
      inputs: the variables that each equation reads.
      met: of these, those with an element for each one of its result; of an equation that may be
        elementwise.
      makers: by variable, the number of the equation that computes it.
      uses: by variable, how often equations read it.
      returned: the variables among the results.
    """

    def __init__(self, equations: list[Any], results: list[Any]):
        self.equations, self.results = equations, results
        self.kinds: list[Kind] = [*map(kind_of, equations)]
        self.inputs = [tuple(variables(equation.invars)) for equation in equations]
        self.met = [*map(self._met, range(len(equations)))]
        self.makers = {x: i for i, equation in enumerate(equations) for x in equation.outvars}
        self.uses = Counter(x for inputs in self.inputs for x in inputs)
        self.returned = set(variables(results))

    def _met(self, number: int) -> tuple[Any, ...]:
        equation, inputs = self.equations[number], self.inputs[number]
        if self.kinds[number] not in ("elementwise", "layout") and not converts_sums(equation):
            return ()
        shape = equation.outvars[0].aval.shape
        met = [x for x in inputs if x.aval.shape == shape or meets(x, equation)]
        return inputs if len(met) == len(inputs) else tuple(met)


def converts_sums(equation: Any) -> bool:
    """Whether an equation converts integers, as products are sums of, to floats."""
    if equation.primitive.name != "convert_element_type":
        return False
    before, after = (name_of(x[0].aval.dtype) for x in (equation.invars, equation.outvars))
    return before in SUMS and after in RESULTS
