"""Which kernels exist, and what follows from a spec's fields."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import cached_property

import pytest
from support.cubin_samples import OTHER_VALUES, SPEC
from support.graphs import EIGHT_BIT

from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph, Node, Operand, Result
from jax_hopper_gemm.gemm.legality import MAX_ACC_REGISTERS, max_accumulators, violations
from jax_hopper_gemm.gemm.smem import SMEM_LIMIT, barrier_bytes
from jax_hopper_gemm.gemm.spec import CACHED_OF, GemmSpec

pytestmark = pytest.mark.pure

LARGE = GemmSpec("bfloat16", "bfloat16", "bfloat16", "k", "n", 128, 256)

ROW, COLUMN = Operand("row", "bfloat16"), Operand("column", "float32")
MATRIX, MASK = Operand("matrix", "float32"), Operand("matrix", "bool")
STORED = Result("matrix", 0, "bfloat16")
# D = (acc + row) * column as bfloat16; the sum before as float32; sums of its columns.
BUSY = EpilogueGraph(
    operands=(ROW, COLUMN, MATRIX, Operand("scalar", "float32")),
    nodes=(Node("add", (0, 1)), Node("mul", (5, 2))),
    results=(Result("matrix", 6, "bfloat16"), Result("matrix", 5), Result("column_sum", 6)),
)
PAIR = EpilogueGraph(2, nodes=(Node("mul", (0, 1)),), results=(Result("matrix", 2, "bfloat16"),))
MASKED = EpilogueGraph(operands=(MASK,), nodes=(Node("select", (1, 0, 0)),), results=(STORED,))


@pytest.mark.parametrize("field", CACHED_OF)
@pytest.mark.parametrize(
    "spec",
    [LARGE, replace(LARGE, epilogue=BUSY, epi_load_stages=2), replace(LARGE, b_dtype="int4")],
    ids=["plain", "busy", "converting"],
)
def test_a_varied_spec_keeps_no_stale_property(spec, field):
    cached = [x for x, value in vars(GemmSpec).items() if isinstance(value, cached_property)]
    value = {"a_major": "m", "b_major": "k"}.get(field) or getattr(spec, field) + 1
    before = {name: getattr(spec, name) for name in cached}  # and so it is cached
    varied, fresh = spec.varied(**{field: value}), replace(spec, **{field: value})
    assert varied == fresh and spec != fresh
    assert {name: getattr(varied, name) for name in cached} == {
        name: getattr(fresh, name) for name in cached
    }
    assert {name for name in cached if getattr(fresh, name) != before[name]} <= {CACHED_OF[field]}


def test_a_plain_spec_has_no_violations():
    assert violations(LARGE) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"a_dtype": "float64", "b_dtype": "float64"}, "A and B are float64"),
        ({"d_dtype": "bool"}, "D is bool"),
        ({"a_dtype": "float32", "b_dtype": "float32", "b_major": "k", "tile_k": 32, "tile_n": 48},
         "48 columns of float32 as it is are not 16 or a multiple of 32"),
        ({"a_dtype": "int8", "b_dtype": "int8", "b_major": "k", "tile_k": 128, "split_k": True},
         "partial sums are float32, accumulators int32"),
        (
            {
                "a_dtype": "int8",
                "b_dtype": "int8",
                "b_major": "k",
                "tile_k": 128,
                "promoted": True,
                "a_block": 1,
                "b_block": 1,
                "nested": True,
            },
            "scales, and the product has a nested batch",
        ),
        ({"a_major": "n"}, "A has major 'n', not 'm' or 'k'"),
        ({"b_major": "m"}, "B has major 'm', not 'n' or 'k'"),
        ({"warp_schedule": "solo"}, "'solo'"),
        ({"tile_scheduler": "stream"}, "'stream'"),
        ({"tile_m": 96}, "tile_m 96"),
        ({"tile_n": 8}, "tile_n 8"),
        ({"tile_n": 272}, "tile_n 272"),
        ({"tile_n": 100}, "tile_n 100"),
        ({"tile_k": 32}, "tile_k 32"),
        ({"cluster_m": 8}, "cluster 8x1"),
        ({"tile_m": 256, "num_stages": 2}, "256 accumulators"),
        ({"tile_m": 256, "tile_n": 64, "warp_schedule": "pingpong"}, "tile_m 256 exceeds 128"),
        ({"tile_n": 128, "warp_schedule": "pingpong", "tile_scheduler": "single"}, "persistent"),
        ({"tile_n": 176, "cluster_m": 2, "epi_tile_n": 16}, "176 columns do not split into 2"),
        ({"epi_tile_n": 8}, "epi_tile_n 8 "),
        ({"tile_n": 208}, "epi_tile_n 32 is not 16, 32 or 64 dividing 208 columns"),
        ({"num_stages": 1}, "num_stages 1"),
        ({"epi_stages": 1}, "epi_stages 1"),
        ({"epi_load_stages": 2}, "loads 0 operands"),
        ({"num_stages": 5}, f"a CTA has {SMEM_LIMIT}"),
        ({"evict_first": "d"}, "L2 evicts 'd' first"),
        ({"short_boxes": True, "cluster_n": 2}, "boxes end with their matrices"),
        ({"cluster_k": 2}, "take a cluster of 1x1, the scheduler single, no split-K"),
        ({"a_dtype": "int8", "b_dtype": "int8", "b_major": "k", "tile_k": 128, "cluster_k": 2,
          "tile_scheduler": "single"}, "add up float32 sums of wgmma, not those of int8"),
        ({"cluster_k": 3, "tile_scheduler": "single"}, "cluster_k 3 is not 1, 2, 4 or 8"),
    ],
)  # fmt: skip
def test_each_violation_names_the_value(change, reason):
    found = violations(replace(LARGE, **change))
    assert len(found) == 1, found
    assert reason in found[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"epilogue": EpilogueGraph()}, "epilogue: no results"),
        ({"epilogue": replace(MASKED, operands=())}, "epilogue: node 0 (select)"),
        ({"epilogue": PAIR, "d_dtype": "float32"},
         "D is float32, the epilogue's first result bfloat16"),
        ({"epilogue": PAIR, "tile_n": 208, "epi_tile_n": 16}, "tile_n 208 does not split"),
        ({"epilogue": PAIR, "tile_n": 96, "cluster_m": 2, "epi_tile_n": 16}, "48 columns do not"),
        ({"epilogue": PAIR, "tile_n": 160}, "dividing 80 columns"),
        ({"epilogue": MASKED, "epi_tile_n": 16, "epi_load_stages": 2}, "narrow for a bool"),
        ({"epilogue": PAIR, "cluster_k": 2, "tile_scheduler": "single"}, "no group, panel or gate"),
        ({"epilogue": MASKED}, "epi_load_stages 0, of an epilogue that loads 1 operands"),
        ({"epilogue": MASKED, "epi_load_stages": 1}, "epi_load_stages 1"),
        ({"epilogue": MASKED, "epi_load_stages": 22, "tile_m": 64, "tile_n": 32, "num_stages": 12},
         "544 bytes of barriers; there is room for 512"),
    ],
)  # fmt: skip
def test_each_violation_of_an_epilogue_names_the_value(change, reason):
    found = violations(replace(LARGE, **change))
    assert any(reason in violation for violation in found), found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"grouped": "n"}, "groups cut the axis 'n', not 'm' or 'k'"),
        ({"grouped": "m", "gathered": "d"}, "no kernel gathers D by indices"),
        ({"gathered": "a"}, "no kernel gathers A by indices without groups"),
        ({"grouped": "m", "tile_scheduler": "single"}, "take a persistent scheduler"),
        ({"grouped": "m", "cluster_m": 2, "cluster_n": 2}, "beyond the ends of groups"),
        ({"grouped": "m", "gathered": "b"}, "no kernel gathers B by indices where groups cut M"),
        ({"grouped": "m", "a_major": "m"}, "A must be stored (M, K)"),
        ({"grouped": "m", "gathered": "a", "cluster_n": 2}, "cannot share an operand"),
        ({"grouped": "m", "gathered": "a", "tile_k": 128, "num_stages": 2}, "tile_k 128 is not 64"),
        ({"grouped": "k"}, "A must be stored (K, M) and B (K, N)"),
        ({"grouped": "k", "a_major": "m", "b_major": "k"}, "and B (K, N)"),
        ({"grouped": "m", "epilogue": BUSY, "tile_n": 128, "epi_load_stages": 2, "num_stages": 3,
          "epi_stages": 2}, "a column_sum of rows that are cut into groups"),
        ({"grouped": "m", "tile_n": 208, "epi_tile_n": 16, "warp_schedule": "pingpong"},
         "208 accumulators a thread; 192 fit"),
        ({"grouped": "m", "tile_m": 64, "tile_n": 16, "epi_tile_n": 16, "num_stages": 24},
         "528 bytes of barriers"),
        ({"grouped": "m", "gathered": "a", "evict_first": "a"}, "A is gathered, not loaded"),
        ({"grouped": "m", "short_boxes": True}, "groups or slices for a cluster"),
    ],
)  # fmt: skip
def test_each_violation_of_groups_names_the_value(change, reason):
    found = violations(replace(LARGE, **change))
    assert any(reason in violation for violation in found), found


@pytest.mark.parametrize(
    "change",
    [
        {"grouped": "m"},
        {"grouped": "m", "b_major": "k", "tile_scheduler": "dynamic"},
        {"grouped": "k", "a_major": "m", "cluster_m": 2},
        {"grouped": "m", "gathered": "a"},
    ],
)
def test_grouped_kernels_are_their_own(change):
    spec = replace(LARGE, **change)
    assert violations(spec) == []
    assert GemmSpec.from_json(spec.to_json()) == spec
    axis = spec.grouped
    assert spec.name.startswith(f"jhg_grouped_{axis}_" + ("gather_a_" if spec.gathered else ""))
    assert max_accumulators(spec) == (176 if spec.gathered else 192) < max_accumulators(LARGE)
    assert barrier_bytes(spec) > barrier_bytes(LARGE) and spec.smem_bytes == LARGE.smem_bytes


def test_an_epilogue_takes_registers_from_the_accumulators():
    """So that none spills: what holds more at once leaves room for a smaller tile."""
    assert max_accumulators(LARGE) == 208
    chain = tuple(Node("exp", (i,)) for i in range(40))
    long = EpilogueGraph(nodes=chain, results=(Result("matrix", 40, "bfloat16"),))
    wide = EpilogueGraph(
        nodes=(*(Node("constant", (), (i,)) for i in range(12)),
               *(Node("mul", (0, 1 + i)) for i in range(12)),
               *(Node("add", (13 + i if i == 0 else 24 + i, 14 + i)) for i in range(11))),
        results=(Result("matrix", 35, "bfloat16"),),
    )  # fmt: skip
    limits = [max_accumulators(replace(LARGE, epilogue=graph)) for graph in (long, BUSY, wide)]
    assert 208 > limits[0] > limits[2], "a chain holds one value, a sum of products 12"
    assert limits[0] > limits[1], "operands and further results are held, too"
    narrow = replace(LARGE, epilogue=BUSY, epi_tile_n=16)
    assert max_accumulators(narrow) > limits[1]
    (reason,) = violations(replace(LARGE, tile_m=256, tile_n=192, num_stages=3, epilogue=wide))
    assert f"192 accumulators a thread; {limits[2]} fit" in reason and "this epilogue" in reason
    for tile_m in (64, 192):
        spec = replace(LARGE, tile_m=tile_m, epilogue=long)
        assert max_accumulators(spec) <= MAX_ACC_REGISTERS[spec.math_warpgroups]


def test_scales_of_tensors_take_registers_that_promoted_sums_leave():
    """Of groups along K, in wide epilogue tiles: there ptxas spills with none of them."""
    spec = GemmSpec(
        "float8_e4m3fn", "float8_e5m2", "bfloat16", "k", "k", 128, 192, 128, cluster_m=2,
        tile_scheduler="dynamic", num_stages=3, epi_tile_n=64, epilogue=EIGHT_BIT["scaled"],
        grouped="k", promoted=True,
    )  # fmt: skip
    assert violations(spec) == [] and spec.acc_registers == max_accumulators(spec) == 192
    vectors = {"epilogue": EIGHT_BIT["scaled_rows_columns"], "epi_load_stages": 2}
    for change in ({"epi_tile_n": 32}, {"grouped": "m"}, vectors):
        (reason,) = violations(replace(spec, **change))
        assert reason.startswith("192 accumulators a thread; 1")


def test_violations_report_every_bad_field_at_once():
    found = violations(replace(LARGE, a_dtype="bool", b_dtype="bool", tile_m=1, tile_n=1))
    assert len(found) == 3


@pytest.mark.parametrize("graph", [None, BUSY, PAIR, MASKED])
def test_json_restores_an_epilogue(graph):
    spec = replace(LARGE, epilogue=graph, epi_load_stages=2 if graph and graph.loaded else 0)
    restored = GemmSpec.from_json(spec.to_json())
    assert restored == spec and hash(restored) == hash(spec)
    assert restored.to_json() == spec.to_json() and restored.name == spec.name


def test_names_of_epilogues_tell_them_apart():
    other = replace(BUSY, operands=(replace(ROW, dtype="float16"), *BUSY.operands[1:]))
    names = {replace(LARGE, epilogue=graph).name for graph in (None, BUSY, other, PAIR, MASKED)}
    assert len(names) == 5
    assert all(name.startswith(LARGE.name) for name in names)


def test_json_round_trips_and_is_canonical():
    assert GemmSpec.from_json(LARGE.to_json()) == LARGE
    shuffled = json.dumps(dict(reversed(json.loads(LARGE.to_json()).items())))
    assert GemmSpec.from_json(shuffled).to_json() == LARGE.to_json()


def test_json_with_one_dtype_for_both_operands_is_read():
    """As in programs that were exported before the two had fields of their own."""
    fields = json.loads(LARGE.to_json())
    assert fields.pop("a_dtype") == fields.pop("b_dtype")
    assert GemmSpec.from_json(json.dumps(fields | {"ab_dtype": "bfloat16"})) == LARGE


def test_a_name_tells_operands_of_two_dtypes_apart():
    mixed = replace(LARGE, b_dtype="float16")
    assert mixed.name.startswith("jhg_gemm_bf16_f16_bf16_tt_")
    assert violations(mixed) == ["A is bfloat16 and B float16: cast one to the other's dtype"]


def test_every_field_changes_json_and_name():
    assert OTHER_VALUES.keys() == {field.name for field in fields(SPEC)}
    for field, value in OTHER_VALUES.items():
        other = replace(SPEC, **{field: value})
        assert other.to_json() != SPEC.to_json()
        assert other.name != SPEC.name, field


def test_name_reads_as_operation_dtypes_layout_tile_and_schedule():
    assert LARGE.name == "jhg_gemm_bf16_bf16_tt_128x256x64_1x1_cooperative_static_s4_e32x4"
