"""What each variable of a program depends on: products, elementwise or in any way.

Products are bits of masks, in the program's order. `ordered` puts launches among the equations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import permutations
from typing import Any

from ..fusion.op_table import COMPARISONS
from ..fusion.residuals import variables
from .kinds import FUSED_BY_XLA, Along, Kind, along_of, moves_units_alone, nbytes
from .program import Program, converts_sums

_EXACT = ("eq", "ne")
_CHOOSING = ("max", "min", "clamp", "select_n", "convert_element_type")


class Dependences:
    """The dependences of a program's variables on its products.

    Args:
      alone: numbers of products that stay without a region.
    """

    def __init__(self, program: Program, alone: Iterable[int] = ()):
        self.program, self.alone = program, frozenset(alone)
        self.kinds: list[Kind] = []  # of the equations; "other": no region computes them
        self.makers: dict[Any, int] = {}  # by variable that a region may compute
        self.products: list[int] = []  # numbers of the equations that are products, by bit
        self.before: list[int] = []  # by bit, the products that a product depends on
        self.of: dict[Any, int] = {}  # by variable, the products that it depends on in any way
        self.cone: dict[Any, int] = {}  # by variable, those that it depends on elementwise
        # By variable without a cone, those whose rows' statistics it is made of.
        self.statistics: dict[Any, int] = {}
        self._without_products: set[Any] = set()  # matrices that a region may compute
        self._by_xla: set[int] = set()  # elementwise; what they compute is less to read than these
        self._choices: set[int] = set()  # comparisons of numbers with what is made of them
        for number, kind in enumerate(program.kinds):
            self._follow(number, kind)
        self._find_read()

    def _follow(self, number: int, kind: Kind) -> None:
        """Finds an equation's kind here, and what it computes depends on."""
        equation, inputs = self.program.equations[number], self.program.inputs[number]
        converts = kind == "other" and converts_sums(equation)
        if converts and any(self.kind(x) == "product" for x in inputs):
            kind = "elementwise"
        if kind == "product" and number in self.alone:
            kind = "other"
        if self._compares_made(number):
            kind = "other"
            self._choices.add(number)
        depends = joined(self.of, inputs)
        met = self.program.met[number] if kind == "elementwise" else inputs
        cone = joined(self.cone, met) if depends and kind != "other" else 0
        if kind == "layout" and (cone or any(self.kind(x) == "elementwise" for x in inputs)):
            moves = moves_units_alone(equation)
            kind = "elementwise" if moves else "other" if cone else "layout"
        if kind == "reduction" and not cone:
            kind = "other"
        if kind == "product":
            cone = 1 << len(self.products)
            self.products.append(number)
            self.before.append(depends)
            depends |= cone
        elif kind != "elementwise":
            cone = 0
        if not cone and kind in ("elementwise", "layout") and _is_matrix(equation.outvars[0]):
            if kind == "elementwise" and self._is_read_twice(equation.outvars[0], inputs):
                kind = "other"
                self._by_xla.add(number)
            else:
                self._without_products.add(equation.outvars[0])
        self.kinds.append(kind)
        if kind != "other":
            self.makers[equation.outvars[0]] = number
        if not depends:
            return
        self.of |= dict.fromkeys(equation.outvars, depends)
        if cone:
            self.cone |= dict.fromkeys(equation.outvars, cone)
        elif kind == "reduction" and along_of(equation) == "columns":
            self.statistics[equation.outvars[0]] = self.cone[inputs[0]]
        elif kind in ("elementwise", "layout") and (found := joined(self.statistics, inputs)):
            self.statistics |= dict.fromkeys(equation.outvars, found)

    def _is_read_twice(self, variable: Any, made_of: Iterable[Any]) -> bool:
        """Whether a matrix is read more than once, and less to read than what it is made of."""
        if self.program.uses[variable] <= 1:
            return False
        within = self._without_products
        sources = all_behind(made_of, lambda x: self.inputs(x) if x in within else ()) - within
        return nbytes(variable) < sum(map(nbytes, sources))

    def _find_read(self) -> None:
        """Finds what is stored in any case, and what XLA computes where it reads it."""
        read, passing = set[Any](), set[Any]()
        for number, kind in enumerate(self.kinds):
            equation, inputs = self.program.equations[number], self.program.inputs[number]
            if kind == "elementwise":
                met = self.program.met[number]
                if met is not inputs:
                    read.update(x for x in inputs if x not in met)
                if equation.primitive.name in COMPARISONS and self._compares_with_itself(*inputs):
                    read.update(inputs)  # computed anew, what was equal might not be
            elif kind == "layout":
                read.update(x for x in inputs if self.kind(x) != "layout")
            elif kind == "reduction":
                read.update(equation.outvars)
            elif number in self._choices:
                read.update(inputs)
            elif kind == "other" and equation.primitive.name in FUSED_BY_XLA:
                passing.update(() if number in self._by_xla else inputs)
            elif number not in self._by_xla:
                read.update(inputs)
        read |= self.program.returned
        # Variables of regions: arrays in memory, and others that XLA computes where it reads them.
        self.read = self._sorted_by_equation(read)
        self.passing = self._sorted_by_equation(passing - read)

    def _compares_with_itself(self, *compared: Any) -> bool:
        """Whether one side comes from numbers that the other is made of elementwise, in other ways.

        As the largest number of a row, which one of the row's numbers has to equal.
        """
        steps = ("elementwise", "layout")

        def made_of(result: Any) -> set[Any]:  # back to products
            found = all_behind([result], lambda x: self.inputs(x) if self.kind(x) in steps else ())
            return {x for x in found if self.kind(x) in (*steps, "product")}

        return any(self._crosses(x, made_of(other)) for x, other in permutations(compared, 2))

    def _compares_made(self, number: int) -> bool:
        """Whether an equation compares numbers with what is made of them, whatever computes it.

        As max(x, y), which derivatives of JAX before 0.12 compare with x and y. XLA compares what
        is stored: computed anew, with other roundings between, what was equal is not.
        """
        program, name = self.program, self.program.equations[number].primitive.name
        if name not in COMPARISONS:
            return False

        def equal_inputs(x: Any) -> Sequence[Any]:
            maker = program.makers.get(x)
            if maker is None or program.kinds[maker] != "elementwise":
                return ()
            chooses = program.equations[maker].primitive.name in _CHOOSING
            return program.inputs[maker] if chooses or name in _EXACT else ()

        pairs = permutations(set(program.inputs[number]), 2)
        return any(source in all_behind([x], equal_inputs) for x, source in pairs)

    def _crosses(self, variable: Any, numbers: set[Any]) -> bool:
        """Whether a variable depends on one of these, not elementwise alone, and by no product."""

        def inputs(place: tuple[Any, bool]) -> list[tuple[Any, bool]]:
            x, crossed = place
            number = self.program.makers.get(x)
            if number is None or (kind := self.kinds[number]) == "product":
                return []
            crossed = crossed or kind not in ("elementwise", "layout")
            return [(each, crossed) for each in self.program.inputs[number]]

        found = all_behind([(variable, False)], inputs) if numbers else ()
        return any(crossed and x in numbers for x, crossed in found)

    def _sorted_by_equation(self, found: set[Any]) -> list[Any]:
        """Returns the variables that regions may compute, in the order of their equations."""
        return sorted(self.makers.keys() & found, key=self.makers.__getitem__)

    def kind(self, variable: Any) -> Kind:
        """Returns the kind of the equation that computes a variable."""
        number = self.makers.get(variable)
        return "other" if number is None else self.kinds[number]

    def inputs(self, variable: Any) -> tuple[Any, ...]:
        """Returns what the equation of a variable reads."""
        return self.program.inputs[self.makers[variable]]

    def reduces(self, variable: Any) -> Along | None:
        """Returns along which axes a variable is a reduction; None for one that is none."""
        if self.kind(variable) != "reduction":
            return None
        return along_of(self.program.equations[self.makers[variable]])

    def inside(self, variable: Any, bits: int) -> bool:
        """Whether a variable is computed of these products, or of statistics of their rows."""
        return bool((self.cone.get(variable, 0) | self.statistics.get(variable, 0)) & bits)


