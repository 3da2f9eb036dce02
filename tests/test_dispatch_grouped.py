"""What dispatch chooses for grouped products, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random
from typing import Literal

import pytest
from support.buildable import epilogue_specs
from support.graphs import STANDARD
from support.grouped_problems import AXES, CONTRACTION, ROWS, random_problem, regrouped

from jax_hopper_gemm.dispatch import (
    H200,
    TableError,
    choice,
    choose,
    legal_specs,
    problem_violations,
    table_specs,
)
from jax_hopper_gemm.dispatch.candidates import filled_spec, model_specs
from jax_hopper_gemm.dispatch.configs import GROUPED_K_CONFIGS, GROUPED_M_CONFIGS
from jax_hopper_gemm.dispatch.legality import pairing_violations
from jax_hopper_gemm.dispatch.table import Entry, Key, Table, read_table, write_table
from jax_hopper_gemm.gemm.dtypes import HALVES, RESULTS
from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph, Result
from jax_hopper_gemm.gemm.group_search import MAX_LENGTH
from jax_hopper_gemm.gemm.legality import violations
from jax_hopper_gemm.gemm.problem import GemmProblem, MatrixLayout
from jax_hopper_gemm.gemm.problem_type import ProblemType
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.smem import SMEM_LIMIT
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.launch.plan import make_plan

pytestmark = [pytest.mark.pure, pytest.mark.usefixtures("no_tables")]


@pytest.mark.slow
def test_choices_are_legal_buildable_and_the_same_again():
    random, buildable = Random(30), set(table_specs(H200))
    chosen = set()
    for _ in range(400):
        problem = random_problem(random)
        assert problem_violations(problem) == []
        decision = choose(problem, H200)
        spec, raster_order = decision.spec, decision.raster_order
        assert spec is not None and raster_order is not None and spec in buildable
        assert violations(spec) == [] == pairing_violations(problem, spec)
        assert ProblemType.of_spec(spec) == ProblemType.of(problem)
        plan = make_plan(problem, spec, raster_order, H200.num_sms)
        assert plan.smem_bytes <= SMEM_LIMIT
        assert plan.grid[0] * plan.grid[1] <= H200.num_sms
        choice._choose.cache_clear()
        assert choose(problem, H200, kernel_only=True) == decision
        chosen.add((spec.grouped, spec.tile_m, spec.tile_n, spec.cluster_m, spec.cluster_n))
    assert len(chosen) > 15


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("d_dtype", RESULTS)
def test_every_grouped_configuration_becomes_a_kernel(axis, dtype, d_dtype):
    for b_major in ("n", "k") if axis == "m" else ("n",):
        a_major = "k" if axis == "m" else "m"
        types = ProblemType(dtype, dtype, d_dtype, a_major, b_major, grouped=axis)
        configs = GROUPED_M_CONFIGS if axis == "m" else GROUPED_K_CONFIGS
        specs = [filled_spec(config, types) for config in configs]
        assert list(model_specs(types)) == specs, "none spills or is dropped for narrow rows"
        for spec in model_specs(types):
            assert spec.grouped == axis and spec.tile_scheduler != "single"


def test_what_can_be_chosen_holds_the_grouped_kernels_of_each_dtype():
    pairs = list(product(HALVES, RESULTS))
    found = {(s.grouped, s.a_dtype, s.d_dtype) for s in table_specs(H200)}
    assert found == {(axis, *pair) for axis in (None, *AXES) for pair in pairs}
    half = table_specs(H200, [("float16", "float32")])
    assert {(s.grouped, s.a_dtype, s.d_dtype) for s in half} == {
        (axis, "float16", "float32") for axis in (None, *AXES)
    }


def test_the_tuner_may_try_more_kernels_all_of_them_grouped():
    for problem in (ROWS, CONTRACTION):
        specs = {spec for spec, _ in legal_specs(problem, H200)}
        assert specs > set(model_specs(ProblemType.of(problem)))
        assert {s.grouped for s in specs} == {ProblemType.of(problem).grouped}
        assert {s.tile_scheduler for s in specs} == {"static", "dynamic"}


@pytest.mark.parametrize("axis", AXES)
def test_epilogues_of_grouped_products_have_kernels_that_can_be_built_ahead(axis):
    for name in ("bias", "gated_silu", "residual", "scaled_rows", "softmax"):
        graph = STANDARD[name]
        problem = GemmProblem.grouped(
            axis, 4096, 192, 4096, 8, d_dtype=graph.matrices[0].dtype
        )  # fmt: skip
        layouts = {
            "row": MatrixLayout("n", 0, 192),
            "column": MatrixLayout("m", 0, 4096),
            "matrix": MatrixLayout("n", 192, 192 * 4096),
        }
        operands = tuple(layouts[operand.kind] for operand in graph.operands)
        problem = replace(problem, epilogue=graph, operands=operands)
        decision = choose(problem, H200)
        assert decision.spec is not None, (name, decision.reason)
        assert decision.spec in epilogue_specs(H200, [graph], ["bfloat16"], axis)
        assert decision.spec not in epilogue_specs(H200, [graph], ["bfloat16"])


def test_grouped_products_never_go_to_xla_for_their_shape():
    """XLA's dense products of these extents are preferred to ours."""
    for axis, (m, n, k) in product(AXES, [(4096, 8, 512), (512, 512, 16384), (8, 4096, 4096)]):
        problem = GemmProblem.grouped(axis, m, n, k, 1)
        assert choose(problem, H200).spec is not None


