"""The leftover of a function: XLA's steps from a kernel's finished results to the outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..gemm.epilogue_graph import Result
from .axes import Axes
from .flatten import Atom, Constant, Variable


@dataclass(frozen=True)
class Step:
    """XLA's computation of one or more variables, in the order of the program."""

    inputs: tuple[Atom, ...]
    outputs: tuple[Variable, ...]
    compute: Callable[..., Sequence[Any]]  # (finished, *inputs); `finished` maps results to arrays


Finished = dict[Any, Any]  # arrays of `Result`s, whose values are the builder's


def arrange(array: Any, labels: Sequence[str], axes: Axes, variable: Variable) -> Any:
    """Returns an array whose axes are `labels` as the variable that has `axes`."""
    like = array.shape == variable.shape and array.dtype == variable.dtype
    if like and [*labels] == [*axes]:
        return array
    kept = [i for i, label in enumerate(labels) if label in axes]
    array = lax.squeeze(array, [i for i in range(len(labels)) if i not in kept])
    present = [labels[i] for i in kept]
    order = [axis for axis in axes if axis]
    array = lax.transpose(array, [present.index(axis) for axis in order])
    dims = [axes.index(axis) for axis in order]
    array = lax.broadcast_in_dim(array, variable.shape, dims)
    if variable.dtype.name == "bool":
        return array != 0
    return lax.convert_element_type(array, variable.dtype)


def finish(
    kept: dict[Result, tuple[int, ...]],
    spelled: dict[Result, Result],
    steps: tuple[Step, ...],
    operands: tuple[Variable, ...],
    outputs: tuple[Atom, ...],
    *arrays: Any,
) -> list[Any]:
    """Does what `Fusion.finish` says, for the `arrays` that it is given.

    `kept` are the results of the kernel in order, with the shapes of their finished arrays;
    `spelled` has for each result that a step needs the kernel's result that holds it.
    """
    waiting = list(arrays)
    by_source: Finished = {}
    for result, shape in kept.items():
        if result.kind == "row_sumexp":
            by_source[result] = tuple(jnp.reshape(waiting.pop(0), shape) for _ in range(2))
        elif result.plane == 0:
            by_source[result] = jnp.reshape(waiting.pop(0), shape)
    finished = {
        result: by_source[source][0] if result != source else by_source[source]
        for result, source in spelled.items()
        if source in by_source
    }
    values: dict[Variable, Any] = dict(zip(operands, waiting, strict=True))

    def read(atom: Atom) -> Any:
        return atom.array if isinstance(atom, Constant) else values[atom]

    for step in steps:
        results = step.compute(finished, *map(read, step.inputs))
        values.update(zip(step.outputs, results, strict=True))
    return [jnp.asarray(read(atom)) for atom in outputs]
