"""Which kernels exist, and what follows from a spec's fields."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from cubin_samples import OTHER_VALUES, SPEC

from jax_hopper_gemm.spec import SMEM_LIMIT, GemmSpec, TmaBox, violations

LARGE = GemmSpec("bfloat16", "bfloat16", "k", "n", 128, 256)


def test_a_plain_spec_has_no_violations():
    assert violations(LARGE) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ab_dtype": "float32"}, "A and B are float32"),
        ({"d_dtype": "int8"}, "D is int8"),
        ({"a_major": "n"}, "a_major is 'n'"),
        ({"b_major": "m"}, "b_major is 'm'"),
        ({"warp_schedule": "solo"}, "'solo'"),
        ({"tile_scheduler": "stream"}, "'stream'"),
        ({"tile_m": 96}, "tile_m 96"),
        ({"tile_n": 8}, "tile_n 8"),
        ({"tile_n": 272}, "tile_n 272"),
        ({"tile_n": 100}, "tile_n 100"),
        ({"tile_k": 32}, "tile_k 32"),
        ({"cluster_m": 4}, "cluster 4x1"),
        ({"tile_m": 256, "num_stages": 2}, "256 accumulators"),
        ({"tile_m": 256, "tile_n": 64, "warp_schedule": "pingpong"}, "tile_m 256 exceeds 128"),
        ({"tile_n": 128, "warp_schedule": "pingpong", "tile_scheduler": "single"}, "persistent"),
        ({"tile_n": 176, "cluster_m": 2, "epi_tile_n": 16}, "tile_n 176 does not split into 2"),
        ({"epi_tile_n": 8}, "epi_tile_n 8 "),
        ({"tile_n": 208}, "epi_tile_n 32 is not 16, 32 or 64 dividing tile_n 208"),
        ({"num_stages": 1}, "num_stages 1"),
        ({"epi_stages": 1}, "epi_stages 1"),
        ({"num_stages": 5}, f"a CTA has {SMEM_LIMIT}"),
    ],
)
def test_each_violation_names_the_value(change, reason):
    found = violations(replace(LARGE, **change))
    assert len(found) == 1, found
    assert reason in found[0]


def test_violations_report_every_bad_field_at_once():
    found = violations(replace(LARGE, ab_dtype="int8", tile_m=1, tile_k=1))
    assert len(found) == 3


@pytest.mark.parametrize(
    ("tile_m", "tile_n", "schedule", "warpgroups", "rows", "registers"),
    [
        (64, 128, "cooperative", 1, 64, 64),
        (128, 256, "cooperative", 2, 64, 128),
        (192, 128, "cooperative", 3, 64, 64),
        (256, 128, "cooperative", 2, 128, 128),
        (64, 256, "pingpong", 2, 64, 128),
        (128, 192, "pingpong", 2, 128, 192),
    ],
)
def test_warpgroups_share_a_tile_by_rows(tile_m, tile_n, schedule, warpgroups, rows, registers):
    spec = replace(LARGE, tile_m=tile_m, tile_n=tile_n, warp_schedule=schedule)
    assert spec.math_warpgroups == warpgroups
    assert spec.rows_per_warpgroup == rows
    assert spec.acc_registers == registers
    assert spec.threads == 128 * (warpgroups + 1)


def test_shared_memory_adds_barriers_ring_and_epilogue():
    assert LARGE.stage_bytes == 128 * 64 * 2 + 256 * 64 * 2
    assert LARGE.epi_stage_bytes == 64 * 32 * 2
    assert LARGE.smem_bytes == 1024 + 4 * 49152 + 2 * 4 * 4096
    assert replace(LARGE, d_dtype="float32").epi_stage_bytes == 2 * LARGE.epi_stage_bytes


@pytest.mark.parametrize(
    ("change", "a_box", "b_box"),
    [
        ({}, TmaBox(64, 128, 128), TmaBox(64, 64, 128)),
        ({"a_major": "m", "b_major": "k"}, TmaBox(64, 64, 128), TmaBox(64, 256, 128)),
        ({"cluster_m": 2, "cluster_n": 2}, TmaBox(64, 64, 128), TmaBox(64, 32, 128)),
        ({"tile_n": 96}, TmaBox(64, 128, 128), TmaBox(32, 64, 64)),
        ({"tile_n": 16, "tile_k": 128}, TmaBox(64, 128, 128), TmaBox(16, 128, 32)),
    ],
)
def test_boxes_are_as_wide_as_their_swizzle_and_shared_along_the_other_index(change, a_box, b_box):
    spec = replace(LARGE, **change)
    assert (spec.a_box, spec.b_box) == (a_box, b_box)


def test_json_round_trips_and_is_canonical():
    assert GemmSpec.from_json(LARGE.to_json()) == LARGE
    shuffled = json.dumps(dict(reversed(json.loads(LARGE.to_json()).items())))
    assert GemmSpec.from_json(shuffled).to_json() == LARGE.to_json()


def test_every_field_changes_json_and_name():
    assert OTHER_VALUES.keys() == vars(SPEC).keys()
    for field, value in OTHER_VALUES.items():
        other = replace(SPEC, **{field: value})
        assert other.to_json() != SPEC.to_json()
        assert other.name != SPEC.name, field


def test_name_reads_as_operation_dtypes_layout_tile_and_schedule():
    assert LARGE.name == "jhg_gemm_bf16_bf16_tt_128x256x64_1x1_cooperative_static_s4_e32x4"