def all_behind(start: Iterable[Any], made_of: Callable[[Any], Iterable[Any]]) -> set[Any]:
    """Returns these, what `made_of` says that they are made of, and so on."""
    pending, found = [*start], set[Any]()
    while pending:
        x = pending.pop()
        if x not in found:
            found.add(x)
            pending += made_of(x)
    return found


def joined(products: dict[Any, int], read: Iterable[Any]) -> int:
    """Returns the products of all these variables."""
    bits = 0
    for x in read:
        bits |= products.get(x, 0)
    return bits


def dependence(equations: Sequence[Any], among: Iterable[int]) -> Callable[[int, int], bool]:
    """Returns a function that says whether an equation depends on another one of these, `among`."""
    bits = {number: 1 << i for i, number in enumerate(sorted(among))}
    of: dict[Any, int] = {}  # by variable
    found: dict[int, int] = {}
    for number, equation in enumerate(equations):
        mask = joined(of, variables(equation.invars))
        if number in bits:
            found[number] = mask
            mask |= bits[number]
        if mask:
            of.update(dict.fromkeys(equation.outvars, mask))
    return lambda one, other: bool(found[one] & bits[other])


class NoPlace(Exception):
    """A launch, its argument, has no place among equations: it cannot run before what it reads."""


def ordered(
    equations: Sequence[Any],
    launches: Mapping[Any, Any],
    makers: Mapping[Any, Any],
    roots: Iterable[Any],
    stays: Callable[[Any], bool],
) -> list[Any]:
    """Returns the equations of the roots in turn, and before each what it reads, depth first.

    Args:
      equations: by number.
      launches: equations by another name, or in the place of those of these numbers.
      makers: by variable, the number or name of what computes it.
      roots: numbers and names.
      stays: whether an equation has no place but that of a root.

    Raises:
      NoPlace: a launch needs what is computed from its results, or what stays.
    """
    new, done, entered = list[Any](), set[Any](), dict[Any, None]()
    for root in roots:
        pending = [(root, False)]
        while pending:
            name, ready = pending.pop()
            if name in done:
                continue
            equation = launches[name] if name in launches else equations[name]
            if ready:
                new.append(equation)
                done.add(name)
                continue
            if name in entered or (name != root and stays(name)):
                raise NoPlace(next(x for x in reversed(entered) if x in launches and x not in done))
            entered[name] = None
            pending.append((name, True))
            needed = (makers.get(x) for x in variables(equation.invars))
            pending += [(maker, False) for maker in needed if maker is not None]
    return new


def _is_matrix(variable: Any) -> bool:
    return sum(extent > 1 for extent in variable.aval.shape) > 1
