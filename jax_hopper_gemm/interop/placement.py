"""In whose memory the results of products lie: updates of arrays that nothing reads afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from jax import lax
from jax.extend.core import Var

from ..fusion.residuals import variables
from ..primitives.dot import hopper_dot_p
from ..primitives.dots import hopper_dots_p
from ..primitives.fused_primitive import hopper_fused_p
from ..primitives.ragged_dot import hopper_ragged_dot_p
from .dependences import dependence
from .program import Region

LAUNCHED = (hopper_dot_p, hopper_dots_p, hopper_ragged_dot_p, hopper_fused_p)


def in_place(region: Region, equations: Sequence[Any], first: int) -> tuple[int | None, ...]:
    """Returns for each result of a region the operand whose memory it may take, or None.

    It is one that the result is made of and that nothing else reads, as a moment of an optimizer.
    What is made of the fewest chooses first.

    Args:
      equations: of the program.
      first: the number of the region's first operand among those of its kernel.
    """
    if not region.last_read:
        return ()
    made_of: dict[Any, set[Any]] = {x: {x} for x in region.last_read}
    for number in region.equations:
        inputs, outputs = variables(equations[number].invars), equations[number].outvars
        sources = set().union(*(made_of.get(x, ()) for x in inputs))
        made_of.update(dict.fromkeys(outputs, sources))
    numbers = {x: number for number, x in enumerate(region.operands, first)}
    taken: dict[Any, Any] = {}  # operands, by the result
    for output in sorted(region.outputs, key=lambda x: len(made_of.get(x, ()))):
        for operand in region.operands:
            alike = operand in made_of.get(output, ()) and operand.aval == output.aval
            if alike and operand not in taken.values():
                taken[output] = operand
                break
    return tuple(numbers[taken[x]] if x in taken else None for x in region.outputs if taken)


def updates_ordered(equations: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Returns the equations with each update behind all products that read what it overwrites.

    XLA copies an array that something may read after it was overwritten. So an update waits for
    these products: it takes its arrays through a barrier with results of the last of them. It need
    not where it depends on them anyway, and cannot where one of them needs what it computes.

    Args:
      equations: of a jaxpr, in order.
      results: what it returns.
    """
    updates = {i: found for i, x in enumerate(equations) if (found := _overwritten(x))}
    if not updates:
        return list(equations)
    readers: dict[Any, list[int]] = {
        equations[i].invars[number]: [] for i, numbers in updates.items() for number in numbers
    }
    makers = {x: i for i, equation in enumerate(equations) for x in equation.outvars}
    inputs = [dict.fromkeys(variables(equation.invars)) for equation in equations]
    for i, found in enumerate(inputs):
        for x in found:
            if x in readers:
                readers[x].append(i)
    depends = dependence(equations, {*updates, *chain(*readers.values())})
    waits: dict[int, dict[int, list[int]]] = {}  # by update and input, the readers to wait for
    for i, numbers in updates.items():
        for number in numbers:
            others = [x for x in readers[equations[i].invars[number]] if x != i]
            launched = all(equations[x].primitive in LAUNCHED for x in others)
            if launched and not any(depends(x, i) for x in others):
                waits.setdefault(i, {})[number] = [x for x in others if not depends(i, x)]
    if not any(waits.values()):
        return list(equations)
    stored = {*chain(*inputs), *variables(results)}
    return _Waiting(equations, makers, waits, depends, stored).ordered


def _overwritten(equation: Any) -> list[int]:
    """Returns the numbers of the inputs whose memory results of an equation take."""
    if equation.primitive not in (hopper_fused_p, hopper_dots_p):
        return []
    params = equation.params
    first = 1 + (params["num_b"] if "num_b" in params else len(params["functions"]))
    return [first + x for x in equation.params["in_place"] if x is not None]


class _Waiting:
    """Equations in order, but for updates, which wait until others have run.

    Args:
      makers: numbers of the equations, by what they return.
      waits: by the number of an update and of an input that it overwrites, the equations that read
        that input.
      depends: whether one of these equations depends on another one.
      stored: the variables that anything reads.
    """

    def __init__(
        self,
        equations: Sequence[Any],
        makers: dict[Any, int],
        waits: dict[int, dict[int, list[int]]],
        depends: Callable[[int, int], bool],
        stored: set[Any],
    ):
        self._equations, self._makers, self._waits = equations, makers, waits
        self._depends, self._stored = depends, stored
        self._waiting: dict[int, None] = {}
        self._done: set[int] = set()
        self.ordered: list[Any] = []
        for i in range(len(equations)):
            if i in waits:
                self._waiting[i] = None
            else:
                self._emit(i)
            for update in list(self._waiting):
                if all(self._done.issuperset(others) for others in waits[update].values()):
                    self._emit(update)
        for update in list(self._waiting):
            self._emit(update)

    def _emit(self, i: int) -> None:
        if i in self._done:
            return
        self._waiting.pop(i, None)
        equation = self._equations[i]
        for x in variables(equation.invars) if self._waiting else ():
            if self._makers.get(x) in self._waiting:
                self._emit(self._makers[x])
        waits = self._waits.get(i, {})
        before = self._done.intersection(chain(*waits.values()))
        if before:
            numbers = [x for x, others in waits.items() if not before.isdisjoint(others)]
            barrier, equation = _behind(equation, numbers, self._last_of(before))
            self.ordered.append(barrier)
        self.ordered.append(equation)
        self._done.add(i)

    def _last_of(self, readers: Iterable[int]) -> list[Any]:
        """Returns a variable of each of these equations that no other one of them depends on.

        What another one needs it may overwrite, and XLA would copy that for the barrier. It is the
        largest, a matrix: XLA finishes reductions.
        """
        ordered = sorted(readers)
        last = [i for i in ordered if not any(self._depends(x, i) for x in ordered if x != i)]
        read = ([x for x in self._equations[i].outvars if x in self._stored] for i in last)
        return [max(outputs, key=lambda x: x.aval.size) for outputs in read]


def _behind(update: Any, numbers: Sequence[int], others: Sequence[Any]) -> tuple[Any, Any]:
    """Returns a barrier, and an update that takes inputs through it together with others."""
    inputs = [*(update.invars[number] for number in numbers), *others]
    outputs = [Var(x.aval) for x in inputs]
    barrier = update.replace(
        primitive=lax.optimization_barrier_p, params={}, invars=inputs, outvars=outputs
    )
    invars = [*update.invars]
    for number, x in zip(numbers, outputs, strict=False):
        invars[number] = x
    return barrier, update.replace(invars=invars)
