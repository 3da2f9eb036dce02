"""What the pictures of grouped products show is what plans, kernels and routers say."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from support import grouped_results

from jax_hopper_gemm import moe, viz
from jax_hopper_gemm.gemm.groups import GroupedAxis, Groups
from jax_hopper_gemm.gemm.legality import violations
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.launch.plan import make_plan
from jax_hopper_gemm.viz.groups import OF_NO_GROUP

pytestmark = pytest.mark.pure

SIZES = [300, 0, 130, 33, 200, 64]
ROWS = sum(SIZES) + 73  # of which the last belong to no group
WHOLE = GemmSpec("bfloat16", "bfloat16", "bfloat16", "k", "n", 128, 256, grouped="m")
KERNELS = {
    "128 rows": WHOLE,
    "64 rows": replace(WHOLE, tile_m=64),
    "256 rows": replace(WHOLE, tile_m=256, tile_n=128),
    "cluster": replace(WHOLE, cluster_n=2),
    "pair": replace(WHOLE, cluster_m=2),
    "pingpong": replace(WHOLE, tile_n=128, warp_schedule="pingpong"),
}
BY_K = replace(WHOLE, a_major="m", grouped="k", cluster_m=2)
ALONG = [RasterOrder("m", 8), RasterOrder("n", 2)]


def rows_problem(n: int = 1280, k: int = 512) -> GemmProblem:
    return GemmProblem.grouped("m", ROWS, n, k, len(SIZES))


def contraction(m: int = 300, n: int = 700) -> GemmProblem:
    return GemmProblem.grouped("k", m, n, ROWS, len(SIZES))


@pytest.mark.parametrize("spec", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("raster_order", ALONG, ids=str)
def test_stored_rows_cover_the_result_once(spec, raster_order):
    assert violations(spec) == []
    problem = rows_problem()
    painted = np.zeros((ROWS, -(-problem.n // spec.d_tile_n) + spec.raster_n), int)
    matrices = grouped_results.matrix_of_rows(problem, np.array(SIZES))
    for tile in viz.grouped_tiles(problem, spec, raster_order, SIZES, num_sms=16):
        first = tile.start + tile.m * spec.tile_m
        painted[first : first + tile.rows, tile.n] += 1
        assert tile.rows > 0 and first + tile.rows <= tile.end
        assert set(matrices[first : first + tile.rows]) == {tile.matrix}
    columns = -(-problem.n // spec.d_tile_n)
    assert (painted[:, :columns] == 1).all()


@pytest.mark.parametrize("spec", [*KERNELS.values(), BY_K], ids=[*KERNELS, "contraction"])
def test_each_cta_takes_every_so_manieth_tile(spec):
    problem = rows_problem() if spec.grouped == "m" else contraction()
    tiles = viz.grouped_tiles(problem, spec, ALONG[0], SIZES, num_sms=16)
    grid = make_plan(problem, spec, ALONG[0], 16).grid
    clusters = grid[0] // spec.cluster_m
    for tile in tiles:
        assert tile.index == tile.cta // spec.cluster_size + tile.turn * clusters
    assert {tile.cta for tile in tiles} == set(range(grid[0] * grid[1]))
    assert set(Counter(tile.index for tile in tiles).values()) == {spec.cluster_size}
    assert [tile.index for tile in tiles] == sorted(tile.index for tile in tiles)


@pytest.mark.parametrize("spec", KERNELS.values(), ids=KERNELS)
def test_blocks_without_rows_are_skipped_and_no_others(spec):
    """By the kernel's rule: a block is multiplied if rows are left where it begins."""
    for tile in viz.grouped_tiles(rows_problem(), spec, ALONG[0], SIZES):
        left = tile.end - (tile.start + tile.m * spec.tile_m)
        assert tile.blocks == sum(left > 64 * block for block in range(spec.tile_m // 64))


def test_a_pair_shares_columns_unless_a_group_has_one_tile_of_rows_left():
    spec, problem = KERNELS["pair"], rows_problem()
    clusters: dict[int, list[viz.GroupedTile]] = {}
    for tile in viz.grouped_tiles(problem, spec, ALONG[1], SIZES, num_sms=16):
        clusters.setdefault(tile.index, []).append(tile)
    for one, other in clusters.values():
        odd = -(-(one.end - one.start) // spec.tile_m) % 2
        last = one.m == (one.end - one.start - 1) // spec.tile_m
        if odd and last:
            assert (other.m, other.n) == (one.m, one.n + 1)
        else:
            assert (other.m, other.n) == (one.m + 1, one.n)
        assert one.k_tiles == other.k_tiles
        if one.n * spec.d_tile_n >= problem.n:
            assert one.k_tiles == 1


def test_rows_of_no_group_cost_one_k_tile_and_others_all():
    tiles = viz.grouped_tiles(rows_problem(k=520), WHOLE, ALONG[0], SIZES)
    assert {(tile.matrix < 0, tile.k_tiles) for tile in tiles} == {(True, 1), (False, 9)}
    assert {tile.start for tile in tiles if tile.matrix < 0} == {sum(SIZES)}


def test_a_group_of_the_contraction_has_as_many_k_tiles_as_its_rows_need():
    tiles = viz.grouped_tiles(contraction(), BY_K, ALONG[0], SIZES)
    found = {tile.matrix: tile.k_tiles for tile in tiles}
    assert [found.get(i) for i in range(len(SIZES))] == [5, None, 3, 1, 4, 1]  # none: empty
    assert len(tiles) == len(found) * 4 * 3  # 300 x 700, rounded up to a cluster's 256 x 256
    assert {(tile.m, tile.rows) for tile in tiles} == {(0, 128), (1, 128), (2, 44), (3, 0)}
    assert {tile.blocks for tile in tiles} == {2}


def test_rows_of_other_devices_belong_to_no_group():
    problem = replace(
        rows_problem(), l=3, groups=GroupedAxis("m", len(SIZES), Groups(len(SIZES) + 1, 3, first=2))
    )
    tiles = viz.grouped_tiles(problem, WHOLE, ALONG[0], SIZES)
    first_rows = {tile.matrix: tile.start for tile in tiles if tile.matrix >= 0}
    assert first_rows == {0: 300, 1: 430, 2: 463}


def test_what_is_not_known_before_the_run_is_refused_with_the_way_out():
    dynamic = replace(WHOLE, tile_scheduler="dynamic")
    with pytest.raises(ValueError, match=r'dynamic .*replace\(spec, tile_scheduler="static"\)'):
        viz.grouped_tiles(rows_problem(), dynamic, ALONG[0], SIZES)
    with pytest.raises(ValueError, match="along k, those of the problem along m"):
        viz.grouped_tiles(rows_problem(), BY_K, ALONG[0], SIZES)
    with pytest.raises(ValueError, match="along m, those of the problem along None"):
        viz.grouped_tiles(GemmProblem.dense(64, 64, 64), WHOLE, ALONG[0], SIZES)
    with pytest.raises(ValueError, match="2 sizes, but the problem has 6"):
        viz.grouped_tiles(rows_problem(), WHOLE, ALONG[0], SIZES[:2])


def test_tiles_of_a_grouped_k_are_drawn_otherwise():
    pytest.importorskip("matplotlib", reason="needs the extra `notebooks`")
    with pytest.raises(ValueError, match="draw_grouped_work draws both"):
        viz.draw_grouped_tiles(contraction(), BY_K, SIZES, [])


@pytest.mark.parametrize(("first", "end"), [(0, 5), (0, 64), (413, 430), (ROWS - 1, ROWS)])
@pytest.mark.parametrize("by_k", [False, True], ids=["result", "operand"])
def test_a_span_map_ends_where_the_span_does_and_addresses_its_rows(first, end, by_k):
    problem, spec = (contraction(), BY_K) if by_k else (rows_problem(), WHOLE)
    found = viz.clipped_rows(viz.span_map(problem, spec), first, end, range(64))
    assert [row.address for row in found] == list(range(first, first + 64))
    assert [row.inside for row in found] == [first + row < end for row in range(64)]


def test_a_dense_product_has_no_span_map():
    dense = replace(WHOLE, grouped=None)
    with pytest.raises(ValueError, match="no tensor map of jhg_gemm_.* ends where a span does"):
        viz.span_map(GemmProblem.dense(256, 256, 256), dense)


@pytest.fixture
def pyplot():
    matplotlib = pytest.importorskip("matplotlib", reason="needs the extra `notebooks`")
    matplotlib.use("agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def texts(axis) -> list[str]:
    return [text.get_text() for text in axis.texts]


def test_every_tile_is_drawn_with_its_cta_beside_its_group(pyplot):
    tiles = viz.grouped_tiles(rows_problem(), WHOLE, ALONG[0], SIZES, num_sms=16)
    figure = viz.draw_grouped_tiles(rows_problem(), WHOLE, SIZES, tiles)
    figure.canvas.draw()
    numbers = [text for text in texts(figure.axes[0]) if text.isdigit()]
    assert Counter(numbers) == Counter(str(tile.cta) for tile in tiles)
    labels = [text for text in texts(figure.axes[0]) if not text.isdigit()]
    assert labels[:3] == ["group 0: rows 0 to 299", "group 1: empty", "group 2: rows 300 to 429"]
    assert labels[-1] == f"no group: rows {sum(SIZES)} to {ROWS - 1}"


def test_heights_are_rows_that_are_stored_multiplied_and_skipped(pyplot):
    from matplotlib.colors import to_rgb

    problem = GemmProblem.grouped("m", 128 + 140, 256, 64, 1)
    tiles = viz.grouped_tiles(problem, WHOLE, ALONG[0], [128 + 10])
    figure = viz.draw_grouped_tiles(problem, WHOLE, [128 + 10], tiles)
    patches = figure.axes[0].patches
    # A whole tile; ten rows, 54 that are multiplied too, 64 that are not; then those of no group.
    heights = [patch.get_height() for patch in patches]
    assert heights == [128, 10, 54, 64, 128, 2, 62, 64]
    assert [bool(patch.get_hatch()) for patch in patches] == [
        False, False, True, False, False, False, True, False,
    ]  # fmt: skip
    assert patches[4].get_facecolor()[:3] == to_rgb(OF_NO_GROUP) != patches[0].get_facecolor()[:3]


def test_work_is_drawn_as_high_as_what_a_cta_multiplies(pyplot):
    tiles = viz.grouped_tiles(contraction(), BY_K, ALONG[0], SIZES, num_sms=8)
    figure = viz.draw_grouped_work(BY_K, tiles)
    tops: dict[int, float] = {}
    for bar in figure.axes[0].patches:
        cta = round(bar.get_x() + bar.get_width() / 2)
        tops[cta] = max(tops.get(cta, 0), bar.get_y() + bar.get_height())
    wanted: Counter[int] = Counter()
    for tile in tiles:
        wanted[tile.cta] += 2 * tile.k_tiles
    assert tops == wanted
    ratio = max(wanted.values()) / (sum(wanted.values()) / len(wanted))
    assert f"{ratio:.2f} times the mean" in figure.axes[0].get_title()


def test_order_numbers_every_tile_and_counts_what_the_first_read(pyplot):
    figure = viz.draw_group_order(6, 5, [RasterOrder("m", 4), RasterOrder("n", 1)], together=8)
    along_m, along_n = figure.axes
    for axis in figure.axes:
        assert sorted(map(int, texts(axis))) == list(range(30))
    assert "8 tiles read 2 of A, 4 of B" in along_m.get_title()
    assert "8 tiles read 2 of A, 5 of B" in along_n.get_title()
    places = [text.get_position() for text in along_n.texts]
    assert places == [
        (n + 0.5, m + 0.5) for m in range(6) for n in (range(5) if m % 2 == 0 else range(4, -1, -1))
    ]


def test_clipped_rows_are_drawn_by_their_distance_from_the_extent(pyplot):
    store = viz.span_map(rows_problem(), WHOLE)
    figure = viz.draw_clipped_rows(store, 256, 300, range(43, 45))
    figure.canvas.draw()
    last, beyond = texts(figure.axes[0])[:4], texts(figure.axes[0])[4:]
    assert last == ["43", "$2^{30}$ − 1", "299", "yes"]
    assert beyond == ["44", "$2^{30}$", "300", "no, clipped"]
    assert "ends at row 300; coordinate 2: 300 of" in figure.axes[0].get_title()
    assert [bool(patch.get_hatch()) for patch in figure.axes[0].patches] == [False, True]


@pytest.mark.slow
def test_routing_is_drawn_with_weights_of_tokens_and_sizes_of_groups(pyplot):
    logits = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
    routing = moe.route(logits, 2)
    figure = viz.draw_routing(routing, tokens=5)
    chosen, groups = figure.axes
    assert texts(chosen) == [f"{w:.2f}" for w in np.asarray(routing.weights[:5]).ravel()]
    columns = [patch.get_x() for patch in chosen.patches]
    assert columns == np.asarray(routing.experts[:5]).ravel().tolist()
    assert [bar.get_height() for bar in groups.patches] == routing.group_sizes.tolist()
