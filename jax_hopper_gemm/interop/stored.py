"""What regions store for others: the least from which these compute what they need anew."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..fusion.residuals import alive_after
from .dependences import Dependences, all_behind
from .program import Region

BOOL_BYTES = 3  # of a stored predicate: XLA makes it from a matrix that a kernel writes


@dataclass
class _Needs:
    """What is computed outside of a region from its variables."""

    equations: set[int] = field(default_factory=set)  # numbers of those that read one
    variables: set[Any] = field(default_factory=set)  # read by XLA, or another region's kernel


class Stored:
    """The variables of a program that are in memory; arguments are as `Regions` has them."""

    def __init__(
        self, dependences: Dependences, regions: dict[int, Region], owners: dict[Any, Region]
    ):
        self._dependences, self._regions, self._owners = dependences, regions, owners
        self._equations, self._inputs = dependences.program.equations, dependences.program.inputs
        self.variables: set[Any] = set(dependences.read)  # stored, whatever computes them
        self.kept: dict[Region, list[Any]] = {}  # stored for what others compute
        needed = self._needed()
        for region in sorted(needed, key=lambda region: region.bits):  # the first products first
            if kept := self._least(region, needed[region]):
                self.kept[region] = kept
                self.variables.update(kept)

    def slice(
        self, wanted: Iterable[Any], region: Region | None
    ) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Yields the equations behind variables, each with the inputs that are computed too.

        It ends at other variables that are in memory, and at the products of the region.
        """
        makers, kinds = self._dependences.makers, self._dependences.kinds
        inside = self._dependences.inside
        seen: set[Any] = set()
        for variable in wanted:
            pending = [variable]
            while pending:
                x = pending.pop()
                number = makers.get(x)
                if number is None or kinds[number] == "product":
                    continue
                stored = x in self.variables and not (region and inside(x, region.bits))
                if x is not variable and (x in seen or stored):
                    continue
                seen.add(x)
                inputs = self._inputs[number]
                yield number, inputs
                pending += inputs

    def _needed(self) -> dict[Region, _Needs]:
        """Returns, by region, what others compute of its variables that are not stored yet."""
        cones = self._dependences.cone
        unstored = {x: cone for x, cone in cones.items() if x not in self.variables}
        owned: dict[Region | None, list[Any]] = {None: []}  # by who computes; None: XLA
        for variable in self._dependences.read:
            owned.setdefault(self._owners.get(variable), []).append(variable)
        owned[None] += self._dependences.passing
        needed: dict[Region, _Needs] = defaultdict(_Needs)
        for owner, wanted in owned.items():
            bits = owner.bits if owner else 0
            for number, inputs in self.slice(wanted, owner):
                by_owner = bits and cones.get(self._equations[number].outvars[0], 0) & bits
                for x in inputs:
                    if x in unstored and not (cone := unstored[x]) & bits:
                        need = needed[self._regions[cone.bit_length() - 1]]
                        if by_owner:
                            need.variables.add(x)
                        else:
                            need.equations.add(number)
        for variable in self._dependences.passing:
            if region := self._last_region(variable):
                needed[region].variables.add(variable)
        return needed

    def _last_region(self, variable: Any) -> Region | None:
        """Returns that of the last product which a variable depends on elementwise."""
        cone = self._dependences.cone.get(variable, 0)
        return self._regions[cone.bit_length() - 1] if cone else None

    def _least(self, region: Region, need: _Needs) -> list[Any]:
        """Returns the fewest bytes of variables from which all that is needed can be computed.

        Of equal ones the last: a rounded argument of an activation has the sign of the exact one,
        the product before its bias may not.
        """
        outs = [self._equations[number].outvars[0] for number in region.products]
        own = set(outs)  # what a kernel can compute
        steps: dict[int, Any] = {}  # its equations among these, by number
        numbers = sorted(need.equations)
        for number in numbers:
            equation = self._equations[number]
            if (
                self._dependences.kinds[number] == "elementwise"
                and self._last_region(equation.outvars[0]) is region
                and all(x in own or self._is_operand(x, region) for x in self._inputs[number])
            ):
                own.update(equation.outvars)
                steps[number] = equation
        end = len(self._equations)
        last = dict.fromkeys(need.variables & own, end)  # by variable, the last that reads it
        for number in numbers:
            for x in self._inputs[number]:
                if x in own and x not in self.variables:
                    last[x] = max(last.get(x, -1), number if number in steps else end)
        first = [x for x in outs if x in last]  # of equally many bytes the last are stored
        return min(reversed([first, *alive_after(first, steps, last)]), key=_bytes_of)

    def _is_operand(self, x: Any, region: Region) -> bool:
        """Whether a kernel can read a variable, or compute it from what it reads.

        It is stored, or made of what is, and none of the region's products comes before it.
        """
        if self._dependences.of.get(x, 0) & region.bits:
            return False
        kind, steps = self._dependences.kind, ("elementwise", "layout")

        def made_of(x: Any) -> Iterable[Any]:
            computed = x not in self.variables and kind(x) in steps
            return self._dependences.inputs(x) if computed else ()

        found = all_behind([x], made_of) - self.variables
        return all(kind(x) in (*steps, "other") for x in found)


def _bytes_of(stored: Iterable[Any]) -> int:
    return sum(BOOL_BYTES if x.aval.dtype == bool else x.aval.dtype.itemsize for x in stored)
