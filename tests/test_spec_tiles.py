"""What a spec's fields imply: its warpgroups' parts of a tile, shared memory, boxes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.graphs import STANDARD
from test_spec import BUSY, LARGE, PAIR

from jax_hopper_gemm.gemm.legality import violations
from jax_hopper_gemm.gemm.smem import barrier_bytes, exchange_bytes, loaded_bytes, scratch_bytes
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.gemm.tma_box import TmaBox

pytestmark = pytest.mark.pure


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


def test_warpgroups_take_turns_where_64_rows_are_promoted():
    spec = GemmSpec(
        "float8_e4m3fn", "float8_e4m3fn", "bfloat16", "k", "k", 64, 128, 128, promoted=True,
        num_stages=6,
    )  # fmt: skip
    assert spec.k_in_turns and not violations(spec)
    assert spec.math_warpgroups == 2
    assert spec.rows_per_warpgroup == spec.columns_per_warpgroup == 64
    assert spec.acc_registers == 128  # of all columns, and the sums that are promoted to them
    plain = replace(spec, tile_scheduler="dynamic", grouped="m")
    assert not plain.k_in_turns and plain.math_warpgroups == 1
    for other in (
        {"tile_m": 128}, {"warp_schedule": "pingpong"}, {"promoted": False},
        {"epilogue": STANDARD["row_sum"]},
    ):  # fmt: skip
        assert not replace(spec, **other).k_in_turns, other
    for reason, change in {
        "num_stages 5 is no even number from 4": {"num_stages": 5},
        "epi_tile_n 32 is not 16, 32 or 64 dividing 16 columns": {"tile_n": 32},
    }.items():
        assert violations(replace(spec, **change))[0].startswith(reason)


def test_what_warpgroups_that_convert_in_turns_cannot_do():
    spec = GemmSpec(
        "bfloat16", "int4", "bfloat16", "k", "n", 16, 64, 256, num_stages=8, short_boxes=True,
        evict_first="b",
    )  # fmt: skip
    assert spec.k_in_turns and not violations(spec)
    assert not violations(replace(spec, k_group=64))
    for reason, change in {
        "tile_m 128: warpgroups that take turns add up 64 rows at most": {"tile_m": 128},
        "tile_m 64: warpgroups that take turns add up 32 rows at most": {
            "tile_m": 64,
            "split_k": True,
        },
        "know no groups of rows": {"tile_m": 64, "grouped": "m", "short_boxes": False},
        "4 stages do not hold the sums that warpgroups exchange": {
            "tile_m": 64,
            "tile_n": 128,
            "tile_k": 64,
            "num_stages": 4,
            "tile_scheduler": "single",
            "epilogue": STANDARD["gated_silu"],
        },
        "num_stages 2 is no even number from 4": {"num_stages": 2},
        "num_stages 7 is no even number": {"num_stages": 7},
        "epi_tile_n 64 is not 16, 32 or 64 dividing": {"epi_tile_n": 64},
        "know no scales along K of two B's": {
            "tile_n": 128,
            "epilogue": STANDARD["gated_silu"],
            "k_group": 64,
        },
    }.items():
        assert any(reason in text for text in violations(replace(spec, **change))), reason


def test_warpgroups_that_take_turns_at_one_tile_exchange_sums_in_the_ring():
    spec = GemmSpec(
        "bfloat16", "int4", "bfloat16", "k", "n", 64, 64, 128, num_stages=8, epi_tile_n=16
    )
    shared = replace(spec, tile_scheduler="single", cluster_k=4)
    assert not violations(spec) and not violations(shared)
    assert exchange_bytes(spec) == 2 * 2 * 64 * (32 + 4) * 4 and exchange_bytes(shared) == 0
    assert shared.slices == 2  # of 32 columns, 16 of each warpgroup
    assert shared.slot_bytes == 4 * 64 * 32 * 4


def test_shared_memory_adds_barriers_ring_and_epilogue():
    assert LARGE.stage_bytes == 128 * 64 * 2 + 256 * 64 * 2
    assert LARGE.epi_stage_bytes == 64 * 32 * 2
    assert LARGE.smem_bytes == 4 * 49152 + 2 * 4 * 4096 + 512
    assert replace(LARGE, d_dtype="float32").epi_stage_bytes == 2 * LARGE.epi_stage_bytes


def test_shared_memory_of_an_epilogue_is_staged_loaded_and_scratch():
    spec = replace(LARGE, tile_n=128, epilogue=BUSY, num_stages=3, epi_stages=2, epi_load_stages=3)
    assert violations(spec) == []
    assert spec.epi_stage_bytes == 64 * 32 * (2 + 4)
    # A row of 32 bfloat16 is padded to 128 bytes; a column has 64 rows.
    assert [loaded_bytes(spec, o) for o in BUSY.loaded] == [128, 64 * 4, 64 * 32 * 4]
    assert scratch_bytes(spec) == 2 * 2 * 4 * 32 * 4  # warpgroups, turns, warps, columns
    assert barrier_bytes(spec) == 16 * (3 + 2 * 3)
    staged, loaded = 2 * 2 * spec.epi_stage_bytes, 2 * 3 * (128 + 256 + 8192)
    assert spec.smem_bytes == 3 * 32768 + staged + loaded + scratch_bytes(spec) + 512


def test_a_gated_tile_shares_its_columns_between_gate_and_up():
    spec = replace(LARGE, epilogue=PAIR)
    assert violations(spec) == []
    assert (spec.d_tile_n, spec.acc_registers) == (128, 128)
    assert spec.stage_bytes == LARGE.stage_bytes and spec.b_box == TmaBox(64, 64, 128)
    assert replace(spec, b_major="k").b_box == TmaBox(64, 128, 128)


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
