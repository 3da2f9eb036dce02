"""Problems of panels: several right operands side by side, with results of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jax_hopper_gemm.dispatch import H200, choose, problem_violations
from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph, Node, Operand, Result
from jax_hopper_gemm.gemm.grid import cluster_grid, panel_starts
from jax_hopper_gemm.gemm.problem import GemmProblem, MatrixLayout
from jax_hopper_gemm.gemm.problem_type import ProblemType
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.gemm.type_legality import type_violations
from jax_hopper_gemm.launch.params import Int32, Pointer, TensorMap
from jax_hopper_gemm.launch.plan import make_plan


def panels(m: int, k: int, *columns: int) -> GemmProblem:
    return GemmProblem.side_by_side([GemmProblem.dense(m, n, k) for n in columns])


def test_a_plan_has_tensor_maps_of_each_panel_and_says_where_it_begins() -> None:
    problem = panels(512, 256, 300 * 8, 128, 8)
    spec = GemmSpec("bfloat16", "bfloat16", "bfloat16", "k", "n", 128, 128, cluster_n=2, panels=3)
    plan = make_plan(problem, spec, RasterOrder(), 132)
    maps = [x for x in plan.params if isinstance(x, TensorMap)]
    assert [x.buffer for x in maps] == [0, 1, 2, 3, 4, 5, 6]
    assert [x.dims[0] for x in maps] == [256, 2400, 128, 8, 2400, 128, 8]
    assert panel_starts(problem, spec) == [19, 20]
    assert [x.value for x in plan.params if isinstance(x, Int32)][-2:] == [19, 20]
    assert cluster_grid(problem, spec) == (4, 11)  # 21 tiles of columns, two a cluster


def test_a_plan_has_operands_of_each_panel() -> None:
    graph = EpilogueGraph(
        operands=(Operand("row", "bfloat16"), Operand("scalar", "float32")),
        nodes=(Node("add", (0, 1)), Node("mul", (3, 2))),
        results=(Result("matrix", 4, "bfloat16"),),
    )  # fmt: skip
    layouts = MatrixLayout("n", 0), MatrixLayout("n", 0)
    alone = [replace(x, epilogue=graph, operands=layouts) for x in panels(512, 256, 800, 128).apart]
    problem = GemmProblem.side_by_side(alone)
    assert problem.apart == alone and not problem_violations(problem)
    spec = GemmSpec(
        "bfloat16", "bfloat16", "bfloat16", "k", "n", 128, 128, panels=2, epilogue=graph,
        epi_load_stages=2,
    )  # fmt: skip
    plan = make_plan(problem, spec, RasterOrder(), 132)
    maps = [(x.buffer, x.dims[0]) for x in plan.params if isinstance(x, TensorMap)]
    assert maps == [(0, 256), (1, 800), (2, 128), (7, 800), (8, 128), (3, 800), (5, 128)]
    assert [x.buffer for x in plan.params if isinstance(x, Pointer)] == [4, 6]


def test_a_launch_has_no_more_tensor_maps_than_launchers_take() -> None:
    graph = EpilogueGraph(
        operands=(Operand("matrix", "bfloat16"),) * 6,
        nodes=tuple(Node("add", (6 + i if i else 0, 1 + i)) for i in range(6)),
        results=(Result("matrix", 12, "bfloat16"), Result("matrix", 11, "bfloat16")),
    )
    plain = ProblemType("bfloat16", "bfloat16", "bfloat16", "k", "n", epilogue=graph)
    assert not [*type_violations(replace(plain, panels=3))]  # 1 + 3 * (1 + 6 + 2) = 28
    (reason,) = type_violations(replace(plain, panels=4))
    assert reason == "TMA reads and writes 37 arrays, over 28: take several launches"


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ((256,) * 5, "5 right operands, not 1 to 4: take several launches"),
        ((64, 36, 28), "B is stored (K, N) bfloat16 and its lines of N=36 are 72 bytes"),
    ],
)
def test_panels_that_no_kernel_runs_are_refused(columns: tuple[int, ...], reason: str) -> None:
    problem = panels(512, 256, *columns)
    assert any(reason in x for x in problem_violations(problem))
    assert choose(problem, H200).spec is None


def test_lines_of_no_panel_overlap() -> None:
    first, second = panels(512, 256, 64, 128).apart
    narrow = replace(second, d=replace(second.d, leading_stride=64))
    for problems in ([first, narrow], [narrow, first]):
        (reason,) = problem_violations(GemmProblem.side_by_side(problems))
        assert reason == "D's lines of 128 elements are 64 apart and overlap"


def test_panels_are_one_launch_only_where_that_is_expected_to_be_faster() -> None:
    large = choose(panels(16384, 8192, 4096, 4096), H200)
    assert large.spec is None and "one by one" in large.reason
    small = choose(panels(64, 4096, 4096, 1024, 1024), H200)
    assert small.spec and small.spec.panels == 3
