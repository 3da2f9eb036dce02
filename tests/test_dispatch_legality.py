"""Which problems and kernels are legal, and which kernels are considered."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from support.graphs import STANDARD

from jax_hopper_gemm.dispatch import problem_violations
from jax_hopper_gemm.dispatch.candidates import filled_spec, model_specs, tuner_specs
from jax_hopper_gemm.dispatch.configs import DENSE_CONFIGS, Config
from jax_hopper_gemm.dispatch.legality import pairing_violations
from jax_hopper_gemm.gemm.dtypes import DTYPES, OPERANDS, RESULTS
from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph
from jax_hopper_gemm.gemm.legality import violations
from jax_hopper_gemm.gemm.problem import GemmProblem, Major, MatrixLayout
from jax_hopper_gemm.gemm.problem_type import ProblemType
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.smem import SMEM_LIMIT
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.launch.plan import TensorMap, make_plan

pytestmark = pytest.mark.pure

A_MAJORS: tuple[Major, ...] = ("k", "m")
B_MAJORS: tuple[Major, ...] = ("n", "k")
TYPES = [
    ProblemType(dtype, dtype, d_dtype, a_major, b_major)
    for dtype, d_dtype, a_major, b_major in product(OPERANDS, RESULTS, A_MAJORS, B_MAJORS)
    if {a_major, b_major} <= set(DTYPES[dtype].majors)
]


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (GemmProblem.dense(64, 64, 4100), ["A", "8200 bytes", "pad K from 4100 to 4104"]),
        (GemmProblem.dense(64, 4100, 64), ["B", "8200 bytes", "pad N from 4100 to 4104"]),
        (GemmProblem.dense(9, 64, 64, a_major="m"), ["(K, M)", "18 bytes", "pad M from 9 to 16"]),
        (GemmProblem.dense(64, 64, 9, b_major="k"), ["(N, K)", "18 bytes", "pad K from 9 to 16"]),
        (
            GemmProblem.dense(64, 64, 64, a_major="m", dtype="float32"),
            ["A is float32, which", "along K alone"],
        ),
        (GemmProblem.dense(64, 64, 64, d_dtype="int32"), ["D is int32: ask for"]),
        (GemmProblem.dense(64, 0, 64), ["N is 0", "empty"]),
        (GemmProblem.dense(64, 64, 64, 0), ["L is 0", "empty"]),
        (GemmProblem.dense(2**31, 8, 8), ["M is 2147483648, over 2147450880"]),
        (GemmProblem.dense(64, 64, 64, a_major="n"), ["A has major 'n', not 'm' or 'k'"]),
    ],
)
def test_unaddressable_problems_say_what_came_and_the_way_out(problem, words):
    reasons = problem_violations(problem)
    assert reasons
    for word in words:
        assert any(word in reason for reason in reasons), reasons


def with_layout(
    operand: str, layout: MatrixLayout, *, m: int = 64, k: int = 64, batches: int = 2
) -> GemmProblem:
    problem = GemmProblem.dense(m, 64, k, batches)
    return replace(problem, **{operand: layout})


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (with_layout("a", MatrixLayout("k", 65, 0), k=65), "lines of K=65 are 130 bytes"),
        (with_layout("a", MatrixLayout("k", 68, 8192)), "136 bytes apart, not a multiple of 16"),
        (with_layout("b", MatrixLayout("n", 64, 4100)), "its matrices are 8200 bytes apart"),
        (with_layout("b", MatrixLayout("n", 2**39, 0)), "not under 2**40"),
        (with_layout("a", MatrixLayout("k", 0, 0)), "0 bytes apart: make a compact copy"),
        (with_layout("a", MatrixLayout("k", 64, -64)), "-128 bytes apart: make a compact copy"),
        (with_layout("d", MatrixLayout("n", 64, 0)), "overwrite each other"),
        (with_layout("d", MatrixLayout("n", 32, 4096)), "are 32 apart and overlap"),
    ],
)
def test_strides_that_tma_cannot_take_are_named(problem, words):
    (reason,) = problem_violations(problem)
    assert words in reason


@pytest.mark.parametrize(
    "problem",
    [
        GemmProblem.dense(64, 64, 64),
        with_layout("a", MatrixLayout("k", 3, 0), m=1, batches=1),  # its stride is never used
        with_layout("a", MatrixLayout("k", 72, 0)),
        with_layout("b", MatrixLayout("n", 64, 0)),
        with_layout("d", MatrixLayout("n", 72, 72 * 64)),
        with_layout("b", MatrixLayout("n", 64, 3), batches=1),
    ],
)
def test_strides_that_are_unused_or_padded_are_legal(problem):
    assert problem_violations(problem) == []


def test_pairing_names_each_field_that_differs():
    spec = GemmSpec("float16", "float16", "float16", "m", "n", 128, 128)
    reasons = pairing_violations(GemmProblem.dense(64, 64, 64), spec)
    assert [reason.split()[3] for reason in reasons] == ["a_dtype", "b_dtype", "d_dtype", "a_major"]


@pytest.mark.parametrize("types", TYPES, ids=str)
def test_every_model_configuration_becomes_a_legal_kernel(types):
    integers = types.a_dtype == "int8"  # whose partial sums no kernel adds up
    configs = [config for config in DENSE_CONFIGS if not (integers and config.split_k)]
    specs = [filled_spec(config, types) for config in configs]
    assert None not in specs
    assert set(specs) <= set(model_specs(types)), "none is dropped for its narrow rows"
    for spec in model_specs(types):
        assert violations(spec) == []


@pytest.mark.parametrize("types", TYPES[:4] + TYPES[-4:], ids=str)
def test_every_tuner_candidate_is_legal_and_fills_shared_memory(types):
    specs = tuner_specs(types)
    assert len(set(specs)) == len(specs)
    assert set(model_specs(types)) <= set(specs)
    for spec in specs:
        assert violations(spec) == []
        full = spec.smem_bytes + spec.stage_bytes > SMEM_LIMIT
        assert full or spec.num_stages == 12
        problem = GemmProblem.dense(
            512, 512, 512, a_major=types.a_major, b_major=types.b_major,
            dtype=types.a_dtype, d_dtype=types.d_dtype,
        )  # fmt: skip
        inputs = make_plan(problem, spec, RasterOrder(), 132).params[:2]
        narrow = [m.buffer for m in inputs if isinstance(m, TensorMap) and m.swizzle < 64]
        assert narrow == [] or (narrow == [1] and spec.tile_n == 16)


# Epilogues


def with_epilogue(name: str, *layouts: MatrixLayout, **changes) -> GemmProblem:
    graph = STANDARD[name]
    d_dtype = graph.matrices[0].dtype if graph.matrices else "bfloat16"
    problem = GemmProblem.dense(64, 64, 64, 2, d_dtype=d_dtype)
    return replace(problem, epilogue=graph, operands=layouts, **changes)


ROW, COLUMN = MatrixLayout("n", 0, 0), MatrixLayout("m", 0, 0)
MATRIX = MatrixLayout("n", 64, 4096)


def narrow(problem: GemmProblem, n: int) -> GemmProblem:
    """Returns the problem with N columns, B stored (N, K), so that B asks nothing of N."""
    return replace(problem, n=n, b=MatrixLayout("k", 64, 0), d=MatrixLayout("n", 64, 4096))


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (with_epilogue("bias"), "has 1 operands, 0 are described"),
        (with_epilogue("bias", ROW, ROW), "has 1 operands, 2 are described"),
        (with_epilogue("bias", COLUMN), "a row, has major 'm', not 'n'"),
        (with_epilogue("bias", MatrixLayout("n", 0, 60)), "a row of bfloat16 for each matrix, 120"),
        (with_epilogue("bias", MatrixLayout("n", 0, -64)), "batch stride -64"),
        (with_epilogue("scaled_rows", ROW), "a column, has major 'n', not 'm'"),
        (with_epilogue("scaled_rows", MatrixLayout("m", 0, 66)), "264 bytes apart, not a multiple"),
        (with_epilogue("residual", MatrixLayout("m", 64, 4096)), "a matrix, has major 'm'"),
        (with_epilogue("residual", MatrixLayout("n", 68, 4608)), "operand 0 is stored (M, N)"),
        (with_epilogue("residual", MatrixLayout("n", 64, 4100)), "its matrices are 8200 bytes"),
        (narrow(with_epilogue("masked", MATRIX), 56), "operand 0 is stored (M, N) bool"),
        (narrow(with_epilogue("residual_float32", MATRIX), 6), "lines of N=6 are 24 bytes"),
        (with_epilogue("bias", ROW, d_dtype="float32"), "D is float32, the epilogue's first"),
        (narrow(with_epilogue("planes"), 60), "and gate and up side by side: pad N"),
        (with_epilogue("bias", ROW, up_offset=64), "the product has one right operand"),
        (with_epilogue("planes", up_offset=68), "up lies 136 bytes behind gate"),
        (replace(with_epilogue("bias", ROW), epilogue=EpilogueGraph()), "epilogue: no results"),
    ],
)
def test_epilogues_that_no_kernel_runs_say_why(problem, words):
    reasons = problem_violations(problem)
    assert any(words in reason for reason in reasons), reasons


@pytest.mark.parametrize(("name", "n"), [("softmax", 264), ("top_k", 512)])
def test_whole_rows_must_fit_a_tile(name, n):
    problem = with_epilogue(name)
    fits = GemmProblem.dense(64, 256, 64, d_dtype=problem.d_dtype)
    long = GemmProblem.dense(64, n, 64, d_dtype=problem.d_dtype)
    fits, long = (replace(p, epilogue=problem.epilogue) for p in (fits, long))
    assert problem_violations(fits) == []
    (reason,) = problem_violations(long)
    assert f"N is {n}" in reason and "up to 256 columns" in reason
    spec = next(s for s in model_specs(ProblemType.of(fits)) if s.tile_n == 128)
    assert pairing_violations(fits, spec) == [
        "rows of 256 columns do not fit the kernel's tile of 128"
    ]


@pytest.mark.parametrize(
    "problem",
    [
        with_epilogue("bias", ROW),
        with_epilogue("bias", MatrixLayout("n", 3, 72)),  # a row has no leading stride
        replace(with_epilogue("scaled_rows", MatrixLayout("m", 0, 3)), l=1),
        with_epilogue("scaled_rows", MatrixLayout("m", 0, 68)),
        with_epilogue("alpha_beta", MatrixLayout("n", 0, 1), MatrixLayout("n", 0, 0), MATRIX),
        with_epilogue("residual", MatrixLayout("n", 72, 0)),
        with_epilogue("planes", up_offset=64),
        narrow(with_epilogue("sums_alone"), 61),  # nothing of D is stored
    ],
)
def test_epilogues_with_padded_shared_and_unused_strides_are_legal(problem):
    assert problem_violations(problem) == []


def test_pairing_tells_epilogues_apart():
    problem = with_epilogue("bias", ROW)
    (spec, *_) = model_specs(ProblemType.of(replace(problem, epilogue=STANDARD["bias_silu"])))
    (reason,) = pairing_violations(problem, spec)
    assert reason.startswith("the kernel's epilogue is logistic_")
    plain = replace(problem, epilogue=None, operands=())
    assert len(pairing_violations(plain, spec)) == 1


@pytest.mark.parametrize("name", STANDARD)
def test_every_standard_epilogue_has_kernels_of_every_layout(name):
    graph = STANDARD[name]
    d_dtype = graph.matrices[0].dtype if graph.matrices else "bfloat16"
    for a_major, b_major in product(("k", "m"), ("n", "k")):
        types = ProblemType("bfloat16", "bfloat16", d_dtype, a_major, b_major, epilogue=graph)
        specs = model_specs(types)
        assert len(specs) >= 10
        for spec in specs:
            assert violations(spec) == []
            assert (spec.epi_load_stages >= 2) == bool(graph.loaded)
            full = spec.smem_bytes + 2 * spec.stage_bytes > SMEM_LIMIT
            assert full or spec.num_stages == 12
        assert max(spec.tile_m * spec.d_tile_n for spec in specs) >= 128 * 128


def test_matrices_that_an_epilogue_loads_get_more_stages_where_the_ring_allows():
    graph = STANDARD["residual"]
    types = ProblemType("bfloat16", "bfloat16", "bfloat16", "k", "n", epilogue=graph)
    configs = Config(128, 256), Config(128, 256, epi_tile_n=32), Config(128, 128)
    large, narrow, small = (filled_spec(config, types) for config in configs)
    assert large is not None and narrow is not None and small is not None
    assert (large.epi_tile_n, large.num_stages, large.epi_load_stages) == (64, 3, 2)
    assert (narrow.num_stages, narrow.epi_load_stages) == (4, 2)
    assert small.num_stages >= 4 and small.epi_load_stages == 4
    row = filled_spec(Config(128, 128), replace(types, epilogue=STANDARD["bias"]))
    assert row is not None and row.epi_load_stages == 2


def test_a_selection_takes_no_more_than_a_row_has():
    graph = STANDARD["top_k"]
    selecting = [replace(r, k=16) if r.k else r for r in graph.results]
    graph = replace(graph, results=tuple(selecting))
    fits = replace(GemmProblem.dense(64, 16, 64), epilogue=graph)
    assert problem_violations(fits) == []
    (reason,) = problem_violations(replace(GemmProblem.dense(64, 8, 64), epilogue=graph))
    assert "selects 16 of rows of 8" in reason
