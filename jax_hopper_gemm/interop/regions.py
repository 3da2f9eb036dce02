"""Regions of a jaxpr: the equations that one kernel computes together with its product.

Between products a program is mostly elementwise. A *region* is one product, or the two of a gate,
with elementwise equations that follow; its outputs are what the rest of the program reads of it.

    outputs that equations of other kinds read          x @ w1 + b, silu(x @ w1) * (x @ w2)
    values from which other regions, and XLA, compute   the argument of an activation, whose
    what they need anew                                 derivative a later kernel computes

Every value belongs to the last product that it depends on elementwise. So a sum of two products is
made where the second is, and the derivative of an activation where its cotangent is.

A region also reduces: rows to their sum, as the gradient of a bias, and columns to statistics of
each row, as those of a softmax: its largest number and the sum of exp(x - largest).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from typing import Any

from ..fusion.residuals import alive_after
from ..gemm.dtypes import QUANTIZED, RESULTS
from .kinds import FUSED_BY_XLA, MOVES, Along, Kind, along_of, moves_units_alone
from .program import Program, converts_sums

BOOL_BYTES = 3  # of a stored predicate: XLA makes it from a matrix that a kernel writes


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


@dataclass
class _Needs:
    """What is computed outside of a region from its variables.

    Attributes:
      equations: numbers of those that read one.
      variables: that XLA reads, or the kernel of another region.
    """

    equations: set[int] = field(default_factory=set)
    variables: set[Any] = field(default_factory=set)


class Regions:
    """The regions of a program.

    Args:
      program: the equations and results of a jaxpr.
      alone: numbers of products that stay without a region.
      apart: pairs of products that make no gate.
      unsummed: numbers of products whose regions do not reduce along these axes.
    """

    def __init__(
        self,
        program: Program,
        alone: Iterable[int] = (),
        apart: Iterable[tuple[int, ...]] = (),
        unsummed: Iterable[tuple[int, Along]] = (),
    ):
        self.program = program
        self.equations, self._inputs_of = program.equations, program.inputs
        self._makers, self._uses = program.makers, program.uses
        self._alone, self._apart, self._unsummed = set(alone), set(apart), set(unsummed)
        self._before: dict[int, int] = {}  # by bit, the products that a product depends on
        self._follow()
        self._find_read()
        self._pair()
        self._give_owners()
        self._cut()
        self.regions = [r for r in self._regions() if self._complete(r)]
        self._find_last_read()

    # What each variable depends on.

    def _follow(self) -> None:
        """Finds each equation's kind here, and of each variable what it depends on."""
        self.kinds: list[Kind] = []
        self._products: list[int] = []  # by bit
        self._without_products: set[Any] = set()  # matrices that kernels' kinds of equations make
        self._by_xla: set[int] = set()  # elementwise; what they compute is less to read than these
        self._depends: dict[Any, int] = {}  # on these products, in any way
        self._cone: dict[Any, int] = {}  # of these products, elementwise
        self._statistics: dict[Any, int] = {}  # made of reductions of what depends on these
        for number, kind in enumerate(self.program.kinds):
            equation, inputs = self.equations[number], self._inputs_of[number]
            if kind == "other" and self._converts_product(number):
                kind = "elementwise"
            if kind == "product" and number in self._alone:
                kind = "other"
            depends = cone = statistics = 0
            for x in inputs:
                depends |= self._depends.get(x, 0)
            if depends and kind != "other":
                for x in inputs:
                    statistics |= self._statistics.get(x, 0)
                for x in self.program.met[number] if kind == "elementwise" else inputs:
                    cone |= self._cone.get(x, 0)
            if kind == "layout" and any(cone or self._kind(x) == "elementwise" for x in inputs):
                moves = moves_units_alone(equation)
                kind = "elementwise" if moves else "other" if cone else "layout"
            if kind == "reduction" and not cone:
                kind = "other"
            if kind == "product":
                cone = 1 << len(self._products)
                self._before[len(self._products)] = depends
                depends |= cone
                self._products.append(number)
            elif kind != "elementwise":
                cone = 0
            if kind in ("elementwise", "layout") and not cone and _is_matrix(equation.outvars[0]):
                (variable,) = equation.outvars
                read_twice = kind == "elementwise" and self._uses[variable] > 1
                if read_twice and _nbytes(variable) < sum(map(_nbytes, self._sources(inputs))):
                    kind = "other"
                    self._by_xla.add(number)
                else:
                    self._without_products.add(variable)
            self.kinds.append(kind)
            for variable in equation.outvars if depends else ():
                self._depends[variable] = depends
                if cone:
                    self._cone[variable] = cone
                elif kind == "reduction" and along_of(equation) == "columns":
                    self._statistics[variable] = self._cone[inputs[0]]
                elif kind in ("elementwise", "layout") and statistics:
                    self._statistics[variable] = statistics

    def _sources(self, made_of: Iterable[Any]) -> set[Any]:
        """Returns what matrices without products are made of in the end."""
        pending, seen = [*made_of], set[Any]()
        while pending:
            x = pending.pop()
            if x not in seen:
                seen.add(x)
                pending += self._inputs(x) if x in self._without_products else ()
        return seen - self._without_products

    def _kind(self, variable: Any) -> Kind:
        number = self._makers.get(variable)
        return "other" if number is None else self.kinds[number]

    def _converts_product(self, number: int) -> bool:
        """Whether an equation converts a product of integers to floats."""
        if not converts_sums(self.equations[number]):
            return False
        return any(self._kind(x) == "product" for x in self._inputs_of[number])

    def _not_met(self, number: int) -> list[Any]:
        """Returns what an elementwise equation reads of other shapes than its result's."""
        inputs, met = self._inputs_of[number], self.program.met[number]
        return [] if met is inputs else [x for x in inputs if x not in met]

    def _reduces(self, variable: Any) -> Along | None:
        """Returns what a variable is a reduction of; None for one that is none."""
        number = self._makers.get(variable)
        if number is None or self.kinds[number] != "reduction":
            return None
        return along_of(self.equations[number])

    def _inputs(self, variable: Any) -> tuple[Any, ...]:
        return self._inputs_of[self._makers[variable]]

    # Variables that are arrays in memory, whatever computes them.

    def _find_read(self) -> None:
        """Finds what is stored in any case, and what XLA computes where it reads it."""
        read: dict[Any, None] = {}
        passing: dict[Any, None] = {}
        for number, (kind, inputs) in enumerate(zip(self.kinds, self._inputs_of, strict=True)):
            if number in self._by_xla:
                continue
            if kind == "reduction":
                inputs = self.equations[number].outvars
            elif kind == "elementwise":
                inputs = self._not_met(number)
            elif kind == "layout":
                inputs = [x for x in inputs if self._kind(x) != "layout"]
            name = self.equations[number].primitive.name
            in_passing = kind == "other" and name in FUSED_BY_XLA
            (passing if in_passing else read).update(dict.fromkeys(inputs))
        read.update(dict.fromkeys(self.program.returned))
        self._read = self._computed(read)
        self._passing = [x for x in self._computed(passing) if x not in read]

    def _computed(self, found: Iterable[Any]) -> dict[Any, None]:
        """Returns the variables that equations of kernels' kinds compute, in their order."""
        computed = [x for x in found if self._kind(x) != "other"]
        return dict.fromkeys(sorted(computed, key=self._makers.__getitem__))

    # Gates, and owners.

    def _pair(self) -> None:
        """Makes a gate of two products of one array that meet in a variable."""
        self._region_of: dict[int, Region] = {}  # by bit
        for variable in self._read:
            bits = [*islice(_bits_of(self._cone.get(variable, 0)), 2)]
            if len(bits) < 2 or any(bit in self._region_of for bit in bits):
                continue
            second, first = (self._products[bit] for bit in bits)
            mask = sum(1 << bit for bit in bits)
            if (first, second) in self._apart or not self._make_a_gate(first, second):
                continue
            region = Region((first, second), mask)
            if self._computes(region, variable):
                self._region_of.update(dict.fromkeys(bits, region))
        for bit, number in enumerate(self._products):
            self._region_of.setdefault(bit, Region((number,), 1 << bit))

    def _make_a_gate(self, first: int, second: int) -> bool:
        """Whether two products differ in their right operands alone."""
        one, other = self.equations[first], self.equations[second]
        (lhs, right, *sizes), (same, up, *same_sizes) = one.invars, other.invars
        return (
            one.primitive is other.primitive
            and one.params == other.params
            and lhs is same
            and all(x is y for x, y in zip(sizes, same_sizes, strict=True))
            and right is not up
            and right.aval == up.aval
            and not self._depends.get(up, 0) >> self._bit(first) & 1
        )

    def _bit(self, number: int) -> int:
        return self._cone[self.equations[number].outvars[0]].bit_length() - 1

    def _give_owners(self) -> None:
        self._owner: dict[Any, Region] = {}
        in_passing = self._found_in_passing()
        for variable in self._read:
            if variable in in_passing:
                continue
            for region in self._candidates(variable):
                if self._computes(region, variable):
                    self._owner[variable] = region
                    region.outputs.append(variable)
                    if along := self._reduces(variable):
                        region.sums.add(along)
                    break

    def _found_in_passing(self) -> set[Any]:
        """Returns statistics of rows that XLA finds in the one pass that needs them.

        As of a softmax whose probabilities alone are read: it holds a row, and reads it once.
        """
        groups: dict[int, list[Any]] = {}
        for variable in self._read:
            if self._reduces(variable) == "columns":
                (x,) = self._inputs(variable)
                groups.setdefault(self._cone[x].bit_length(), []).append(variable)
        if not groups:
            return set()
        reader = {x: number for number, xs in enumerate(self._inputs_of) for x in xs}
        results = self.program.returned

        def meets_rows_once(x: Any) -> bool:
            while x not in self._cone:
                if self._uses[x] != 1 or x in results:
                    return False
                number = reader[x]
                if self.kinds[number] not in ("elementwise", "layout"):
                    return False
                (x,) = self.equations[number].outvars
            return True

        return {x for group in groups.values() if all(map(meets_rows_once, group)) for x in group}

    def _candidates(self, variable: Any) -> Iterator[Region]:
        """Yields the regions of the products that a variable depends on elementwise, last first."""
        cone, along = self._cone.get(variable, 0), self._reduces(variable)
        if along:
            (x,) = self._inputs(variable)
            cone = self._cone[x]
        seen: set[Region] = set()
        before = 0  # these products come before later ones, which a kernel would have to wait for
        for bit in _bits_of(cone):
            region = self._region_of[bit]
            if along and not self._unsummed.isdisjoint((x, along) for x in region.products):
                return  # what is summed is made there
            if region not in seen and not before & region.bits:
                seen.add(region)
                yield region
            before |= self._before[bit]

    def _computes(self, region: Region, variable: Any) -> bool:
        """Whether a region can compute a variable: nothing else that it reads comes later."""
        if variable.aval.dtype.name not in RESULTS + QUANTIZED:
            return False
        statistics = self._statistics if self._sums_exponentials(variable) else {}
        pending, seen = [variable], set()
        while pending:
            x = pending.pop()
            if x in seen:
                continue
            seen.add(x)
            inside = (self._cone.get(x, 0) | statistics.get(x, 0)) & region.bits
            if self._kind(x) == "product" and inside:
                continue
            if inside or x is variable:
                pending += self._inputs(x)
            elif self._depends.get(x, 0) & region.bits:
                return False
        return True

    def _sums_exponentials(self, variable: Any) -> bool:
        """Whether a variable is a sum of exp(x - y), for which a kernel need not know y."""
        for name in ("reduce_sum", "exp", "sub"):
            equation = self.equations[self._makers[variable]] if variable in self._makers else None
            if equation is None or equation.primitive.name != name:
                return False
            variable = equation.invars[0]
        return True

    def _inside(self, variable: Any, region: Region) -> bool:
        """Whether a region computes a variable: of its products, or of their rows' statistics."""
        made_of = self._cone.get(variable, 0) | self._statistics.get(variable, 0)
        return bool(made_of & region.bits)

    # Variables that are stored for others.

    def _slice(
        self, wanted: Iterable[Any], region: Region | None
    ) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Yields the equations behind variables, each with the inputs that are computed too.

        It ends at other variables that are in memory, and at the products of the region.
        """
        seen: set[Any] = set()
        for variable in wanted:
            pending = [variable]
            while pending:
                x = pending.pop()
                number = self._makers.get(x)
                if number is None or self.kinds[number] in ("other", "product"):
                    continue
                if x is not variable:
                    if x in seen:
                        continue
                    if x in self._stored and not (region and self._inside(x, region)):
                        continue
                seen.add(x)
                inputs = self._inputs_of[number]
                yield number, inputs
                pending += inputs

    def _cut(self) -> None:
        """Chooses which variables of each region are stored for what others compute."""
        self._stored: set[Any] = set(self._read)
        needs: defaultdict[Region, _Needs] = defaultdict(_Needs)
        owned: dict[Region | None, list[Any]] = {}
        for variable in (*self._read, *self._passing):
            owned.setdefault(self._owner.get(variable), []).append(variable)
        for x in owned.get(None, ()):
            if x not in self._stored and (region := self._last_region(x)):
                needs[region].variables.add(x)
        for owner, wanted in owned.items():
            bits = owner.bits if owner else 0
            for number, inputs in self._slice(wanted, owner):
                (out,) = self.equations[number].outvars
                by_owner = self._cone.get(out, 0) & bits
                for x in inputs:
                    cone = self._cone.get(x, 0)
                    if cone and not cone & bits and x not in self._stored:
                        need = needs[self._region_of[cone.bit_length() - 1]]
                        if by_owner:
                            need.variables.add(x)
                        else:
                            need.equations.add(number)
        for region in sorted(needs, key=lambda region: region.bits):
            region.kept = self._least(region, needs[region])
            self._stored.update(region.kept)

    def _last_region(self, variable: Any) -> Region | None:
        """Returns that of the last product which a variable depends on elementwise."""
        cone = self._cone.get(variable, 0)
        return self._region_of[cone.bit_length() - 1] if cone else None

    def _least(self, region: Region, need: _Needs) -> list[Any]:
        """Returns the fewest bytes of variables from which all that is needed can be computed.

        Of equal ones the last: a rounded argument of an activation has the sign of the exact one,
        the product before its bias may not.
        """
        outs = [self.equations[number].outvars[0] for number in region.products]
        own = set(outs)  # what a kernel can compute
        numbers = sorted(need.equations)
        steps: list[int] = []
        for number in numbers:
            equation = self.equations[number]
            inputs = self._inputs_of[number]
            if (
                self.kinds[number] == "elementwise"
                and self._last_region(equation.outvars[0]) is region
                and all(x in own or self._is_operand(x, region) for x in inputs)
            ):
                own.update(equation.outvars)
                steps.append(number)
        inner, end = set(steps), len(self.equations)
        last = dict.fromkeys(need.variables & own, end)  # by variable, the last that reads it
        for number in numbers:
            for x in self._inputs_of[number]:
                if x in own and x not in self._stored:
                    last[x] = max(last.get(x, -1), number if number in inner else end)
        best: list[Any] = [x for x in outs if x in last]
        for alive in alive_after(best, {i: self.equations[i] for i in steps}, last):
            if _bytes_of(alive) <= _bytes_of(best):
                best = alive
        return best

    def _is_operand(self, x: Any, region: Region) -> bool:
        """Whether a kernel can read a variable, or compute it from what it reads.

        It is stored, or made of what is, and none of the region's products comes before it.
        """
        if self._depends.get(x, 0) & region.bits:
            return False
        pending, seen = [x], set()
        while pending:
            x = pending.pop()
            kind = self._kind(x)
            if x in seen or kind == "other" or x in self._stored:
                continue
            if kind not in ("elementwise", "layout"):
                return False
            seen.add(x)
            pending += self._inputs(x)
        return True

    # The whole of each region.

    def _regions(self) -> list[Region]:
        return list(dict.fromkeys(self._region_of.values()))

    def _complete(self, region: Region) -> bool:
        """Fills a region in; False if there is nothing but a product."""
        region.outputs += [x for x in region.kept if x not in region.outputs]
        numbers: dict[int, None] = {}
        operands: dict[Any, None] = {}
        for number, inputs in self._slice(region.outputs, region):
            numbers[number] = None
            for x in inputs:
                in_memory = self._kind(x) == "other" or x in self._stored
                if in_memory and not self._inside(x, region):
                    operands[x] = None
        region.equations, region.operands = sorted(numbers), list(operands)
        made = {
            x for number in (*region.products, *numbers) for x in self.equations[number].outvars
        }
        needed = (x for number in numbers for x in self._inputs_of[number])
        region.whole = all(x in made or x in operands for x in needed)
        return any(self.equations[number].primitive.name not in MOVES for number in numbers)

    def _find_last_read(self) -> None:
        results = self.program.returned
        readers = Counter(x for region in self.regions for x in region.operands)
        for region in self.regions:
            within = Counter(x for number in region.equations for x in self._inputs_of[number])
            updates = not results.isdisjoint(region.outputs)
            multiplied = {x for number in region.products for x in self._inputs_of[number]}
            # NOTE: a kernel reads what it multiplies until its last tile is stored.
            for x in [x for x in region.operands if x not in multiplied]:
                last = self._uses[x] == within[x] if x in self._makers else updates
                if last and readers[x] == 1 and x not in results:
                    region.last_read.add(x)


def _is_matrix(variable: Any) -> bool:
    return sum(extent > 1 for extent in variable.aval.shape) > 1


def _nbytes(variable: Any) -> int:
    return prod(variable.aval.shape) * variable.aval.dtype.itemsize


def _bits_of(mask: int) -> Iterator[int]:
    """Yields the numbers of a mask's bits, the highest first."""
    while mask:
        bit = mask.bit_length() - 1
        yield bit
        mask ^= 1 << bit


def _bytes_of(stored: Iterable[Any]) -> int:
    return sum(BOOL_BYTES if x.aval.dtype == bool else x.aval.dtype.itemsize for x in stored)
