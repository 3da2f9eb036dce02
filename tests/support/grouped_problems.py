"""Grouped problems that tests of dispatch share."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from jax_hopper_gemm.gemm.dtypes import HALVES, RESULTS
from jax_hopper_gemm.gemm.groups import VarlenAxis
from jax_hopper_gemm.gemm.problem import GemmProblem

ROWS = GemmProblem.grouped("m", 65536, 1536, 2048, 128)
CONTRACTION = GemmProblem.grouped("k", 2048, 1536, 65536, 128)
DECODE = GemmProblem.grouped("m", 256, 1536, 2048, 64)
AXES: tuple[VarlenAxis, ...] = ("m", "k")


def regrouped(problem: GemmProblem, **changes) -> GemmProblem:
    assert problem.groups
    names = {"period", "count", "first", "step"} & set(changes)
    rule = replace(problem.groups.rule, **{name: changes.pop(name) for name in names})
    return replace(problem, groups=replace(problem.groups, rule=rule, **changes))


def random_problem(random: Random) -> GemmProblem:
    axis = random.choice(AXES)
    length = random.choice([random.randint(1, 300), random.randint(1, 70000), 2**16])
    m, n, k = (8 * random.randint(1, 900) for _ in "mnk")
    problem = GemmProblem.grouped(
        axis, length if axis == "m" else m, n, length if axis == "k" else k,
        random.choice([1, 2, 8, 60, 128, 1000]),
        b_major=random.choice(["n", "k"]) if axis == "m" else "n",
        dtype=random.choice(HALVES),
        d_dtype=random.choice(RESULTS),
    )  # fmt: skip
    if axis == "m" and random.random() < 0.3:  # a batch of sizes, the weights shared
        problem = regrouped(problem, num_sizes=3 * (problem.l + 1))
    return problem