def test_reason_names_the_groups_that_are_assumed():
    reason = choose(ROWS, H200).reason
    assert "if 128 groups have 512 rows on average" in reason and "tiles of" in reason
    assert "if 128 groups have 512 of K on average" in choose(CONTRACTION, H200).reason
    few = GemmProblem.grouped("m", 40, 1536, 2048, 64)
    assert "if 40 groups have 1 rows on average" in choose(few, H200).reason


# Legality


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (regrouped(ROWS, axis="n"), "groups cut the axis 'n'"),
        (GemmProblem.grouped("m", MAX_LENGTH + 1, 64, 64, 2), "M, which is cut into groups, is"),
        (GemmProblem.grouped("k", 64, 64, MAX_LENGTH + 8, 2), "K, which is cut into groups, is"),
        (regrouped(ROWS, num_sizes=0), "0 sizes of groups"),
        (regrouped(ROWS, num_sizes=MAX_LENGTH + 1, period=MAX_LENGTH + 1),
         "sizes of groups, not 1 to"),
        (regrouped(ROWS, first=2), "are 128 runs of every 129, the first of them number 2: there"),
        (regrouped(ROWS, first=-1), "number -1"),
        (regrouped(ROWS, count=0), "groups are 0 runs of every 129"),
        (regrouped(ROWS, step=5), "are 5 matrices, not 0 or 128"),
        (replace(ROWS, l=127), "groups need 128 matrices of B, there are 127"),
        (regrouped(ROWS, num_sizes=2 * 129, step=128),
         "groups need 256 matrices of B, there are 128"),
        (regrouped(CONTRACTION, num_sizes=2 * 129),
         "256 groups write 128: each must be written once"),
        (replace(CONTRACTION, l=129), "D has 129 matrices, but 128 groups write 128"),
        (replace(ROWS, a=MatrixLayout("m", 65536)), "A must be stored (M, K): copy it"),
        (replace(CONTRACTION, b=MatrixLayout("k", 65536)), "stored (K, M) and B (K, N): copy"),
        (replace(ROWS, d=MatrixLayout("n", 1540)), "D is stored (M, N) bfloat16 and its lines"),
        (replace(ROWS, d=MatrixLayout("n", 2**33)), f"{2**34} bytes apart, not a multiple of 16"),
        (replace(CONTRACTION, a=MatrixLayout("m", 2**33)), "A is stored (K, M) bfloat16 and its"),
        (replace(CONTRACTION, b=MatrixLayout("n", 2**33)), "B is stored (K, N) bfloat16 and its"),
        (replace(GemmProblem.grouped("m", 1, 64, 64, 2), d=MatrixLayout("n", 3)), "6 bytes apart"),
        (GemmProblem.grouped("m", 64, 60, 64, 2, b_major="k"), "pad N from 60 to 64"),
        (GemmProblem.grouped("k", 60, 64, 64, 2), "pad M from 60 to 64"),
        (GemmProblem.grouped("m", 0, 64, 64, 2), "M is 0: an empty product"),
        (regrouped(ROWS, gathered="b", source_rows=9),
         "no kernel gathers B by indices where groups cut M"),
        (regrouped(ROWS, gathered="a"), "indices pick among 0 rows"),
        (
            regrouped(
                replace(GemmProblem.grouped("m", 1, 64, 64, 2), a=MatrixLayout("k", 60)),
                gathered="a",
                source_rows=9,
            ),
            "A is stored (M, K) bfloat16 and its lines along K are 120 bytes",
        ),
        (regrouped(replace(CONTRACTION, b=MatrixLayout("n", 2**31)), gathered="b", source_rows=9),
         "B's rows, picked by indices, are 4294967296 bytes apart"),
    ],
)  # fmt: skip
def test_groups_that_no_kernel_serves_say_why(problem, words):
    reasons = problem_violations(problem)
    assert len(reasons) == 1 and words in reasons[0], reasons
    decision = choose(problem, H200, kernel_only=True)
    assert decision.spec is None and words in decision.reason


