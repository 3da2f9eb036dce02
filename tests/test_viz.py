"""What the pictures show is what specs, kernels and the cost model say."""

from __future__ import annotations

import pytest
from support.policies import (
    block_specs,
    cluster_k_specs,
    converted_specs,
    covering_specs,
    parts_specs,
)
from support.program_inspection import run_fresh

from jax_hopper_gemm import viz
from jax_hopper_gemm.dispatch import H200
from jax_hopper_gemm.dispatch.cost import tile_cycles
from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph, Node, Operand, Result
from jax_hopper_gemm.gemm.legality import violations
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.spec import GemmSpec

pytestmark = pytest.mark.pure

# y = acc + residual, stored as bfloat16 and float32, with the sums of its columns.
FUSED = EpilogueGraph(
    operands=(Operand("row", "float32"), Operand("matrix", "bfloat16")),
    nodes=(Node("add", (0, 1)), Node("add", (3, 2))),
    results=(Result("matrix", 4, "bfloat16"), Result("matrix", 3), Result("column_sum", 4)),
)
KERNELS = {
    "cooperative": GemmSpec("bfloat16", "bfloat16", "bfloat16", "k", "n", 128, 256, 64, 2, 1),
    "pingpong": GemmSpec(
        "bfloat16", "bfloat16", "bfloat16", "k", "n", 128, 128, 64, 2, 1, "pingpong", num_stages=5
    ),
    "one warpgroup": GemmSpec("bfloat16", "bfloat16", "float32", "k", "n", 64, 128, num_stages=3),
    "three warpgroups": GemmSpec(
        "bfloat16", "bfloat16", "bfloat16", "k", "n", 192, 64, num_stages=2
    ),
    "fused": GemmSpec(
        "bfloat16", "bfloat16", "bfloat16", "k", "n", 128, 128, num_stages=3, epi_stages=2,
        epilogue=FUSED, epi_load_stages=2,
    ),
    "turns by k-tiles": GemmSpec(
        "float8_e4m3fn", "float8_e4m3fn", "bfloat16", "k", "k", 64, 128, 128, promoted=True,
        num_stages=6,
    ),
}  # fmt: skip
PROBLEM = GemmProblem.dense(2048, 8192, 1024)


DRAWN = (
    *block_specs()[:4],
    *converted_specs()[:6],
    *parts_specs()[:2],
    *covering_specs()[:20],
    *cluster_k_specs()[:2],
)


@pytest.mark.parametrize("spec", [*KERNELS.values(), *DRAWN], ids=lambda s: s.name)
def test_shared_memory_is_covered_without_gaps(spec: GemmSpec):
    assert violations(spec) == []
    end = 0
    for part in viz.shared_memory(spec):
        assert part.offset == end and part.nbytes > 0
        end += part.nbytes
    assert end == spec.smem_bytes


def test_a_graph_reads_line_by_line():
    assert viz.graph_lines(FUSED) == [
        "v0 = accumulator",
        "v1 = row operand, float32",
        "v2 = matrix operand, bfloat16",
        "v3 = add(v0, v1)",
        "v4 = add(v3, v2)",
        "result: matrix of v4, bfloat16",
        "result: matrix of v3, float32",
        "result: column_sum of v4, float32",
    ]
    power = EpilogueGraph(nodes=(Node("integer_pow", (0,), (3,)),), results=(Result("matrix", 1),))
    assert viz.graph_lines(power)[1] == "v1 = integer_pow(v0, 3)"


def test_shared_memory_names_every_buffer():
    names = [part.name for part in viz.shared_memory(KERNELS["fused"])]
    assert len(names) == len(set(names))
    assert "B, stage 2" in names and "result 1, warpgroup 1, stage 1" in names
    assert names.index("matrix operand, warpgroup 0, stage 0") < names.index(
        "row operand, warpgroup 0, stage 0"
    )
    assert names[-2:] == ["partial column sums", "barriers"]


@pytest.fixture(params=KERNELS, ids=str)
def kernel(request) -> GemmSpec:
    return KERNELS[request.param]


def spans(spec: GemmSpec, *kinds: str) -> list[viz.Span]:
    return [span for span in viz.timeline(PROBLEM, spec, H200, tiles=4) if span.kind in kinds]


def warpgroups_of_a_k_tile(spec: GemmSpec) -> int:
    return 1 if spec.warp_schedule == "pingpong" or spec.k_in_turns else spec.math_warpgroups


def overlapping(found: list[viz.Span]) -> list[tuple[viz.Span, viz.Span]]:
    found = sorted(found, key=lambda span: (span.start, span.end))
    pairs = zip(found, found[1:], strict=False)
    return [(a, b) for a, b in pairs if b.start < a.end - 1e-6]


def test_tensor_cores_and_actors_do_one_thing_at_a_time(kernel):
    assert overlapping(spans(kernel, "multiply")) == []
    for actor in {span.actor for span in spans(kernel, "load", "multiply")}:
        work = spans(kernel, "load", "multiply", "epilogue")
        assert overlapping([span for span in work if span.actor == actor]) == []


