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

    def last_of(read_by: Iterable[int]) -> list[Any]:
        """Returns a variable of each of these equations that no other one of them depends on.

        What another one needs it may overwrite, and XLA would copy that for the barrier. It is the
        largest, a matrix: XLA finishes reductions.
        """
        last = [i for i in sorted(read_by) if not any(depends(x, i) for x in read_by if x != i)]
        outputs = ([x for x in equations[i].outvars if x in stored] for i in last)
        return [max(each, key=lambda x: x.aval.size) for each in outputs]

    return _waiting(equations, makers, waits, last_of)


def _overwritten(equation: Any) -> list[int]:
    """Returns the numbers of the inputs whose memory results of an equation take."""
    if equation.primitive not in (hopper_fused_p, hopper_dots_p):
        return []
    params = equation.params
    first = 1 + (params["num_b"] if "num_b" in params else len(params["functions"]))
    return [first + x for x in equation.params["in_place"] if x is not None]


def _waiting(
    equations: Sequence[Any],
    makers: dict[Any, int],
    waits: dict[int, dict[int, list[int]]],
    last_of: Callable[[Iterable[int]], list[Any]],
) -> list[Any]:
    """Returns equations in order, but for updates, which wait until others have run.

    The arguments are what `updates_ordered` calls so.
    """
    waiting: dict[int, None] = {}
    ordered, done = list[Any](), set[int]()

    def emit(i: int) -> None:
        if i in done:
            return
        waiting.pop(i, None)
        equation, overwritten = equations[i], waits.get(i, {})
        for x in variables(equation.invars) if waiting else ():
            if makers.get(x) in waiting:
                emit(makers[x])
        if before := done.intersection(chain(*overwritten.values())):
            numbers = [x for x, others in overwritten.items() if not before.isdisjoint(others)]
            barrier, equation = _behind(equation, numbers, last_of(before))
            ordered.append(barrier)
        ordered.append(equation)
        done.add(i)

    for i in range(len(equations)):
        if i in waits:
            waiting[i] = None
        else:
            emit(i)
        for update in list(waiting):
            if all(done.issuperset(others) for others in waits[update].values()):
                emit(update)
    for update in list(waiting):
        emit(update)
    return ordered


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
