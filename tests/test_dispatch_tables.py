"""Measured tables: their files, their precedence, and the tuner that fills them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any, Literal

import pytest

from jax_hopper_gemm.dispatch import (
    H100,
    H200,
    Device,
    TableError,
    choice,
    choose,
    legal_specs,
    table_specs,
)
from jax_hopper_gemm.dispatch import table as tables
from jax_hopper_gemm.dispatch.cost import estimate
from jax_hopper_gemm.dispatch.table import (
    Entry,
    Key,
    Table,
    packaged_table,
    read_table,
    write_table,
)
from jax_hopper_gemm.dispatch.tuner import (
    merged_table,
    ranked_candidates,
    tuned_entry,
    variants,
)
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec

SQUARE = GemmProblem.dense(4096, 4096, 4096)
pytestmark = [pytest.mark.pure, pytest.mark.usefixtures("no_tables")]


def entry(
    problem: GemmProblem = SQUARE, *, prefer: Literal["kernel", "xla"] = "kernel", **changes: Any
) -> Entry:
    base = GemmSpec(
        problem.a_dtype, problem.b_dtype, problem.d_dtype, problem.a.major, problem.b.major,
        256, 192, num_stages=3, epi_tile_n=16,
    )  # fmt: skip
    return Entry(
        Key.of(problem), prefer, replace(base, **changes), RasterOrder("n", 4), 170.5, 174.75
    )


def saved(tmp_path, *entries: Entry, name: str = "table.json", device: Device = H200):
    path = tmp_path / name
    write_table(Table.of(device, entries, str(path)), path)
    return path


@pytest.mark.parametrize("gpu", [H100, H200])
def test_packaged_table_is_valid_and_for_its_device(gpu):
    assert packaged_table(gpu).device == gpu
    assert packaged_table(replace(gpu, num_sms=78)).entries == {}


def test_a_gpu_without_an_entry_takes_that_of_an_h200(tmp_path, use_table, monkeypatch):
    entries = entry(), entry(tile_n=128, epi_tile_n=32)
    packaged = {gpu: Table.of(gpu, [x]) for gpu, x in zip((H200, H100), entries, strict=True)}
    monkeypatch.setattr(tables, "packaged_table", packaged.__getitem__)
    choice._choose.cache_clear()
    for gpu, measured in zip((H200, H100), entries, strict=True):
        assert choose(SQUARE, gpu).spec == measured.spec
    use_table(saved(tmp_path, entry(tile_n=192)))  # of an H200: an H100's own comes first
    assert tables.tables_of(H100)[0] is packaged[H100] and len(tables.tables_of(H100)) == 3
    packaged[H100] = Table.of(H100)
    choice._choose.cache_clear()
    assert choose(SQUARE, H100).spec == choose(SQUARE, H200).spec
    choice._choose.cache_clear()


@pytest.mark.parametrize("gpu", [H100, H200])
def test_every_packaged_entry_decides_for_its_problem(gpu, monkeypatch):
    monkeypatch.setattr(tables, "packaged_table", packaged_table)
    buildable = set(table_specs(gpu))
    entries = packaged_table(gpu).entries.values()
    assert entries
    for measured in entries:
        assert measured.spec in buildable
        free = choose(measured.key.problem(), gpu)
        forced = choose(measured.key.problem(), gpu, kernel_only=True)
        assert free.source == forced.source == "table"
        assert forced.spec is not None and forced.spec.evict_first in (
            None,
            measured.spec.evict_first,
        )
        spec = replace(measured.spec, evict_first=forced.spec.evict_first)
        assert (forced.spec, forced.raster_order) == (spec, measured.raster_order)
        assert free.spec == (spec if measured.prefer == "kernel" else None)


def test_tables_round_trip_sorted_one_entry_a_line(tmp_path):
    entries = [entry(GemmProblem.dense(n, 512, 512)) for n in (2048, 64, 1024)]
    path = saved(tmp_path, *entries)
    table = read_table(path)
    assert table.device == H200 and set(table.entries.values()) == set(entries)
    assert [key.m for key in table.entries] == [64, 1024, 2048]
    assert sum(line.startswith('  {"m"') for line in path.read_text().splitlines()) == 3
    assert list(tmp_path.iterdir()) == [path]


def test_tables_name_policies_of_streams_where_a_kernel_has_them(tmp_path):
    plain, stream = entry(GemmProblem.dense(64, 512, 512)), entry(GemmProblem.dense(8, 512, 512))
    spec = replace(stream.spec, short_boxes=True, evict_first="b", cluster_m=1, cluster_n=1)
    stream = replace(stream, spec=spec)
    path = saved(tmp_path, plain, stream)
    assert set(read_table(path).entries.values()) == {plain, stream}
    rows = json.loads(path.read_text())["entries"]
    assert [row["kernel"].get("short_boxes") for row in rows] == [True, None]


def test_user_table_precedes_the_model(tmp_path, use_table):
    measured = entry()
    assert choose(SQUARE, H200).source == "model"
    use_table(saved(tmp_path, measured))
    decision = choose(SQUARE, H200)
    assert (decision.spec, decision.raster_order) == (measured.spec, measured.raster_order)
    assert decision.source == "user table"
    assert "170.5 us" in decision.reason and "table.json" in decision.reason
    assert measured.spec in table_specs(H200)
    assert measured.spec not in table_specs(H200, [("float16", "float16")])
    other = GemmProblem.dense(4096, 4096, 4104)
    assert choose(other, H200).source == "model"


def test_user_table_precedes_the_packaged_one(tmp_path, use_table, monkeypatch):
    measured = Table.of(H200, [entry(tile_n=128, epi_tile_n=32)], "packaged")
    packaged = replace(measured, source="table")
    monkeypatch.setattr(tables, "packaged_table", lambda device: packaged)
    choice._choose.cache_clear()
    decision = choose(SQUARE, H200)
    assert decision.source == "table" and decision.spec == packaged.entries[Key.of(SQUARE)].spec
    assert decision.spec in table_specs(H200)
    use_table(saved(tmp_path, entry()))
    assert choose(SQUARE, H200).source == "user table"
    choice._choose.cache_clear()


def test_a_table_serves_only_its_own_kind_of_gpu(tmp_path, use_table):
    use_table(saved(tmp_path, entry(), device=Device((9, 0), 114)))
    assert choose(SQUARE, H200).source == "model"
    assert choose(SQUARE, Device((9, 0), 114)).source == "user table"


def test_a_measured_xla_still_names_the_best_kernel(tmp_path, use_table):
    use_table(saved(tmp_path, entry(prefer="xla")))
    decision = choose(SQUARE, H200)
    assert decision.spec is None and decision.source == "user table"
    assert decision.reason.startswith("XLA is faster: best kernel measured 170.5 us, XLA 174.8 us")
    assert choose(SQUARE, H200, kernel_only=True).spec == entry().spec


def test_a_measured_kernel_overrules_the_rules_for_xla(tmp_path, use_table):
    large = GemmProblem.dense(4096, 4096, 4096, b_major="k")
    assert choose(large, H200).spec is None
    use_table(saved(tmp_path, entry(large)))
    assert choose(large, H200).spec == entry(large).spec


def damaged(tmp_path, change) -> str:
    path = saved(tmp_path, entry())
    document = json.loads(path.read_text())
    change(document, document["entries"][0])
    path.write_text(json.dumps(document))
    return str(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d, e: d.update(version=7), ["version is 7", "reads 2", "tune again"]),
        (lambda d, e: d.pop("device"), ["missing fields ['device']"]),
        (lambda d, e: d["device"].update(num_sms="all"), ["num_sms is 'all'", "int"]),
        (lambda d, e: d["device"].update(gpu="B200"), ["gpu is 'B200'", "H100, H200"]),
        (lambda d, e: d["device"].update(compute_capability=[9]), ["compute_capability is [9]"]),
        (lambda d, e: d.update(entries={}), ["entries is {}", "list"]),
        (lambda d, e: d["entries"].append(e), ["entry 1", "a second entry"]),
        (lambda d, e: d["entries"].append(3), ["entry 1", "it is 3"]),
        (lambda d, e: e.pop("raster_order"), ["entry 0", "missing fields ['raster_order']"]),
        (lambda d, e: e.update(speed=1), ["unknown fields ['speed']"]),
        (lambda d, e: e.update(m=True), ["m is True", "int"]),
        (lambda d, e: e.update(k=0), ["k is 0"]),
        (lambda d, e: e.update(a_major="n"), ["a_major is 'n'"]),
        (lambda d, e: e.update(a_dtype="int8", b_dtype="int8"), ["B is int8, which", "(N, K)"]),
        (lambda d, e: e.update(prefer="cublas"), ["prefer is 'cublas'"]),
        (lambda d, e: e.update(kernel_us=-1), ["kernel_us is -1"]),
        (lambda d, e: e.update(kernel_us=10**400), ["kernel_us is 1000", "not a positive number"]),
        (lambda d, e: e.update(xla_us="fast"), ["xla_us is 'fast'"]),
        (lambda d, e: e["kernel"].update(tile_m=96), ["no kernel runs it: tile_m 96"]),
        (lambda d, e: e["kernel"].update(tile_m="96"), ["tile_m is '96'"]),
        (lambda d, e: e["kernel"].pop("epi_stages"), ["kernel has missing fields ['epi_stages']"]),
        (lambda d, e: e["raster_order"].update(swizzle=17), ["swizzle is 17, not 1 to 16"]),
        (lambda d, e: e["raster_order"].update(along="k"), ["along is 'k'"]),
    ],
)
def test_damaged_tables_say_where_and_why(tmp_path, use_table, change, words):
    path = damaged(tmp_path, change)
    use_table(path)
    with pytest.raises(TableError) as error:
        choose(SQUARE, H200)
    for word in [path, *words]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "content",
    [None, "", "{", "[]", b"\xff\xfe", 5000 * "9", 100_000 * "[", 100_000 * '{"version": '],
    ids=["absent", "empty", "cut short", "a list", "binary", "long", "deep", "deep fields"],
)
def test_files_that_are_no_table_are_named(tmp_path, use_table, content):
    path = tmp_path / "broken.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    use_table(path)
    with pytest.raises(TableError, match=r"broken\.json"):
        choose(SQUARE, H200)


def test_a_damaged_table_of_the_environment_names_the_variable(tmp_path, use_table):
    use_table(tmp_path / "absent.json")
    for _ in range(2):  # and again: the error is not swallowed the second time
        with pytest.raises(TableError, match=tables.TABLE_VARIABLE):
            choose(SQUARE, H200)


def test_a_failed_write_leaves_the_old_table(tmp_path, monkeypatch):
    path = saved(tmp_path, entry())
    before = path.read_text()
    monkeypatch.setattr("os.replace", lambda *names: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_table(Table.of(H200, [], "empty"), path)
    assert path.read_text() == before and list(tmp_path.iterdir()) == [path]


def shape(spec: GemmSpec) -> tuple:
    return (
        spec.tile_m, spec.tile_n, spec.tile_k, spec.cluster_m, spec.cluster_n, spec.warp_schedule,
        spec.split_k, spec.d_major,
    )  # fmt: skip


def test_ranked_candidates_differ_in_shape_and_are_sorted_by_the_model():
    candidates = ranked_candidates(SQUARE, H200, 20)
    assert len({shape(spec) for spec, _ in candidates}) == len(candidates) == 20
    costs = [estimate(SQUARE, *candidate, H200).ns for candidate in candidates]
    assert costs == sorted(costs)
    assert set(candidates) <= set(legal_specs(SQUARE, H200))
    assert ranked_candidates(GemmProblem.dense(64, 64, 4100), H200) == []


def test_variants_differ_in_one_detail():
    ranked = ranked_candidates(SQUARE, H200)
    candidate = next(candidate for candidate in ranked if not candidate[0].split_k)
    found = variants(SQUARE, H200, candidate)
    assert {raster_order for spec, raster_order in found if spec == candidate[0]} > {
        RasterOrder("n", 1)
    }
    others = [spec for spec, _ in found if spec != candidate[0]]
    assert {spec.tile_scheduler for spec in others} == {"static", "single", "dynamic"}
    assert {spec.epi_tile_n for spec in others} == {16, 32, 64}
    for spec in others:
        assert shape(spec) == shape(candidate[0])
        changed = {name for name, value in vars(spec).items() if value != vars(candidate[0])[name]}
        assert len(changed & {"tile_scheduler", "epi_tile_n"}) == 1


class FakeTimer:
    """Times by a formula whose best is a variant of a candidate, and counts its calls."""

    def __init__(self, unusable=lambda spec: False):
        self.calls: list = []
        self.unusable = unusable

    def __call__(self, spec: GemmSpec, raster_order: RasterOrder) -> float:
        self.calls.append((spec, raster_order))
        if self.unusable(spec):
            return math.inf
        microseconds = 100.0 + abs(spec.tile_m - 256) + abs(spec.tile_n - 128)
        microseconds += 5 * (spec.tile_scheduler != "dynamic") + 3 * (spec.cluster_size != 2)
        return microseconds + 4 * spec.split_k + raster_order.swizzle / 10


def test_tuning_finds_a_scheduler_and_order_that_no_candidate_had():
    timer, seen = FakeTimer(), []
    candidates = ranked_candidates(SQUARE, H200, 12)
    found = tuned_entry(
        SQUARE, H200, candidates, timer, lambda: 120.0, progress=lambda c, t: seen.append((c, t))
    )
    assert found.key == Key.of(SQUARE)
    assert (found.spec.tile_m, found.spec.tile_n, found.spec.cluster_size) == (256, 128, 2)
    assert found.spec.tile_scheduler == "dynamic"
    assert found.raster_order.swizzle == 1
    assert found.prefer == "kernel" and found.xla_us == 120.0
    assert found.kernel_us == pytest.approx(100.1)
    assert len({candidate for candidate, _ in seen}) == len(seen), "each is swept once"
    assert len(timer.calls) == len(seen) + 3 * 3, "three finalists, three rounds"


def test_tuning_prefers_xla_where_it_is_faster():
    candidates = ranked_candidates(SQUARE, H200, 4)
    found = tuned_entry(SQUARE, H200, candidates, FakeTimer(), lambda: 50.0)
    assert found.prefer == "xla" and found.kernel_us is not None and found.kernel_us > 50.0


def test_tuning_skips_kernels_that_cannot_run_and_says_when_none_can():
    candidates = ranked_candidates(SQUARE, H200, 12)
    timer = FakeTimer(unusable=lambda spec: spec.tile_m == 256)
    assert tuned_entry(SQUARE, H200, candidates, timer, lambda: 1.0).spec.tile_m != 256
    with pytest.raises(ValueError, match="none of 12 candidates could run M=4096"):
        tuned_entry(SQUARE, H200, candidates, FakeTimer(lambda spec: True), lambda: 1.0)


def test_a_lucky_first_time_does_not_win():
    candidates = ranked_candidates(SQUARE, H200, 2)
    first: set = set()

    def time_kernel(spec: GemmSpec, raster_order: RasterOrder) -> float:
        lucky = (spec, raster_order) == candidates[1] and not first
        if lucky:
            first.add(spec)
        return 10.0 if lucky else 90.0 if (spec, raster_order) == candidates[0] else 95.0

    found = tuned_entry(SQUARE, H200, candidates, time_kernel, lambda: 100.0)
    assert (found.spec, found.raster_order) == candidates[0] and found.kernel_us == 90.0


def test_merging_replaces_the_entry_of_the_same_problem(tmp_path):
    small = GemmProblem.dense(512, 512, 512)
    old = Table.of(H200, [entry(), entry(small)], "old")
    new = merged_table(old, [entry(prefer="xla")])
    assert new.entries[Key.of(SQUARE)].prefer == "xla"
    assert new.entries[Key.of(small)] == entry(small)
    write_table(new, tmp_path / "merged.json")
    assert read_table(tmp_path / "merged.json").entries == new.entries
