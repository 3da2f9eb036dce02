"""The choice of the shard of a product that each device of a mesh computes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ..gemm.subscripts import Subscripts
from .mesh import Axes, Mesh

# What a choice between shardings costs, roughly, on one GPU: only the order of choices follows.
BYTES_PER_SECOND = 3e11
FLOPS_PER_SECOND = 6e14


@dataclass(frozen=True)
class Factors:
    """Which letter each dimension of the arrays of a call is; a letter has one extent."""

    factors: tuple[str, ...]  # of the operands multiplied. Letters that `out` lacks are contracted
    out: str  # of their product
    results: tuple[str, ...]  # of the results. Letters of `out` that one lacks are reduced
    others: tuple[str, ...] = ()  # of operands read with the product, behind the sum over devices
    whole: str = ""  # letters along which no device has less than all
    picked: str = ""  # of which a row meets one entry alone: more of them make no more work

    @staticmethod
    def of(subscripts: Subscripts) -> Factors:
        """Returns the letters of a product of two arrays."""
        return Factors((subscripts.lhs, subscripts.rhs), subscripts.out, (subscripts.out,))

    @property
    def arrays(self) -> tuple[str, ...]:
        """Those of all arrays, in the order of the call: factors, others, results."""
        return (*self.factors, *self.others, *self.results)

    @property
    def contracted(self) -> str:
        letters = dict.fromkeys("".join(self.factors))
        return "".join(x for x in letters if x not in self.out + self.whole)

    def axes_by_letter(self, axes: Sequence[Sequence[Axes]]) -> list[dict[str, Axes]]:
        """Returns for each of `arrays` the axes of its letters, from those of its dimensions."""
        pairs = zip(self.arrays, axes, strict=True)
        return [dict(zip(names, each, strict=True)) for names, each in pairs]

    def extents(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """Returns the extent of each letter, of the shapes of `arrays`."""
        pairs = zip(self.arrays, shapes, strict=False)
        return {x: n for names, shape in pairs for x, n in zip(names, shape, strict=True)}


@dataclass(frozen=True)
class Shard:
    """What a device computes of a product, in axes for each letter."""

    axes: dict[str, Axes]  # along which the factors are sharded, and the product of the shards
    # Further axes along which a letter of the product is sharded by the sum over devices.
    scattered: dict[str, Axes]
    summed: Axes  # over which the rest of that adds up

    def result(self, letter: str) -> Axes:
        """Returns the axes of a letter behind the sum over devices."""
        return self.axes[letter] + self.scattered.get(letter, ())

    def arrays(self, letters: Factors) -> list[list[Axes]]:
        """Returns the axes of each dimension of each of `letters.arrays`."""
        factors = [[self.axes[x] for x in names] for names in letters.factors]
        behind = [[self.result(x) for x in names] for names in (*letters.others, *letters.results)]
        return factors + behind


def choose_shard(
    mesh: Mesh,
    letters: Factors,
    extents: dict[str, int],
    itemsizes: Sequence[int],
    given: Sequence[Sequence[Axes]],
) -> Shard:
    """Returns the shard that keeps the factors' shardings and takes least time.

    Args:
      mesh: the devices.
      letters, extents: of the whole product.
      itemsizes: bytes of an element of each of `letters.arrays`, and of the partial products that
        are summed.
      given: how these arrays are sharded outside.
    """
    whole = _Whole(mesh, letters, extents, itemsizes, letters.axes_by_letter(given))
    return min(whole.shards(), key=whole.cost)


@dataclass(frozen=True)
class _Whole:
    """A product whose shards are weighed; see `choose_shard`."""

    mesh: Mesh
    letters: Factors
    extents: dict[str, int]
    itemsizes: Sequence[int]
    outside: list[dict[str, Axes]]  # the axes of the letters of each array outside

    def shards(self) -> Iterator[Shard]:
        """Yields the shards that keep shardings of some arrays; one keeps none."""
        letters = self.letters
        choices = {x: [()] if x in letters.whole else self.choices(x) for x in self.extents}
        wanted: dict[str, Axes] = dict.fromkeys(letters.out, ())
        for known in reversed(self.outside[-len(letters.results) :]):  # the first has the last word
            wanted |= {letter: axes for letter, axes in known.items() if letter in wanted}
        for combination in itertools.product(*choices.values()):
            used = list(itertools.chain.from_iterable(combination))
            if len(set(used)) == len(used):
                yield self.reduced(dict(zip(choices, combination, strict=True)), wanted)

    def choices(self, letter: str) -> list[Axes]:
        """Returns a letter's axes in each array and none, each cut to what divides the extent."""
        known = (axes.get(letter, ()) for axes in self.outside)
        cut = (axes[:length] for axes in known for length in range(len(axes), 0, -1))
        dividing = (axes for axes in cut if self.extents[letter] % self.mesh.count(axes) == 0)
        return [*dict.fromkeys(dividing), ()]

    def reduced(self, axes: dict[str, Axes], wanted: dict[str, Axes]) -> Shard:
        """Returns the shard whose sum over devices lies as `wanted` as far as it can."""
        rest = [axis for letter in self.letters.contracted for axis in axes[letter]]
        scattered: dict[str, Axes] = {}
        for letter in self.letters.out:
            own, asked = axes[letter], wanted[letter]
            further = tuple(itertools.takewhile(rest.__contains__, asked[len(own) :]))
            divides = not self.extents[letter] % self.mesh.count(own + further)
            if asked[: len(own)] == own and further and divides:
                scattered[letter] = further
                rest = [axis for axis in rest if axis not in further]
        return Shard(axes, scattered, tuple(sorted(rest)))

    def cost(self, shard: Shard) -> tuple[int, float]:
        """Returns how many letters lose a sharding that the factors agree on, and seconds.

        A factor is not gathered to save a reduction: that would take memory that the user may not
        have. Where two letters want the same axis, one must give way: time decides.
        """
        letters, mesh = self.letters, self.mesh
        factors = self.outside[: len(letters.factors)]
        wanted = {(letter, axes) for names in factors for letter, axes in names.items()}
        claims = [axis for _, axes in wanted for axis in axes]
        lost = sum(
            _common(shard.axes[letter], axes) != axes
            for letter, axes in wanted
            if letter not in letters.whole
            and all(claims.count(axis) == 1 for axis in axes)
            and all(names.get(letter, axes) == axes for names in factors)
        )
        product = {letter: shard.axes[letter] for letter in letters.out}
        moved, partial_sum = self.moved(shard), self.itemsizes[-1] * self.elements(product)
        if shard.scattered:
            moved += partial_sum
            partial_sum /= mesh.count(itertools.chain(*shard.scattered.values()))
        if shard.summed:
            moved += 2 * partial_sum
        work = {x: n for x, n in self.extents.items() if x not in letters.whole + letters.picked}
        flops = 2 * prod(work.values()) / mesh.count(itertools.chain(*shard.axes.values()))
        return lost, moved / BYTES_PER_SECOND + flops / FLOPS_PER_SECOND

    def moved(self, shard: Shard) -> float:
        """Returns the bytes that a device gathers of operands, and others of its results."""
        inside = self.letters.axes_by_letter(shard.arrays(self.letters))
        operands = len(self.letters.arrays) - len(self.letters.results)
        nbytes = 0.0
        for i, (before, after) in enumerate(zip(self.outside, inside, strict=True)):
            if i >= operands:
                before, after = after, before
            kept = {letter: _common(before[letter], after[letter]) for letter in before}
            if kept != before:
                nbytes += self.itemsizes[i] * self.elements(kept)
        return nbytes

    def elements(self, axes: dict[str, Axes]) -> float:
        """Returns how many elements a device has of an array whose letters have these axes."""
        count = self.mesh.count(itertools.chain(*axes.values()))
        return prod(self.extents[letter] for letter in axes) / count


def _common(left: Axes, right: Axes) -> Axes:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return tuple(axis for axis, _ in pairs)


def sharding_rule(letters: Factors, extents: dict[str, int]) -> str:
    """Returns Shardy's rule of a call: which dimensions are the same letter."""
    further = (f"z_{i}" for i in itertools.count(1))
    names = dict(zip(extents, itertools.chain("ijklmnopqrstuvwxyz", further), strict=False))

    def listed(letters: Iterable[str]) -> str:
        return ", ".join(names[x] for x in letters)

    parts = [f"[{listed(part)}]" for part in letters.arrays]
    count = len(parts) - len(letters.results)
    arrays = f"({', '.join(parts[:count])})->({', '.join(parts[count:])})"
    sizes = ", ".join(f"{names[letter]}={extent}" for letter, extent in extents.items())
    in_results = set("".join(letters.results)) | set(letters.whole)
    reduced = [x for x in extents if x not in in_results]
    whole = [x for x in extents if x in letters.whole]
    kinds = (("reduction", reduced), ("need_replication", whole))
    special = "".join(f" {kind}={{{listed(part)}}}" for kind, part in kinds if part)
    return f"#sdy.op_sharding_rule<{arrays} {{{sizes}}}{special}, custom>"
