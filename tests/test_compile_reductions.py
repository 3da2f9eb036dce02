"""The epilogue's reductions: their device code traced on NumPy, then compiled.

On NumPy an array stands for a register of a warpgroup, one element a thread. The objects, their
index functions and orders are the device's; only the instructions are replaced.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from support.compiling import code_of, skip_without_compiler

from jax_hopper_gemm.gemm import wgmma_fragment
from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph, Node, Result, ResultKind
from jax_hopper_gemm.gemm.grid import result_shapes
from jax_hopper_gemm.gemm.legality import violations
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.spec import GemmSpec

skip_without_compiler()

pytestmark = pytest.mark.compile

THREADS = np.arange(128, dtype=np.int32)
L, M, N = 2, 200, 150


class Memory:
    """An array that may be written once at each place."""

    def __init__(self, shape, dtype):
        self.words = np.zeros(shape, dtype)
        self.writes = np.zeros(shape, np.int32)

    def write(self, condition, at, value):
        where = np.broadcast_to(condition, 128)
        places = np.broadcast_to(at, 128)[where]
        assert np.all((places >= 0) & (places < self.words.size)), "written past the end"
        np.add.at(self.writes.reshape(-1), places, 1)
        self.words.reshape(-1)[places] = np.broadcast_to(value(), 128)[where]


class Scratch:
    """Shared memory in which a barrier must lie between a write and the reads and writes of others.

    A word's `written` is the epoch of its last write, `read` that of its last read; barriers count
    epochs.
    """

    def __init__(self, columns):
        size = 2 * 4 * columns
        self.columns = columns
        self.words = np.full(size, np.nan, np.float32)
        self.written = np.full(size, -1)
        self.read = np.full(size, -1)
        self.epoch = 0

    def barrier(self):
        self.epoch += 1

    def __add__(self, floats):
        assert floats % self.words.size == 0, "another warpgroup's scratch"
        return self

    def write(self, at, value):
        assert np.all(self.read[at] < self.epoch), "overwritten before all have read it"
        self.written[at] = self.epoch
        self.words[at] = value

    def load(self, at):
        at = np.minimum(at, self.words.size - 1)  # of threads that do not write
        assert np.all(self.written[at[: self.columns]] < self.epoch), "read before it is written"
        self.read[at[: self.columns]] = self.epoch
        return self.words[at]


@pytest.fixture
def reductions(monkeypatch):
    """The module `kernels.epilogue.reductions` with NumPy in place of instructions."""
    from jax_hopper_gemm.kernels.epilogue import fold, instructions, reductions

    def select_rows(self, keys, coords):
        outside = wgmma_fragment.columns_outside(
            self.view.quad_lane, np.full(128, coords.n, np.int32), self.columns, np.where
        )
        taken = {(w, of_two): outside[w] for w in range(len(outside)) for of_two in range(2)}
        for nth, of_two in itertools.product(range(self.results[0].k), range(2)):
            self.select_one(keys[of_two], taken, of_two, nth, coords)

    instead = {
        "shuffle": lambda x, distance: x[THREADS ^ distance],
        "select": np.where,
        "maximum": np.maximum,
        "plus": np.add,
        "exp": np.exp,
        "as_float": np.float32,
        "float_bits": lambda x: x.view(np.int32),
        "float_of": lambda x: x.view(np.float32),
        "write_scratch": Scratch.write,
        "read_scratch": Scratch.load,
        "write_where": lambda condition, memory, at, value: memory.write(condition, at, value),
    }
    for name, function in instead.items():
        monkeypatch.setattr(instructions, name, function)
    for module in (fold, reductions):
        monkeypatch.setattr(module, "Int64", np.int64)
    monkeypatch.setattr(reductions.TopK, "select_rows", select_rows)
    return reductions


def spec_of(*results: Result, nodes: tuple[Node, ...] = (), **fields) -> GemmSpec:
    chosen = dict(
        a_dtype="bfloat16", b_dtype="bfloat16", d_dtype="bfloat16", a_major="k",
        b_major="n", tile_m=128, tile_n=96,
        epi_tile_n=32, epi_stages=2, num_stages=3,
    )  # fmt: skip
    stored = Result("matrix", len(nodes), "bfloat16")  # the last value
    graph = EpilogueGraph(nodes=nodes, results=(stored, *results))
    spec = GemmSpec(**{**chosen, **fields, "epilogue": graph})
    assert violations(spec) == []
    return spec


def run(module, spec: GemmSpec, x: np.ndarray) -> list[np.ndarray]:
    """Returns the partial results that the objects of `spec` write for D = x (L, M, N)."""
    batches, m, n = x.shape
    problem = GemmProblem.dense(m, n, 64, batches)
    problem = GemmProblem(**{**vars(problem), "epilogue": spec.epilogue})
    memories = [Memory(*shape) for shape in result_shapes(problem, spec)[1:]]
    tiles_m, tiles_n = -(-m // spec.tile_m), -(-n // spec.d_tile_n)
    groups = spec.math_warpgroups if spec.warp_schedule == "cooperative" else 1
    for group in range(groups):
        objects = module.make_reductions(spec)
        views = [thread_view(reduction, memories, group) for reduction in objects]
        # A cluster of two along both axes may reach past D by a tile.
        for batch, tile_m, tile_n in itertools.product(
            range(batches), range(tiles_m + 1), range(tiles_n + 1)
        ):
            for reduction, view in zip(objects, views, strict=True):
                fold = reduction.begin_tile(view)
                for i_m in range(spec.rows_per_warpgroup // 64):
                    row0 = tile_m * spec.tile_m + 64 * (i_m * groups + group)
                    run_rows(spec, fold, x[batch], i_m, row0, (batch, tile_n, tiles_n))
    for memory in memories:
        assert np.all(memory.writes == 1), "not everything was written exactly once"
    return [memory.words for memory in memories]


def thread_view(reduction, memories: list, warpgroup: int):
    """Returns the view of all threads of a warpgroup."""
    scratch = Scratch(reduction.spec.epi_tile_n)
    barrier = SimpleNamespace(arrive_and_wait=scratch.barrier)
    mine = scratch if reduction.needs_barrier else None
    return reduction.thread_view(memories, warpgroup, THREADS, mine, barrier)


def run_rows(spec, fold, matrix, i_m, row0, where):
    from jax_hopper_gemm.kernels.epilogue.views import SubtileCoords

    batch, tile_n, tiles_n = where
    m, n = matrix.shape
    coords = first = SubtileCoords(m, m, n, row0, tile_n * spec.d_tile_n, batch, tile_n, tiles_n)
    for i_n in range(spec.d_tile_n // spec.epi_tile_n):
        coords = first._replace(column0=first.column0 + i_n * spec.epi_tile_n)
        mask = coords.inside(THREADS, spec.epi_tile_n // 4)
        for v in range(spec.epi_tile_n // 2):
            row = row0 + wgmma_fragment.row_of(THREADS, v)
            column = coords.column0 + wgmma_fragment.column_of(THREADS, v)
            inside = (row < m) & (column < n)
            value = np.where(
                inside, matrix[np.minimum(row, m - 1), np.minimum(column, n - 1)], np.float32(7e7)
            )
            fold.add(fold.masked(value, v, mask), v, i_m, i_n)
        fold.view.barrier.arrive_and_wait()
        fold.end_subtile(i_m, i_n, coords)
    fold.end_rows(i_m, coords)


SHAPES = [
    {"tile_n": 96},  # an odd number of subtiles: the next tile takes the same turn of the scratch
    {"tile_n": 32, "tile_m": 64},
    {"tile_n": 128, "epi_tile_n": 64},
    {"tile_n": 64, "epi_tile_n": 16, "tile_m": 256},
    {"tile_n": 64, "warp_schedule": "pingpong"},
]


def named(fields: dict) -> str:
    return "-".join(map(str, fields.values()))


def test_column_sums_are_exact_and_the_same_for_every_tile_shape(reductions):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(L, M, N)).astype(np.float32)
    found = [run(reductions, spec_of(Result("column_sum", 0), **shape), x)[0] for shape in SHAPES]
    assert all(np.array_equal(other, found[0]) for other in found)
    blocks = np.concatenate([x, np.zeros((L, 256 - M, N))], axis=1).reshape(L, 4, 64, N)
    np.testing.assert_allclose(found[0], blocks.sum(2), rtol=0, atol=64 * 2e-7)
    counted = rng.integers(-99, 99, size=(L, M, N)).astype(np.float32)
    (sums,) = run(reductions, spec_of(Result("column_sum", 0)), counted)
    assert np.array_equal(sums.sum(1), counted.sum(1))


@pytest.mark.parametrize("shape", SHAPES, ids=named)
def test_row_sums_and_maxima_are_those_of_each_tile(shape, reductions):
    x = np.random.default_rng(1).integers(-99, 99, size=(L, M, N)).astype(np.float32)
    x[1, 3, 4] = np.nan
    spec = spec_of(Result("row_sum", 0), Result("row_max", 0), Result("max", 0), **shape)
    sums, maxima, largest = run(reductions, spec, x)
    parts = np.split(x, range(spec.d_tile_n, N, spec.d_tile_n), axis=2)
    assert np.array_equal(sums, np.stack([p.sum(2) for p in parts], axis=1), True)
    assert np.array_equal(maxima, np.stack([p.max(2) for p in parts], axis=1), True)
    warps = [[rows.max((1, 2)) for rows in np.split(p, range(16, M, 16), axis=1)] for p in parts]
    assert np.array_equal(largest, np.array(warps).transpose(2, 1, 0), True)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
@pytest.mark.parametrize("shape", SHAPES, ids=named)
def test_row_sumexp_is_the_largest_and_the_sum_without_nan_from_infinities(shape, reductions):
    x = np.random.default_rng(2).normal(size=(L, M, N)).astype(np.float32) * 30
    x[0, :70] = -np.inf
    x[0, 1, 3], x[0, 2, 140], x[0, 3, 0], x[0, 4, 149] = 2.0, 3.0, np.inf, np.nan
    spec = spec_of(Result("row_sumexp", 0), **shape)
    (pairs,) = run(reductions, spec, x)
    for tile, part in enumerate(np.split(x, range(spec.d_tile_n, N, spec.d_tile_n), axis=2)):
        top = part.max(2)
        assert np.array_equal(pairs[:, tile, 0], top, True)
        base = np.where(np.isinf(top), 0, top).astype(np.float64)
        expected = np.exp(part - base[:, :, None]).sum(2)
        np.testing.assert_allclose(pairs[:, tile, 1], expected, rtol=1e-5)


@pytest.mark.parametrize("columns, tile_n", [(150, 256), (64, 64), (37, 48)])
def test_top_k_finds_values_and_columns_of_a_row_with_one_selection(columns, tile_n, reductions):
    rng = np.random.default_rng(3)
    x = rng.integers(-9, 9, size=(L, 70, columns)).astype(np.float32)
    x[0, 0, :9], x[0, 1] = np.nan, -np.inf
    results = [Result(kind, 0, k=6) for kind in ("top_k_indices", "top_k_values")]
    spec = spec_of(*results, tile_n=tile_n, epi_tile_n=16)
    indices, values = run(reductions, spec, x)
    order = np.argsort(np.where(np.isnan(x), -np.inf, -x), axis=2, kind="stable")[:, :, :6]
    assert np.array_equal(indices, order)
    assert np.array_equal(values, np.take_along_axis(x, order, 2), True)


def test_top_k_of_another_value_or_k_selects_by_itself(reductions):
    results = [Result(kind, 0, k=k) for kind in KINDS[-2:] for k in (2, 3)]
    made = reductions.make_reductions(spec_of(*results))
    assert [reduction.numbers for reduction in made] == [(0, 2), (1, 3)]


KINDS: tuple[ResultKind, ...] = (
    "row_sum", "row_max", "row_sumexp", "column_sum", "max", "top_k_values", "top_k_indices",
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "m", "n"),
    [
        ("row_sum", 2**23, 2**15),
        ("row_max", 2**23, 2**15),
        ("row_sumexp", 2**22, 2**15),
        ("column_sum", 2**20, 2**17),
        ("max", 2**23, 2**18),
        ("top_k_values", 2**28, 48),
        ("top_k_indices", 2**28, 48),
    ],
)
def test_offsets_of_more_than_2_31_partial_results_do_not_wrap(kind, m, n, reductions, monkeypatch):
    spec = spec_of(
        Result(kind, 0, k=8 if kind.startswith("top_k") else 0), tile_n=48, epi_tile_n=16
    )
    problem = GemmProblem(**{**vars(GemmProblem.dense(m, n, 64, 2)), "epilogue": spec.epilogue})
    size = math.prod(result_shapes(problem, spec)[1][0])
    assert size > 2**31
    written = []
    write = lambda condition, memory, at, value: written.append((condition, at))  # noqa: E731
    monkeypatch.setattr("jax_hopper_gemm.kernels.epilogue.instructions.write_where", write)
    (reduction,) = reductions.make_reductions(spec)
    fold = reduction.begin_tile(thread_view(reduction, [None], 0))
    tiles_n = -(-n // spec.d_tile_n)
    coords = SimpleNamespace(
        rows=np.int32(m), m=np.int32(m), n=np.int32(n), row0=np.int32(m - 64), batch=np.int32(1),
        tile_n=np.int32(tiles_n - 1), tiles_n=np.int32(tiles_n),
    )  # fmt: skip
    subtiles = spec.d_tile_n // spec.epi_tile_n
    for i_n in range(subtiles):
        coords.column0 = np.int32((tiles_n - 1) * spec.d_tile_n + i_n * spec.epi_tile_n)
        for v in range(spec.epi_tile_n // 2):
            fold.add(np.zeros(128, np.float32), v, 0, i_n)
        fold.view.barrier.arrive_and_wait()
        fold.end_subtile(0, i_n, coords)
    fold.end_rows(0, coords)
    at = np.concatenate(
        [np.broadcast_to(at, 128)[np.broadcast_to(condition, 128)] for condition, at in written]
    )
    assert at.dtype == np.int64
    assert at.max() == size - 1, "the last tile writes the last partial result"
    assert at.size == np.unique(at).size > 0
    assert np.all(at >= size // 2), "its matrix is the second of two"


@pytest.mark.parametrize("kind", KINDS)
def test_a_reduction_beside_a_matrix_does_not_spill(kind):
    result = Result(kind, 0, k=8 if kind.startswith("top_k") else 0)
    widest = 64  # narrower subtiles take fewer registers
    code_of(spec_of(result, tile_n=256, cluster_m=2, epi_tile_n=widest), {})


@pytest.mark.parametrize("tile_m, tile_n", [(64, 64), (64, 256), (128, 256)])
def test_softmax_and_top_k_of_a_row_do_not_spill(tile_m, tile_n):
    softmax = (
        Node("row_max", (0,)), Node("sub", (0, 1)), Node("exp", (2,)), Node("row_sum", (3,)),
        Node("div", (3, 4)),
    )  # fmt: skip
    results = [Result("top_k_values", 5, k=8), Result("top_k_indices", 5, k=8)]
    spec = spec_of(*results, nodes=softmax, tile_m=tile_m, tile_n=tile_n)
    code_of(spec, {})
