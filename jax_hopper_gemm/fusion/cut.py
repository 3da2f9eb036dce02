"""The cut of a function of a product: a kernel computes one part, XLA the leftover after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..gemm.dtypes import DTYPES
from ..gemm.epilogue_graph import EpilogueGraph, Node, Result
from . import op_table
from .axes import REDUCTIONS, Axes, Place
from .flatten import Atom, Constant, Equation, NotFusable, Program, Variable, flatten
from .graph_builder import Builder
from .leftover import Finished, Step, arrange, finish
from .segments import GroupedProgram, GroupedRows
from .tracker import Reduction, Stack, SumExp, Tracker

TILE_LIMIT = 256  # columns of the widest tile

# Operations that move no data, or that XLA leaves out.
_FREE = {
    "broadcast_in_dim", "reshape", "squeeze", "optimization_barrier", *op_table.SAME,
}  # fmt: skip
_KNOWN = {*REDUCTIONS, "transpose"}  # to kernels, besides operations on elements
_EXACT = {*_FREE, "abs", "convert_element_type", "neg", "transpose"}  # the same bits anywhere


@dataclass(frozen=True)
class Fusion:
    """A function of a product, cut in two."""

    graph: EpilogueGraph  # what the kernel computes
    # For each operand of the graph, the number of the function's, which XLA converts to its dtype.
    operands: tuple[int, ...]
    # For each, the letters of the result that it varies along, by its axes of extent over 1.
    labels: tuple[str, ...]
    # For each result of the graph, the letters of the finished array: all of the result's for a
    # matrix; without those of N for row_*, of M for column_sum, none for max; a "?" is the axis of
    # top_k, or of the two planes of one array, which have an entry each.
    results: tuple[tuple[str, ...], ...]
    # Operations on whole matrices that XLA computes after the kernel, and those no kernel supports.
    uncovered: tuple[str, ...]
    # finish(*finished, *operands) gives the function's outputs, a list. `finished` holds an array
    # for each result in order, two (largest, sum) for row_sumexp, one for the two planes of one
    # array; `operands` are all of the function's.
    finish: Callable[..., list[Any]]


def fuse(
    jaxpr: Any,
    num_accumulators: int,
    out: str,
    m: str,
    n: str,
    tile_limit: int = TILE_LIMIT,
    rows: GroupedRows | None = None,
) -> Fusion:
    """Cuts a function of accumulators into a kernel's graph and XLA's leftover.

    Equal jaxprs give equal graphs.

    Args:
      jaxpr: closed, of f(acc, *operands) or f(gate, up, *operands), accumulators float32.
      num_accumulators: 1 or 2.
      out: a letter for each axis of an accumulator.
      m, n: the letters that are rows and columns of one matrix; the others count matrices.
      tile_limit: columns up to which a kernel holds whole rows, as softmax and top-k need.
      rows: for a ragged product, how the function refers to the groups of its rows, the axes `m`,
        which come first. The letters of groups appear in `Fusion.labels`.

    Raises:
      NotFusable: the accumulators are not float32 or not used, or the function closes over an
        array.
    """
    program = flatten(jaxpr)
    accumulators = program.inputs[:num_accumulators]
    for accumulator in accumulators:
        if accumulator.dtype.name not in ("float32", *op_table.SUMS):
            raise NotFusable(f"the product is {accumulator.dtype.name}; kernels add up in float32")
    place = Place(out, m, n, accumulators[0].shape, tile_limit)
    grouped = GroupedProgram(program, num_accumulators, rows) if rows else None
    tracker = Tracker(program, place, Builder(num_accumulators, out), grouped)
    if not any(map(tracker.depends, program.outputs)):
        raise NotFusable("no output of the function depends on the product")
    cuts = [_Cut(program, tracker, late) for late in (False, True)]
    return min(cuts, key=lambda cut: (cut.compares_other_bits, cut.stored_bytes)).fusion()


class _Cut:
    """One way to cut a program: which values the kernel stores, and the steps that follow.

    Intermediate matrices that XLA needs are stored as late as possible, or recomputed from the
    accumulators (`from_accumulators`), whichever stores less. But what XLA recomputes may differ
    from the kernel's in the last bit: it should not be compared with the kernel's reductions, as
    the derivative of a maximum compares each element.
    """

    def __init__(self, program: Program, tracker: Tracker, from_accumulators: bool):
        self._program, self._tracker = program, tracker
        self._builder, self._place = tracker.builder, tracker.place
        self._operands = program.inputs[self._builder.num_accumulators :]
        self._from_accumulators = from_accumulators
        self._matrices: list[Result] = []
        self._others: list[Result] = []
        self._steps: dict[Equation | Variable, Step] = {}
        self._known: set[Variable] = set(self._operands)
        self._arranged: set[str] = set()
        for atom in program.outputs:
            if isinstance(atom, Variable) and atom not in self._known:
                self._output(atom)
        for atom in program.outputs:
            self._need(atom)
        for equation in program.equations:
            if equation.kept:
                self._evaluate(equation)

    @property
    def compares_other_bits(self) -> bool:
        """Whether XLA compares what it recomputes with a reduction that the kernel computed."""
        tracker = self._tracker
        reduced: set[Atom] = {x for x, made in tracker.results.items() if type(made) is not Stack}
        recomputed: set[Atom] = set()
        for equation in self._program.equations:
            if equation not in self._steps:
                continue
            if not reduced.isdisjoint(equation.inputs):
                compares = equation.name in op_table.COMPARISONS
                if compares and not recomputed.isdisjoint(equation.inputs):
                    return True
                reduced.update(equation.outputs)
            elif equation.name not in _EXACT or not recomputed.isdisjoint(equation.inputs):
                recomputed.update(x for x in equation.outputs if tracker.depends(x))
        return False

    @property
    def stored_bytes(self) -> int:
        """Bytes stored for each element of D."""
        return sum(DTYPES[result.dtype].itemsize for result in self._matrices)

    def fusion(self) -> Fusion:
        requested = [*self._matrices, *self._others]
        sums = {replace(x, kind="row_max"): x for x in self._others if x.kind == "row_sumexp"}
        spelled = [sums.get(result, result) for result in requested]  # a row_max is part of one
        kept = list(dict.fromkeys(spelled))
        graph, leaves = self._builder.graph(kept)
        order = {equation: i for i, equation in enumerate(self._program.equations)}
        producers = self._tracker.producers

        def position(made: Equation | Variable) -> int:
            equation = made if isinstance(made, Equation) else producers.get(made)
            return order[equation] if equation else -1

        steps = [self._steps[made] for made in sorted(self._steps, key=position)]
        return Fusion(
            graph,
            operands=tuple(leaf.index for leaf in leaves),
            labels=tuple(leaf.labels for leaf in leaves),
            results=tuple(map(self._labels, kept)),
            uncovered=self._uncovered(),
            finish=partial(
                finish, {result: self._shape(result) for result in kept},
                dict(zip(requested, spelled, strict=True)), tuple(steps),
                self._operands, self._program.outputs,
            ),
        )  # fmt: skip

    def _labels(self, result: Result) -> tuple[str, ...]:
        out, m, n = self._place.out, self._place.all_m, self._place.all_n
        if result.kind == "max":
            return ()
        if result.kind == "column_sum":
            return tuple(letter for letter in out if letter not in m)
        if result.kind != "matrix":
            kept = tuple(letter for letter in out if letter not in n)
            return (*kept, "?") if result.kind.startswith("top_k") else kept
        return tuple(out) if result.planes == 1 else (*out[: -len(n)], "?", *n)

    def _shape(self, result: Result) -> tuple[int, ...]:
        """Returns the finished array's shape; -1 stands for the axis "?"."""
        return tuple(self._place.extents.get(x, -1) for x in self._labels(result))

    # Stored matrices.

    def _output(self, variable: Variable) -> None:
        """Requests an output of the function if the kernel can store it directly."""
        tracked = self._tracker.tracked.get(variable)
        if not self._tracker.may_store(variable):
            return
        if isinstance(stack := self._tracker.results.get(variable), Stack):
            self._take_stack(variable, stack)
        elif tracked and self._tracker.is_matrix(tracked.value):
            dtype = variable.dtype.name
            if dtype in op_table.STORED + op_table.SUMS:
                value = self._before_rounding(tracked.value, dtype)
                self._take_matrix(variable, Result("matrix", value, dtype), tracked.axes)

    def _take_stack(self, variable: Variable, stack: Stack) -> None:
        dtype = variable.dtype.name
        planes = [
            Result("matrix", self._before_rounding(value, dtype), dtype, plane=i, planes=2)
            for i, value in enumerate(stack.values)
        ]
        labels, axes = self._labels(planes[0]), stack.axes
        if planes[0] not in self._matrices:
            self._matrices += planes
        elif planes[1] != self._matrices[self._matrices.index(planes[0]) + 1]:
            return self._evaluate(self._tracker.producers[variable])
        self._arrange(variable, planes[0], labels, axes)

    def _store(self, variable: Variable) -> None:
        """Requests an intermediate matrix for XLA, in the fewest bytes that hold it."""
        tracked, dtype = self._tracker.tracked[variable], variable.dtype.name
        value = tracked.value
        if dtype == "bool":
            value, dtype = op_table.as_number(self._builder, value), "bfloat16"
            self._arranged.add("convert_element_type")
        elif dtype == "float32":
            entry = self._builder.entries[value]
            if isinstance(entry, Node) and entry.op == "convert":
                dtype = entry.params[0]
        value = self._before_rounding(value, dtype)
        self._take_matrix(variable, Result("matrix", value, dtype), tracked.axes)

    def _take_matrix(self, variable: Variable, result: Result, axes: Axes) -> None:
        labels = self._labels(result)
        letters = [axis for axis in axes if axis]
        if letters != [letter for letter in labels if letter in letters]:
            self._arranged.add("transpose")
        if result not in self._matrices:
            self._matrices.append(result)
        self._arrange(variable, result, labels, axes)

    def _before_rounding(self, value: int, dtype: str) -> int:
        """Returns the value that storing as `dtype` rounds to `value`."""
        match self._builder.entries[value]:
            case Node("convert", (x,), (own,)) if own == dtype:
                return x
        return value

    # Other values that an output needs.

    def _need(self, atom: Atom) -> None:
        if isinstance(atom, Constant) or atom in self._known:
            return
        tracker = self._tracker
        made, tracked = tracker.results.get(atom), tracker.tracked.get(atom)
        if isinstance(made, SumExp):
            self._take_sum_of_exp(atom, made)
        elif isinstance(made, Reduction):
            self._take_reduction(atom, made)
        elif isinstance(made, Stack) and tracker.may_store(atom):
            self._take_stack(atom, made)
        elif tracked and tracker.is_matrix(tracked.value) and self._is_stored(atom, tracked.value):
            self._store(atom)
        else:
            self._evaluate(tracker.producers[atom])

    def _is_stored(self, variable: Variable, value: int) -> bool:
        recomputed = self._from_accumulators and variable in self._tracker.producers
        stored = not recomputed or value < self._builder.num_accumulators
        return stored and self._tracker.may_store(variable)

    def _evaluate(self, equation: Equation) -> None:
        if equation in self._steps:
            return
        for atom in equation.inputs:
            self._need(atom)
        step = Step(equation.inputs, equation.outputs, lambda finished, *xs: equation.evaluate(*xs))
        self._known.update(equation.outputs)
        self._steps[equation] = step

    def _make(
        self, variable: Variable, inputs: tuple[Atom, ...], compute: Callable[..., Sequence[Any]]
    ) -> None:
        self._known.add(variable)
        self._steps[variable] = Step(inputs, (variable,), compute)

    def _arrange(
        self, variable: Variable, result: Result, labels: Sequence[str], axes: Axes
    ) -> None:
        self._make(
            variable, (), lambda finished: [arrange(finished[result], labels, axes, variable)]
        )

    def _request(self, result: Result) -> tuple[str, ...]:
        if result not in self._others:
            self._others.append(result)
        return self._labels(result)

    def _take_reduction(self, variable: Variable, reduction: Reduction) -> None:
        result = reduction.result
        labels = self._request(result)
        combine = jnp.max if result.kind.endswith("max") else jnp.sum
        grouped = self._tracker.grouped
        mask = grouped and grouped.mask
        sizes = (grouped.sizes,) if grouped and mask and grouped.sizes else ()

        def compute(finished: Finished, *sizes: Any) -> list[Any]:
            array = finished[result]
            if mask:  # the kernel's reductions include rows of no group
                (array,) = mask.evaluate(array, *sizes)
            reduced = [
                i for i, x in enumerate(labels)
                if x not in reduction.axes and array.shape[i] > 1
            ]  # fmt: skip
            if reduced:
                array = combine(array, axis=tuple(reduced), keepdims=True)
            array = -array if reduction.negated else array
            return [arrange(array, labels, reduction.axes, variable)]

        self._make(variable, sizes, compute)

    def _take_sum_of_exp(self, variable: Variable, sum_exp: SumExp) -> None:
        self._need(sum_exp.center)
        result = Result("row_sumexp", sum_exp.value)
        labels = self._request(result)

        def compute(finished: Finished, center: Any) -> list[Any]:
            largest, total = (
                arrange(array, labels, sum_exp.axes, variable) for array in finished[result]
            )
            if jnp.ndim(center):
                for d in reversed(sum_exp.columns):
                    center = lax.index_in_dim(center, 0, d, keepdims=False)
            shifted = jnp.exp(largest - center)
            return [lax.select(lax.is_finite(largest), total * shifted, shifted)]

        self._make(variable, (sum_exp.center,), compute)

    # For `explain`.

    def _uncovered(self) -> tuple[str, ...]:
        names: list[str] = []
        for equation in self._program.equations:
            reasons = [self._tracker.uncovered.get(v, ()) for v in equation.outputs]
            if equation not in self._steps or not any(map(self._tracker.depends, equation.outputs)):
                continue
            covered = op_table.covered(equation.name) or equation.name in _KNOWN
            arrays = [*equation.inputs, *equation.outputs]
            whole = any(prod(atom.shape) >= self._place.size for atom in arrays)
            if equation.name not in _FREE and (whole or not covered):
                names += [*chain(*reasons), equation.name]
        return tuple(dict.fromkeys((*names, *sorted(self._arranged))))