@pytest.mark.parametrize(
    "problem",
    [
        GemmProblem.grouped("m", 13, 64, 64, 3),  # the grouped axis has no alignment to keep
        GemmProblem.grouped("k", 64, 64, 13, 3),
        GemmProblem.grouped("m", 7, 64, 64, 100),
        regrouped(ROWS, num_sizes=130, period=131, first=1),  # rows of other devices around
        regrouped(ROWS, num_sizes=5 * 129),  # a batch that shares its weights
        regrouped(replace(ROWS, l=5 * 128), num_sizes=5 * 129, step=128),
        regrouped(replace(CONTRACTION, l=5 * 128), num_sizes=5 * 129, step=128),
        regrouped(ROWS, period=128),
        replace(ROWS, a=MatrixLayout("k", 2048, 3), d=MatrixLayout("n", 1536, 0)),
    ],
)
def test_spans_of_any_length_number_and_place_are_legal(problem):
    assert problem_violations(problem) == []


def test_rows_that_are_cut_refuse_reductions_over_blocks_of_rows():
    for name, kind in (("sums_alone", "column_sum"), ("amax", "max")):
        graph = STANDARD[name]
        problem = replace(ROWS, epilogue=graph)
        kinds = {result.kind for result in graph.results}
        reasons = problem_violations(problem)
        assert kind in kinds and any(f"a {kind} of rows that are cut" in r for r in reasons)
        contraction = replace(CONTRACTION, epilogue=graph)
        assert problem_violations(contraction) == []


def test_operands_that_follow_rows_have_no_batch_and_those_of_groups_have():
    bias, residual = STANDARD["bias"], STANDARD["residual"]
    of_groups = replace(ROWS, epilogue=bias, operands=(MatrixLayout("n", 0, 1540),))
    (reason,) = problem_violations(of_groups)
    assert "a row of bfloat16 for each matrix, 3080 bytes apart" in reason
    of_rows = replace(ROWS, epilogue=residual, operands=(MatrixLayout("n", 1536, 3),))
    assert problem_violations(of_rows) == []


def test_pairing_tells_grouped_kernels_apart():
    dense, rows, contraction = (
        model_specs(ProblemType.of(problem))[0]
        for problem in (GemmProblem.dense(64, 64, 64), ROWS, CONTRACTION)
    )
    assert pairing_violations(ROWS, rows) == [] == pairing_violations(CONTRACTION, contraction)
    assert pairing_violations(ROWS, dense) == ["the kernel has grouped None, the problem 'm'"]
    assert "the kernel has grouped 'k', the problem 'm'" in pairing_violations(ROWS, contraction)
    plain = GemmProblem.dense(64, 64, 64)
    assert len(pairing_violations(plain, rows)) == 1
    gathering = replace(rows, gathered="a")
    assert pairing_violations(ROWS, gathering) == ["the kernel has gathered 'a', the problem None"]


def test_more_tiles_than_the_scheduler_counts_are_refused():
    huge = GemmProblem.grouped("m", MAX_LENGTH, 2**18, 64, 8)
    decision = choose(huge, H200)
    assert decision.spec is None or decision.spec.tile_m * decision.spec.tile_n > 64 * 64
    narrow = GemmSpec(
        "bfloat16", "bfloat16", "bfloat16", "k", "n", 64, 16, epi_tile_n=16, grouped="m"
    )
    (reason,) = pairing_violations(huge, narrow)
    assert "clusters of tiles, not under 134217728" in reason
    many = GemmProblem.grouped("k", 2**16, 2**16, 64, 4096)
    assert any("not under 134217728" in r for r in pairing_violations(
        many, replace(narrow, grouped="k", a_major="m")
    ))  # fmt: skip


# Tables


def entry(problem: GemmProblem, prefer: Literal["kernel", "xla"] = "kernel") -> Entry:
    """Returns an entry whose kernel the model does not choose."""
    types = ProblemType.of(problem)
    spec = GemmSpec(
        types.a_dtype, types.b_dtype, types.d_dtype, types.a_major, types.b_major, 128, 96,
        num_stages=6, tile_scheduler="dynamic", grouped=types.grouped,
    )  # fmt: skip
    return Entry(Key.of(problem), prefer, spec, RasterOrder("n", 4), 512.5, 70598.0)


