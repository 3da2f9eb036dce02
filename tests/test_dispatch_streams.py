"""What dispatch chooses for few rows: short boxes, and what leaves L2 first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jax_hopper_gemm.dispatch import H200, choose, choose_invariant, table_specs
from jax_hopper_gemm.dispatch.cost import estimate
from jax_hopper_gemm.dispatch.memory_traffic import memory_bytes
from jax_hopper_gemm.dispatch.model import best_kernel
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec

pytestmark = [pytest.mark.pure, pytest.mark.usefixtures("no_tables")]


@pytest.mark.parametrize("m", [1, 8, 16, 17, 32, 48])
def test_few_rows_take_boxes_that_end_with_them(m):
    problem = GemmProblem.dense(m, 4096, 4096)
    best, _ = best_kernel(problem, H200)
    assert best is not None and best.spec.short_boxes and best.spec.evict_first == "b"
    tall = replace(best.spec, short_boxes=False)
    assert estimate(problem, tall, RasterOrder(), H200).ns > best.cost.ns


def of_kernel(spec: GemmSpec, operand: str | None) -> str | None:
    """Returns which operand of a kernel an operand is: of D's transpose the other one."""
    return {"a": "b", "b": "a", None: None}[operand] if spec.d_major == "m" else operand


@pytest.mark.parametrize(
    ("m", "n", "k", "first"),
    [(16, 2048, 2048, "b"), (16, 4096, 4096, None), (1, 5120, 4096, None), (16, 6144, 4096, "b")],
)
def test_a_stream_that_l2_holds_from_call_to_call_is_not_evicted_first(m, n, k, first):
    """8.4, 34, 42 and 50 MB: the first stays there anyway, the last does not fit."""
    problem = GemmProblem.dense(m, n, k)
    for decision in (choose(problem, H200, kernel_only=True), choose_invariant(problem, H200)):
        spec = decision.spec
        assert spec is not None and spec.short_boxes
        assert spec.evict_first == of_kernel(spec, first)
        assert spec in table_specs(H200)


@pytest.mark.parametrize(("n", "k", "stack", "first"), [
    (4096, 4096, 2, "b"), (2048, 2048, 4, None), (2048, 2048, 32, "b"),
])  # fmt: skip
def test_a_stream_of_a_stack_is_not_evicted_first_if_l2_holds_the_stack(n, k, stack, first):
    problem = replace(GemmProblem.dense(16, n, k), indexed="b", stack=stack)
    for decision in (choose(problem, H200, kernel_only=True), choose_invariant(problem, H200)):
        spec = decision.spec
        assert spec is not None and spec.indexed == of_kernel(spec, "b")
        assert spec.evict_first == of_kernel(spec, first)


@pytest.mark.parametrize(
    "n, k, tile", [(4096, 14336, (32, 128)), (28672, 8192, (128, 128)), (8192, 28672, (64, 128))]
)
def test_streams_of_weights_take_the_tiles_that_were_measured_fastest(n, k, tile):
    for m in (1, 16, 32):
        best, _ = best_kernel(GemmProblem.dense(m, n, k), H200)
        assert best is not None and best.spec.short_boxes
        assert (best.spec.tile_n, best.spec.tile_k) == tile


@pytest.mark.parametrize(("n", "tile_n"), [(2648, 128), (2640, 32)])
def test_long_streams_take_wide_tiles_where_lines_begin_within_a_sector(n, tile_n):
    """20x2648x32680 took 85.8 us by tiles of 64x32, whose lines are 96 bytes of memory, not 64, and
    52.1 by 64x128."""
    best, _ = best_kernel(GemmProblem.dense(20, n, 32680), H200)
    assert best is not None and best.spec.tile_n == tile_n


def test_neighbours_read_a_sector_at_the_same_time_where_k_is_short():
    kernels = [
        GemmSpec("bfloat16", "bfloat16", "bfloat16", "k", "n", tile_m=64, tile_n=n)
        for n in (32, 128)
    ]

    def moved(k: int) -> list[float]:
        problem = GemmProblem.dense(4, 328, k)
        return [memory_bytes(problem, spec, (RasterOrder(),), H200) for spec in kernels]

    narrow, wide = moved(1280)
    assert narrow == wide
    narrow, wide = moved(12800)
    b_bytes = 2 * 328 * 12800
    assert narrow - wide == pytest.approx(b_bytes * (32 / 64 - 32 / 256))


@pytest.mark.parametrize(("m", "n", "k"), [(20, 152, 31600), (2, 248, 28352), (9, 72, 28920)])
def test_many_sums_of_small_tiles_are_added_up_by_a_cluster(m, n, k):
    """These took 8.0, 8.0 and 7.4 us, and 12.0, 10.1 and 11.6 with partial sums in memory."""
    best, _ = best_kernel(GemmProblem.dense(m, n, k, b_major="k"), H200)
    assert best is not None and best.spec.cluster_k == 8
