"""Grouped products on trial: problems and inputs.

All that belongs to no group holds NaNs, and so do the weights of groups that have no rows: nothing
of them may get into a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import group_sizes
import jax.numpy as jnp
import numpy as np
from support import cases, random_operands
from support.gpu import Gpu
from support.grouped_results import assert_exact, assert_within_bound, matrix_of_rows
from support.trial import Inputs, run_all

from jax_hopper_gemm.dispatch import problem_violations
from jax_hopper_gemm.dispatch.legality import pairing_violations
from jax_hopper_gemm.gemm.grid import ceil_div
from jax_hopper_gemm.gemm.groups import GroupedAxis, Groups, VarlenAxis
from jax_hopper_gemm.gemm.problem import GemmProblem, MatrixLayout
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import PROMOTION_K, GemmSpec

GAP = 8  # elements after lines and matrices of `problem_of`


@dataclass(frozen=True)
class Layout:
    """Which of an axis's spans belong to groups, and how many matrices they have in all.

    Attributes:
      sizes, period, count, first, step: as in `GroupedAxis` and `Groups`.
      matrices: of weights; W.
    """

    sizes: int
    period: int
    count: int
    first: int
    step: int
    matrices: int

    @classmethod
    def plain(cls, groups: int) -> Layout:
        """What the sizes leave over belongs to none."""
        return cls(groups, groups + 1, groups, 0, 0, groups)

    @classmethod
    def offset(cls, groups: int) -> Layout:
        """The first size counts rows of groups elsewhere."""
        return cls(groups + 1, groups + 2, groups, 1, 0, groups)

    @classmethod
    def batched(cls, batch: int, groups: int, shared: bool) -> Layout:
        """`groups` sizes and the rest, `batch` times; weights of each, or shared."""
        step = 0 if shared else groups
        matrices = groups if shared else batch * groups
        return cls(batch * (groups + 1), groups + 1, groups, 0, step, matrices)

    def of_axis(self, axis: VarlenAxis) -> GroupedAxis:
        rule = Groups(self.period, self.count, self.first, self.step)
        return GroupedAxis(axis, self.sizes, rule)


@dataclass(frozen=True)
class Case:
    """A grouped product for a kernel.

    Attributes:
      exact: whether it is of integers, whose result has one right answer, bit for bit.
    """

    problem: GemmProblem
    spec: GemmSpec
    raster_order: RasterOrder
    sizes: tuple[int, ...]
    seed: int = 0
    exact: bool = False

    def inputs(self) -> Inputs:
        make = integer_inputs if self.exact else normal_inputs
        return make(self.problem, np.array(self.sizes, np.int32), self.seed)

    def run(self, gpu: Gpu, num_sms: int | None = None, repeats: int = 1) -> None:
        """Runs the kernel and checks all that it wrote, and that it wrote nothing else."""
        assert problem_violations(self.problem) + pairing_violations(self.problem, self.spec) == []
        inputs = self.inputs()
        results = run_all(gpu, self.problem, self.spec, self.raster_order, inputs, repeats, num_sms)
        self.check(inputs, results)

    def check(self, inputs: Inputs, results: list[np.ndarray]) -> None:
        """Checks what `trial.run_all` returns.

        Raises:
          AssertionError: a number is wrong.
        """
        check = assert_exact if self.exact else assert_within_bound
        check(self.problem, self.spec, inputs, results, str(self))

    def __str__(self) -> str:
        sizes = f"{list(self.sizes[:40])}{' ...' if len(self.sizes) > 40 else ''}"
        return f"{self.spec.name} on {self.problem} along {self.raster_order}, sizes {sizes}"


def sizes_for(spec: GemmSpec, length: int, sizes: Iterable[int]) -> tuple[int, ...]:
    """Returns sizes of groups as a kernel is given them: whole k-tiles, as `row_blocks` makes them,
    where it needs these."""
    given = tuple(int(size) for size in sizes)
    if spec.grouped == "k" and not spec.spans_k:
        return tuple(ceil_div(min(max(x, 0), length), PROMOTION_K) * PROMOTION_K for x in given)
    return given


def problem_of(
    spec: GemmSpec, layout: Layout, m: int, n: int, k: int, gap: int = GAP
) -> GemmProblem:
    """Returns a problem for `spec`'s kernel.

    Args:
      m, n, k: extents; those along lines are raised to whole multiples of 16 bytes.
      gap: elements after each line and each matrix.

    Where rows are gathered, they come from two thirds as many.
    """
    axis = spec.grouped
    assert axis is not None
    if axis == "k" and not spec.spans_k:
        k = ceil_div(k, PROMOTION_K) * PROMOTION_K
    single, aligned = "ad" if axis == "m" else "ab", cases.alignment(spec)

    def place(major, contiguous: int, other: int, count: int, operand: str) -> MatrixLayout:
        batches = 1 if operand in single else count
        named: Any = operand
        apart = max(gap, aligned) if gap else 0
        return cases.spaced(major, contiguous, other, batches, named, apart, aligned)

    problem = cases.laid_out(spec, m, n, k, layout.matrices, place)
    operands = problem.operands
    if axis == "m":
        operands = tuple(
            replace(at, batch_stride=0) if operand.kind in ("matrix", "column") else at
            for operand, at in zip(spec.graph.operands, operands, strict=True)
        )
    groups = layout.of_axis(axis)
    if spec.gathered:
        length = problem.m if axis == "m" else problem.k
        groups = replace(groups, gathered=spec.gathered, source_rows=length * 2 // 3 + 5)
    return replace(problem, operands=operands, groups=groups)


def edge_cases(spec: GemmSpec, num_sms: int, exact: bool) -> list[Case]:
    """Returns cases at the edges of a kernel.

    In turn: less than one tile; a ring of stages that turns often, groups that end anywhere and
    rows that belong to none; several waves of tiles, so that a persistent grid wraps around, and
    sizes that add up to too much; more groups than a warp searches twice, most of them empty or
    of one row; weights of a batch; groups of other devices before ours; all groups empty; sizes
    that make no sense.
    """
    cluster_m, cluster_n = spec.tile_m * spec.cluster_m, spec.d_tile_n * spec.raster_n
    waves = max(2, math.ceil(2.3 * num_sms / spec.cluster_size))
    long = spec.tile_k * (2 * spec.num_stages + 1) + 24
    if spec.grouped == "m":
        across = max(1, round(math.sqrt(waves * cluster_m / cluster_n)))
        down = ceil_div(waves, across)
        small, middle = (cluster_m // 2 + 3, cluster_n - 7, 9), (3 * cluster_m, cluster_n + 5, long)
        large = (cluster_m * down - 3, cluster_n * across - 5, 2 * spec.tile_k + 8)
        many, few = (5 * 77, cluster_n - 3, spec.tile_k + 8), (2 * cluster_m + 3, 56, 72)
    else:
        across = max(1, round(math.sqrt(waves / 5 * cluster_m / cluster_n)))
        down = ceil_div(waves, 5 * across)
        small, middle = (cluster_m - 3, cluster_n - 7, 9), (cluster_m + 9, cluster_n + 5, 4 * long)
        large = (cluster_m * down + 3, cluster_n * across - 5, 5 * spec.tile_k + 8)
        many, few = (40, 56, 5 * 77), (cluster_m - 3, 56, 4 * spec.tile_k + 3)

    found: list[Case] = []

    def add(
        extents: tuple[int, int, int],
        layout: Layout,
        sizes: Callable[[int], Sequence[int] | np.ndarray],
        along: Literal["m", "n"] = "m",
        swizzle: int = 1,
    ) -> None:
        problem = problem_of(spec, layout, *extents)
        length = problem.m if spec.grouped == "m" else problem.k
        given = sizes_for(spec, length, sizes(length))
        seed = len(found)
        found.append(Case(problem, spec, RasterOrder(along, swizzle), given, seed, exact))

    plain = Layout.plain
    add(small, plain(3), lambda t: [t // 3, 0, 1])
    add(middle, plain(5), lambda t: group_sizes.under(t, 5, 1), "n", 3)
    add(large, plain(5), lambda t: group_sizes.over(t, 5, 2), "m", 8)
    add(many, plain(77), lambda t: np.resize([0, 0, 1, 0, 13], 77), "n", 2)
    batch, offset = Layout.batched(2, 3, shared=False), Layout.offset(4)
    add(middle, batch, lambda t: of_batch(t, 2, [[t, 0, 0], [7, 0, t // 4]]), "n", 2)
    if spec.grouped == "m":
        shared = Layout.batched(3, 4, shared=True)
        add(few, shared, lambda t: of_batch(t, 3, [[1, 2, 3, 4], [0] * 4, [9, 0, 0, t]]))
    add(middle, offset, lambda t: group_sizes.under(t, 5, 3), "m", 4)
    add(few, plain(4), lambda t: [0] * 4)
    for i, make in enumerate(group_sizes.HOSTILE.values()):
        along = "m" if i % 2 == 0 else "n"
        add(few, plain(40), lambda t, make=make, i=i: make(t, 40, i), along, 1 + i)
    return found


def of_batch(length: int, batch: int, sizes: object) -> list[int]:
    """Returns flat sizes of a batch, each with what its part of `length` has left.

    Args:
      sizes: (batch, groups), clipped to the part; the last part takes what does not divide.
    """
    found: list[int] = []
    for i, row in enumerate(np.asarray(sizes, np.int64)):
        left = length // batch + (length % batch if i == batch - 1 else 0)
        for size in row:
            found.append(int(min(max(size, 0), left)))
            left -= found[-1]
        found.append(left)
    return found


def integer_inputs(problem: GemmProblem, sizes: np.ndarray, seed: int) -> Inputs:
    """Returns inputs of integers from -3 to 3, and masks: sums and products are exact."""
    return _poisoned(problem, sizes, random_operands.integer_inputs(problem, seed), seed)


def normal_inputs(problem: GemmProblem, sizes: np.ndarray, seed: int) -> Inputs:
    """Returns inputs of normal random numbers; an average group's products are about 2."""
    terms = problem.k
    if problem.groups and problem.groups.axis == "k":
        terms = max(1, problem.k // problem.l)
    inputs = random_operands.normal_inputs(problem, seed, 2 / math.sqrt(terms))
    return _poisoned(problem, sizes, inputs, seed)


def random_indices(source: int, length: int, seed: int) -> np.ndarray:
    """Returns (length,) int32 indices of `source` rows; one of 16 is of a row that is not there."""
    rng = np.random.default_rng(seed)
    indices = rng.integers(0, source, length)
    absent = rng.random(length) < 1 / 16
    indices[absent] = rng.choice([-1, source, 2**31 - 1, -(2**31)], np.count_nonzero(absent))
    return indices.astype(np.int32)


def _poisoned(problem: GemmProblem, sizes: np.ndarray, inputs: Inputs, seed: int) -> Inputs:
    """Returns the inputs with sizes and indices, and NaNs in all that no result depends on."""
    groups = problem.groups
    assert groups is not None
    matrices = matrix_of_rows(problem, sizes)
    nobody = np.flatnonzero(matrices < 0)
    unused = np.setdiff1d(np.arange(problem.l), matrices)
    alone = {"a": nobody, "b": nobody}  # of each operand's elements along the axis
    if groups.gathered:
        indices = random_indices(groups.source_rows, matrices.size, seed)
        unpicked = np.setdiff1d(np.arange(groups.source_rows), indices[matrices >= 0])
        alone[groups.gathered] = unpicked
        inputs = replace(inputs, indices=indices)

    def spoiled(array: np.ndarray, axis: int, index: np.ndarray, stride: int) -> np.ndarray:
        if array.dtype.kind in "bi" or index.size == 0 or stride == 0:
            return array
        array = array.copy()
        is_float = jnp.issubdtype(array.dtype, jnp.floating)
        np.moveaxis(array, axis, 0)[index] = np.nan if is_float else -7
        return array

    if groups.axis == "k":
        a = spoiled(inputs.a, 2, alone["a"], 1)
        b = tuple(spoiled(x, 1, alone["b"], 1) for x in inputs.b)
        return replace(inputs, a=a, b=b, sizes=sizes)
    operands = []
    for operand, at, array in zip(
        problem.graph.operands, problem.operands, inputs.operands, strict=True
    ):
        if operand.kind in ("matrix", "column"):
            operands.append(spoiled(array, 1, nobody, 1))
        else:
            operands.append(spoiled(array, 0, unused, at.batch_stride))
    return replace(
        inputs,
        a=spoiled(inputs.a, 1, alone["a"], 1),
        b=tuple(spoiled(x, 0, unused, problem.b.batch_stride) for x in inputs.b),
        operands=tuple(operands),
        sizes=sizes,
    )