def test_tables_hold_grouped_products_by_the_mean_size_of_their_groups(tmp_path, use_table):
    entries = [entry(p) for p in (ROWS, CONTRACTION)]
    dense = GemmProblem.dense(4096, 4096, 4096)
    plain = replace(entry(dense), spec=replace(entry(dense).spec, grouped=None))
    path = tmp_path / "table.json"
    write_table(Table.of(H200, [*entries, plain], "here"), path)
    table = read_table(path)
    assert set(table.entries.values()) == {*entries, plain}
    assert '"grouped"' not in path.read_text().splitlines()[3], "dense entries come first"
    use_table(path)
    for measured, problem in zip(entries, (ROWS, CONTRACTION), strict=True):
        decision = choose(problem, H200)
        assert decision.source == "user table" and decision.spec == measured.spec
        assert measured.spec in table_specs(H200)
    near = GemmProblem.grouped("m", 60000, 1536, 2048, 128)
    far = GemmProblem.grouped("m", 30000, 1536, 2048, 128)
    fewer = GemmProblem.grouped("m", 65536, 1536, 2048, 64)
    assert choose(near, H200).source == "user table"
    assert choose(far, H200).source == choose(fewer, H200).source == "model"


def test_an_epilogue_rides_on_the_kernel_measured_for_the_grouped_product(tmp_path, use_table):
    write_table(Table.of(H200, [entry(ROWS)], "here"), tmp_path / "table.json")
    use_table(tmp_path / "table.json")
    graph = STANDARD["bias"]
    biased = replace(ROWS, epilogue=graph, operands=(MatrixLayout("n", 0, 1536),))
    decision = choose(biased, H200)
    assert decision.source == "user table" and "rides on its kernel" in decision.reason
    assert decision.spec is not None and decision.spec.epilogue == graph
    assert (decision.spec.tile_n, decision.spec.grouped) == (96, "m")
    assert decision.spec in epilogue_specs(H200, [graph], ["bfloat16"], "m")


def test_keys_stand_for_problems_of_their_own_key():
    random = Random(32)
    for _ in range(200):
        key = Key.of(random_problem(random))
        assert Key.of(key.problem()) == key
        assert problem_violations(key.problem()) == []


def test_a_table_with_another_axis_is_refused(tmp_path):
    path = tmp_path / "table.json"
    write_table(Table.of(H200, [entry(ROWS)], "here"), path)
    path.write_text(path.read_text().replace('"grouped": "m"', '"grouped": "n"'))
    with pytest.raises(TableError, match=r"grouped is 'n', not 'm' or 'k'"):
        read_table(path)


@pytest.mark.parametrize(
    ("problem", "operand"), [(ROWS, "a"), (CONTRACTION, "a"), (CONTRACTION, "b")]
)
def test_kernels_that_gather_can_be_built_ahead(problem, operand):
    gathered = regrouped(problem, gathered=operand, source_rows=8192)
    assert problem_violations(gathered) == []
    decision = choose(gathered, H200)
    assert decision.spec is not None and decision.spec.gathered == operand
    assert violations(decision.spec) == [] == pairing_violations(gathered, decision.spec)
    assert decision.spec in table_specs(H200)
    specs = model_specs(ProblemType.of(gathered))
    assert {spec.gathered for spec in specs} == {operand}
    assert {64, 128} <= {spec.tile_m for spec in specs}  # for few rows and for many
    assert max(spec.tile_m * spec.tile_n for spec in specs) == 128 * 256


def test_a_gathering_kernel_takes_the_configuration_measured_without(tmp_path, use_table):
    write_table(Table.of(H200, [entry(ROWS)], "here"), tmp_path / "table.json")
    use_table(tmp_path / "table.json")
    decision = choose(regrouped(ROWS, gathered="a", source_rows=8192), H200)
    assert decision.source == "user table" and decision.spec is not None
    assert (decision.spec.tile_n, decision.spec.gathered) == (96, "a")
    assert decision.spec in table_specs(H200)


def test_each_matrix_of_results_is_held_to_its_own_stride():
    """Two of one dtype lie apart: one in rows of D, the other in pairs of planes."""
    planes = [Result("matrix", 0, "bfloat16", plane=i, planes=2) for i in range(2)]
    graph = EpilogueGraph(results=(Result("matrix", 0, "bfloat16"), *planes))
    rows = GemmProblem.grouped("m", 4096, 512, 64, 8)
    problem = replace(rows, epilogue=graph, d=MatrixLayout("n", 2**33))
    (reason,) = problem_violations(problem)
    assert "D is stored (M, N) bfloat16 and its rows, cut into groups, are 17179869184" in reason
    assert problem_violations(replace(problem, d=MatrixLayout("n", 512))) == []