def test_every_k_tile_is_loaded_once_and_then_multiplied(kernel):
    arrived = {(span.tile, span.step): span.end for span in spans(kernel, "load")}
    k_tiles = PROBLEM.k // kernel.tile_k
    assert len(arrived) == len(spans(kernel, "load")) == 4 * k_tiles
    work = spans(kernel, "multiply")
    shares = warpgroups_of_a_k_tile(kernel)
    assert len(work) == shares * len(arrived)
    assert all(span.start >= arrived[span.tile, span.step] for span in work)


def test_no_stage_is_loaded_before_it_has_been_read(kernel):
    k_tiles = PROBLEM.k // kernel.tile_k
    read = {}
    for span in spans(kernel, "multiply"):
        k_tile = span.tile * k_tiles + span.step
        read[k_tile] = max(read.get(k_tile, 0.0), span.end)
    for span in spans(kernel, "load"):
        before = span.tile * k_tiles + span.step - kernel.num_stages
        assert before < 0 or span.start >= read[before]


def test_lengths_are_those_of_the_cost_model(kernel):
    cycles = tile_cycles(PROBLEM, kernel, H200)
    shares = warpgroups_of_a_k_tile(kernel)
    wanted = {
        "load": cycles.load,
        "epilogue": cycles.epilogue,
        "multiply": cycles.multiply / shares,
    }
    for span in spans(kernel, *wanted):
        assert span.end - span.start == pytest.approx(wanted[span.kind])


def test_pingpong_multiplies_while_it_stores():
    epilogues = spans(KERNELS["pingpong"], "epilogue")
    work = spans(KERNELS["pingpong"], "multiply")
    for epilogue in epilogues[:-1]:
        during = [s for s in work if s.start < epilogue.end and s.end > epilogue.start]
        assert {span.tile for span in during} == {epilogue.tile + 1}
        assert {span.actor for span in during} != {epilogue.actor}


def test_warpgroups_in_turns_have_every_other_k_tile_and_all_store():
    for warpgroup in range(2):
        work = spans(KERNELS["turns by k-tiles"], "multiply")
        steps = [span.step for span in work if span.actor == f"math {warpgroup}"]
        assert steps == 4 * list(range(warpgroup, PROBLEM.k // 128, 2))
    stores = [span.actor for span in spans(KERNELS["turns by k-tiles"], "store")]
    assert stores.count("stores 0") == stores.count("stores 1") == 4 * 2


def test_stores_are_as_many_as_the_kernel_issues():
    for spec in KERNELS.values():
        tile_rows = spec.tile_m // 64
        assert len(spans(spec, "store")) == 4 * tile_rows * spec.d_tile_n // spec.epi_tile_n


@pytest.mark.slow
@pytest.mark.parametrize(
    "draw",
    [
        viz.draw_fragment,
        viz.draw_stmatrix,
        lambda: viz.draw_staged_tile(KERNELS["cooperative"]),
        lambda: viz.draw_staged_tile(KERNELS["one warpgroup"], "float32"),
        lambda: viz.draw_shared_memory(KERNELS.values()),
        lambda: viz.draw_timeline(PROBLEM, list(KERNELS.values()), H200),
    ],
)
def test_drawings_draw(draw):
    matplotlib = pytest.importorskip("matplotlib", reason="needs the extra `notebooks`")
    matplotlib.use("agg")
    figure = draw()
    figure.canvas.draw()
    assert figure.axes and all(axis.has_data() or axis.patches for axis in figure.axes)
    matplotlib.pyplot.close(figure)


def test_fragment_drawing_numbers_every_element():
    matplotlib = pytest.importorskip("matplotlib", reason="needs the extra `notebooks`")
    matplotlib.use("agg")
    figure = viz.draw_fragment(16)
    texts = [text.get_text() for text in figure.axes[1].texts]
    assert sorted(texts) == sorted(f"T{t}\nv{v}" for t in range(32) for v in range(8))
    matplotlib.pyplot.close(figure)


def test_swizzle_is_drawn_without_conflict_and_its_absence_with():
    matplotlib = pytest.importorskip("matplotlib", reason="needs the extra `notebooks`")
    matplotlib.use("agg")
    figure = viz.draw_staged_tile(KERNELS["cooperative"])
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == [
        "64-byte swizzle: 1 access to the busiest bank",
        "no swizzle: 4 accesses to the busiest bank",
    ]
    matplotlib.pyplot.close(figure)


@pytest.mark.slow
def test_without_matplotlib_the_data_are_there_and_drawing_says_how_to_install_it():
    source = (
        "import sys\n"
        "sys.modules['matplotlib'] = None  # as if it were not installed\n"
        "from jax_hopper_gemm import viz\n"
        "try:\n    viz.draw_fragment()\n"
        "except ModuleNotFoundError as error:\n    print(error)\n"
    )
    assert run_fresh(source) == (
        "jax_hopper_gemm.viz draws with matplotlib, which is not installed: "
        'python -m pip install "jax-hopper-gemm[notebooks]"\n'
    )
