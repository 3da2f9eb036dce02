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

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from ..fusion.flatten import MOVES
from ..gemm.dtypes import QUANTIZED, RESULTS, name_of
from .dependences import Dependences, all_behind
from .kinds import Along
from .program import Region
from .stored import Stored

WRITTEN = RESULTS + QUANTIZED  # dtypes of what regions compute for others


class Regions:
    """The regions of a program.

    Args:
      apart: pairs of products that make no gate.
      unsummed: numbers of products whose regions do not reduce along these axes.
    """

    def __init__(
        self,
        dependences: Dependences,
        apart: Iterable[tuple[int, ...]] = (),
        unsummed: Iterable[tuple[int, Along]] = (),
    ):
        self.dependences, self._program = dependences, dependences.program
        self._apart, self._unsummed = set(apart), set(unsummed)
        self._by_bit = self._paired()
        self._owners = self._given_owners()
        self._stored = Stored(dependences, self._by_bit, self._owners)
        owned: dict[Region, list[Any]] = {x: [] for x in self._by_bit.values()}
        for variable, region in self._owners.items():
            owned[region].append(variable)
        # Those that are more than a product.
        self.regions = [x for x, variables in owned.items() if self._fill(x, variables)]
        self._find_last_read()

    # Gates, and owners.

    def _paired(self) -> dict[int, Region]:
        """Returns regions by bit, gates of two products of one array that meet in a variable."""
        by_bit: dict[int, Region] = {}
        products = self.dependences.products
        for variable in self.dependences.read:
            bits = [*islice(_bits_of(self.dependences.cone.get(variable, 0)), 2)]
            if len(bits) < 2 or any(bit in by_bit for bit in bits):
                continue
            second, first = (products[bit] for bit in bits)
            region = Region((first, second), sum(1 << bit for bit in bits))
            if (
                region.products not in self._apart
                and self._is_a_gate(region)
                and self._computes(region, variable)
            ):
                by_bit.update(dict.fromkeys(bits, region))
        for bit, number in enumerate(products):
            by_bit.setdefault(bit, Region((number,), 1 << bit))
        return by_bit

    def _is_a_gate(self, region: Region) -> bool:
        """Whether two products differ in their right operands alone."""
        one, other = (self._program.equations[number] for number in region.products)
        (lhs, right, *sizes), (same, up, *same_sizes) = one.invars, other.invars
        return (
            lhs is same
            and one.primitive is other.primitive
            and one.params == other.params
            and all(x is y for x, y in zip(sizes, same_sizes, strict=True))
            and right is not up
            and right.aval == up.aval
            and not self.dependences.of.get(up, 0) & region.bits
        )

    def _given_owners(self) -> dict[Any, Region]:
        """Returns, by variable that is read, the region that stores it; XLA computes the others."""
        in_passing, owners = self._found_in_passing(), dict[Any, Region]()
        for variable in self.dependences.read:
            candidates = self._candidates(variable) if variable not in in_passing else ()
            if region := next((x for x in candidates if self._computes(x, variable)), None):
                owners[variable] = region
        return owners

    def _found_in_passing(self) -> set[Any]:
        """Returns statistics of rows that XLA finds in the one pass that needs them.

        As of a softmax whose probabilities alone are read: it holds a row, and reads it once.
        """
        cone, kinds = self.dependences.cone, self.dependences.kinds
        groups: dict[int, list[Any]] = {}
        for variable in self.dependences.read:
            if self.dependences.reduces(variable) == "columns":
                (x,) = self.dependences.inputs(variable)
                groups.setdefault(cone[x].bit_length(), []).append(variable)
        if not groups:
            return set()
        reader = {x: number for number, xs in enumerate(self._program.inputs) for x in xs}

        def meets_rows_once(x: Any) -> bool:
            while x not in cone:
                if self._program.uses[x] != 1 or x in self._program.returned:
                    return False
                number = reader[x]
                if kinds[number] not in ("elementwise", "layout"):
                    return False
                (x,) = self._program.equations[number].outvars
            return True

        return {x for group in groups.values() if all(map(meets_rows_once, group)) for x in group}

    def _candidates(self, variable: Any) -> Iterator[Region]:
        """Yields the regions of the products that a variable depends on elementwise, last first."""
        along, x = self.dependences.reduces(variable), variable
        if along:
            (x,) = self.dependences.inputs(variable)
        seen: set[Region] = set()
        before = 0  # these products come before later ones, which a kernel would have to wait for
        for bit in _bits_of(self.dependences.cone.get(x, 0)):
            region = self._by_bit[bit]
            if along and not self._unsummed.isdisjoint((x, along) for x in region.products):
                return  # what is summed is made there
            if region not in seen and not before & region.bits:
                seen.add(region)
                yield region
            before |= self.dependences.before[bit]

    def _computes(self, region: Region, variable: Any) -> bool:
        """Whether a region can compute a variable: nothing else that it reads comes later."""
        if name_of(variable.aval.dtype) not in WRITTEN:
            return False
        depends = self.dependences
        statistics = depends.statistics if self._sums_exponentials(variable) else {}

        def is_inside(x: Any) -> bool:
            bits = depends.cone.get(x, 0) | statistics.get(x, 0)
            return x is variable or bool(bits & region.bits)

        def made_of(x: Any) -> Sequence[Any]:
            return depends.inputs(x) if is_inside(x) and depends.kind(x) != "product" else ()

        read = (x for x in all_behind([variable], made_of) if not is_inside(x))
        return not any(depends.of.get(x, 0) & region.bits for x in read)

    def _sums_exponentials(self, variable: Any) -> bool:
        """Whether a variable is a sum of exp(x - y), for which a kernel need not know y."""
        makers = self._program.makers
        for name in ("reduce_sum", "exp", "sub"):
            equation = self._program.equations[makers[variable]] if variable in makers else None
            if equation is None or equation.primitive.name != name:
                return False
            variable = equation.invars[0]
        return True

    # The whole of each region.

    def _fill(self, region: Region, owned: Sequence[Any]) -> bool:
        """Fills in a region, which owns these variables; False if it has nothing but a product."""
        region.kept = self._stored.kept.get(region, [])
        region.outputs = [*owned, *(x for x in region.kept if x not in owned)]
        region.sums = {along for x in owned if (along := self.dependences.reduces(x))}
        if not region.outputs:
            return False
        equations, stored, depends = self._program.equations, self._stored, self.dependences
        slice_ = dict(stored.slice(region.outputs, region))
        region.equations = sorted(slice_)
        needed = dict.fromkeys(x for inputs in slice_.values() for x in inputs)
        made = {x for number in (*region.products, *slice_) for x in equations[number].outvars}
        region.operands = [
            x for x in needed
            if (x not in depends.makers or x in stored.variables)
            and not depends.inside(x, region.bits)
        ]  # fmt: skip
        region.whole = made.union(region.operands).issuperset(needed)
        return any(equations[number].primitive.name not in MOVES for number in slice_)

    def _find_last_read(self) -> None:
        inputs_of, results = self._program.inputs, self._program.returned
        readers = Counter(x for region in self.regions for x in region.operands)
        for region in self.regions:
            within = Counter(x for number in region.equations for x in inputs_of[number])
            updates = not results.isdisjoint(region.outputs)
            multiplied = {x for number in region.products for x in inputs_of[number]}
            # NOTE: a kernel reads what it multiplies until its last tile is stored.
            for x in [x for x in region.operands if x not in multiplied]:
                last = self._program.uses[x] == within[x] if x in self._program.makers else updates
                if last and readers[x] == 1 and x not in results:
                    region.last_read.add(x)


def _bits_of(mask: int) -> Iterator[int]:
    """Yields the numbers of a mask's bits, the highest first."""
    while mask:
        bit = mask.bit_length() - 1
        yield bit
        mask ^= 1 << bit
