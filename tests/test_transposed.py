"""Kernels that compute D's transpose: the exchange of a product's sides, and what follows of it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from support import cases
from support.graphs import STANDARD
from support.places import factor_places, result_places, strides_of
from support.policies import transposed_specs

from jax_hopper_gemm.dispatch import H200, choose, problem_violations
from jax_hopper_gemm.dispatch.candidates import model_specs, tuner_specs, types_of
from jax_hopper_gemm.dispatch.choice import choose_invariant
from jax_hopper_gemm.dispatch.configs import DENSE_CONFIGS, MORE_CONFIGS, Config
from jax_hopper_gemm.dispatch.cost import estimate
from jax_hopper_gemm.dispatch.legality import pairing_violations
from jax_hopper_gemm.dispatch.memory_traffic import best_raster_order
from jax_hopper_gemm.dispatch.model import best_kernel
from jax_hopper_gemm.dispatch.table import Entry, Key, Table, read_table, write_table
from jax_hopper_gemm.gemm import grid
from jax_hopper_gemm.gemm.legality import violations
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.problem_type import ProblemType
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.launch.plan import Int32, TensorMap, make_plan
from jax_hopper_gemm.testing.shapes import Operand

pytestmark = [pytest.mark.pure, pytest.mark.usefixtures("no_tables")]

SPEC = GemmSpec("bfloat16", "bfloat16", "bfloat16", "m", "k", 128, 96, d_major="m")
WIDE = GemmProblem.dense(96, 4096, 4096)  # its transpose is what SPEC runs


def with_epilogue(name: str, spec: GemmSpec = SPEC) -> GemmSpec:
    graph = STANDARD[name]
    loads = 2 if graph.loaded else 0
    d_dtype = graph.matrices[0].dtype if graph.matrices else spec.d_dtype
    return replace(spec, epilogue=graph, d_dtype=d_dtype, epi_load_stages=loads, num_stages=3)


def problems(spec: GemmSpec) -> list[GemmProblem]:
    if spec.nested:
        return [problem for problem, _ in cases.nested_problems(spec)]
    make = cases.stacked_problems if spec.indexed else cases.edge_problems
    return [problem for problem, _ in make(spec, 16)]


@pytest.mark.parametrize("spec", transposed_specs()[::5], ids=lambda spec: spec.name)
def test_a_transpose_has_the_same_elements_in_the_same_places(spec):
    for problem in problems(spec):
        other = problem.transposed
        assert other.transposed == problem and other.d.major == "n"
        pairs: tuple[tuple[Operand, Operand], ...] = ("a", "b"), ("b", "a"), ("d", "d")
        for mine, theirs in pairs:
            batch, row, column = strides_of(problem, mine)
            assert strides_of(other, theirs) == (batch, column, row)
        (a, b, *operands), (right, left, *others) = (
            [place for places in factor_places(p) for place in places] for p in (problem, other)
        )
        assert (a.dtype, b.dtype) == (left.dtype, right.dtype)
        for mine, theirs in zip(operands, others, strict=True):
            assert sorted(mine.axes) == sorted(theirs.axes) and mine.dtype == theirs.dtype
        assert other.flops == problem.flops and other.bytes == problem.bytes


@pytest.mark.parametrize("spec", transposed_specs()[::5], ids=lambda spec: spec.name)
def test_a_launch_is_the_same_whichever_way_round_the_problem_is_given(spec):
    exchanged = {0: 1, 1: 0}
    for problem in problems(spec):
        order = RasterOrder("n", 3)
        assert pairing_violations(problem, spec) == []
        assert pairing_violations(problem.transposed, spec) == []
        own, other = (make_plan(p, spec, order, 132) for p in (problem, problem.transposed))
        assert replace(own, params=()) == replace(other, params=())
        for mine, theirs in zip(own.params, other.params, strict=True):
            if not isinstance(theirs, Int32):
                buffer = theirs.buffer
                theirs = replace(theirs, buffer=exchanged.get(buffer, buffer))
            assert mine == theirs
        costs = {estimate(p, spec, order, H200) for p in (problem, problem.transposed)}
        assert len(costs) == 1
        for of in (grid.k_split, grid.launched_clusters):
            assert of(problem, spec, 132) == of(problem.transposed, spec, 132)
        for of in (grid.loaded_bytes, grid.cluster_grid):
            assert of(problem, spec) == of(problem.transposed, spec)
        shapes = [place.shape for place in result_places(problem.transposed, spec)]
        assert shapes[0][-2:] == (problem.n, problem.m)


def test_boxes_of_a_result_lie_along_m():
    d = make_plan(WIDE, SPEC, RasterOrder(), 132).params[2]
    assert isinstance(d, TensorMap)
    assert (d.buffer, d.dims, d.strides) == (2, (4096, 96, 1), (8192, 16))
    assert d.box == (64, 32, 1) and d.swizzle == 128
    single = replace(SPEC, d_dtype="float32")
    (_, _, d, *_) = make_plan(replace(WIDE, d_dtype="float32"), single, RasterOrder(), 132).params
    assert isinstance(d, TensorMap) and d.box == (32, 32, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"d_major": "k"}, "D has major 'k', not 'm' or 'n'"),
        ({"grouped": "m", "a_major": "k"}, "no code for groups"),
        ({"promoted": True}, "promote none"),
        ({"a_dtype": "int8", "b_dtype": "int8", "a_major": "k", "tile_k": 128}, "of int8 and int8"),
        ({"a_dtype": "float32", "b_dtype": "float32", "bf16_terms": 3, "tile_k": 32}, "parts"),
        ({"b_dtype": "int8"}, "of bfloat16 and int8"),
        ({"epilogue": STANDARD["row_sum"]}, "no code for reductions"),
        ({"epilogue": STANDARD["softmax"]}, "no code for reductions"),
        ({"epilogue": STANDARD["gated_silu"]}, "no code for two B's"),
        ({"epilogue": STANDARD["masked"], "epi_load_stages": 2}, "no two neighbours of bool"),
    ],
)
def test_what_no_kernel_stores_along_m_is_named(change, words):
    assert violations(SPEC) == []
    assert any(words in reason for reason in violations(replace(SPEC, **change)))


@pytest.mark.parametrize(
    "problem",
    [
        GemmProblem.grouped("m", 512, 512, 512, 4),
        GemmProblem.grouped("k", 512, 512, 512, 4),
        replace(WIDE, epilogue=STANDARD["sums_alone"]),
        replace(WIDE, epilogue=STANDARD["planes"]),
    ],
)
def test_problems_of_unlike_sides_keep_them(problem):
    assert problem.as_stored("m") is problem
    assert types_of(problem) == (ProblemType.of(problem),)
    assert "the kernel has d_major 'm', the problem 'n'" in pairing_violations(problem, SPEC)


def test_rows_and_columns_of_an_epilogue_exchange_roles():
    spec = with_epilogue("bias")
    problem = cases.padded(spec, 200, 104, 64, 3)
    assert [o.kind for o in problem.graph.operands] == ["row"]
    other = problem.transposed
    assert [o.kind for o in other.graph.operands] == ["column"]
    assert other.graph.nodes == problem.graph.nodes and other.graph.results == problem.graph.results
    assert other.operands[0] == replace(problem.operands[0], major="m")
    assert problem_violations(other) == [] == pairing_violations(other, spec)
    assert STANDARD["everything"].transposed.transposed == STANDARD["everything"]


@pytest.mark.parametrize("name", ["", "bias", "residual", "two_matrices"])
def test_a_few_hundred_rows_lie_on_the_columns_of_a_tile(name):
    graph = STANDARD[name].transposed if name else None
    spec = with_epilogue(name) if name else SPEC
    problem = cases.padded(spec, 4096, 96, 4096).transposed
    assert problem.epilogue == graph and (problem.m, problem.n) == (96, 4096)
    decision = choose(problem, H200, kernel_only=True)
    assert decision.spec and decision.raster_order
    assert decision.spec.d_major == "m" and decision.spec.tile_n in (16, 32, 48, 96)
    assert "of D's transpose" in decision.reason
    along_n, _ = best_kernel(problem, H200, model_specs(ProblemType.of(problem)))
    best, _ = best_kernel(problem, H200)
    assert best and along_n and best.spec == decision.spec and best.cost.ns < along_n.cost.ns


def test_kernels_for_any_width_of_tiles_are_those_of_16_bits():
    configs = set(MORE_CONFIGS) - set(DENSE_CONFIGS)
    for dtype in ("bfloat16", "float16", "float8_e4m3fn"):
        kind = ProblemType(dtype, dtype, "bfloat16", "k", "k")
        found = {replace(Config.of(spec), epi_tile_n=None) for spec in model_specs(kind)}
        assert configs & found == (configs if "16" in dtype else set())


def test_all_kernels_that_may_be_chosen_are_legal():
    kinds = [kind for kind in types_of(WIDE) if kind.d_major == "m"]
    assert kinds == [ProblemType.of(WIDE.transposed)]
    for specs in (model_specs(kinds[0]), tuner_specs(kinds[0])):
        assert specs
        for spec in specs[:: 1 if len(specs) < 200 else 97]:
            assert violations(spec) == [] == pairing_violations(WIDE, spec)


def test_either_order_is_considered_for_any_extents():
    random, transposed = Random(0), 0
    for _ in range(30):
        m, n, k = (8 * random.randint(100, 1000) for _ in range(3))
        best, _ = best_kernel(GemmProblem.dense(m, n, k), H200)
        assert best
        transposed += best.spec.d_major == "m"
    assert 3 < transposed < 27


def test_rows_of_the_same_bits_have_those_of_kernels_along_n():
    """With an epilogue the two kinds have not been compared."""
    wide = GemmProblem.dense(96, 4096, 1024)  # whose K no kernel splits
    biased = cases.padded(with_epilogue("bias"), 4096, 96, 1024).transposed
    for problem in (wide, biased):
        assert choose(problem, H200, kernel_only=True).spec
        spec = choose_invariant(problem, H200).spec
        assert spec and not spec.split_k
        assert spec.epilogue is None or spec.d_major == "n"


def test_a_table_may_hold_them(tmp_path):
    best, _ = best_kernel(WIDE, H200)
    assert best and best.spec.d_major == "m"
    order = best_raster_order(WIDE, best.spec, H200)
    entry = Entry(Key.of(WIDE), "kernel", best.spec, order, 11.0, 12.0)
    path = tmp_path / "table.json"
    write_table(Table.of(H200, [entry]), path)
    assert '"d_major": "m"' in path.read_text()
    assert list(read_table(path).entries.values()) == [entry]


def test_a_matrix_of_a_stack_is_read_by_the_other_operand():
    for named, other in (("a", "b"), ("b", "a")):
        stacked = replace(WIDE, indexed=named, stack=3)
        decision = choose(stacked, H200, kernel_only=True)
        assert decision.spec and decision.raster_order
        assert (decision.spec.d_major, decision.spec.indexed) == ("m", other)
        assert pairing_violations(stacked, decision.spec) == []
        make_plan(stacked, decision.spec, decision.raster_order, 132)
