"""What dispatch chooses for products with epilogues, by tables and by its model."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from support import graphs
from support.buildable import epilogue_specs
from support.graphs import STANDARD

from jax_hopper_gemm.dispatch import (
    H200,
    Device,
    choice,
    choose,
    problem_violations,
    table_specs,
)
from jax_hopper_gemm.dispatch import table as tables
from jax_hopper_gemm.dispatch.candidates import model_specs
from jax_hopper_gemm.dispatch.cost import estimate, roofline_ns
from jax_hopper_gemm.dispatch.epilogue_cycles import element_cycles
from jax_hopper_gemm.dispatch.legality import pairing_violations
from jax_hopper_gemm.dispatch.memory_traffic import memory_bytes
from jax_hopper_gemm.dispatch.table import Entry, Key, Table, packaged_table, write_table
from jax_hopper_gemm.gemm.legality import violations
from jax_hopper_gemm.gemm.problem import GemmProblem, MatrixLayout, plain_graph
from jax_hopper_gemm.gemm.problem_type import ProblemType
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.launch.plan import make_plan

pytestmark = [pytest.mark.pure, pytest.mark.usefixtures("no_tables")]


def problem_of(name: str, m=4096, n=4096, k=4096, batches=1) -> GemmProblem:
    """Returns a compact problem with a standard epilogue."""
    graph = STANDARD[name]
    d_dtype = graph.matrices[0].dtype if graph.matrices else "bfloat16"
    problem = GemmProblem.dense(m, n, k, batches, d_dtype=d_dtype)
    layouts = {
        "matrix": MatrixLayout("n", n, m * n), "row": MatrixLayout("n", 0, 0),
        "column": MatrixLayout("m", 0, 0), "scalar": MatrixLayout("n", 0, 0),
    }  # fmt: skip
    operands = tuple(layouts[operand.kind] for operand in graph.operands)
    return replace(problem, epilogue=graph, operands=operands)


def entry(plain: GemmProblem, *, prefer: Any = "kernel", kernel_us=170.0, xla_us=175.0, **changes):
    spec = GemmSpec(
        plain.a_dtype, plain.b_dtype, plain.d_dtype, plain.a.major, plain.b.major, 128, 256
    )
    return Entry(
        Key.of(plain), prefer, replace(spec, **{"cluster_m": 2} | changes), RasterOrder("n", 4),
        kernel_us, xla_us,
    )  # fmt: skip


@pytest.fixture
def use(tmp_path, use_table):
    """A function that makes these entries the user's table."""

    def write(*entries: Entry) -> None:
        path = tmp_path / "table.json"
        write_table(Table.of(H200, entries, str(path)), path)
        use_table(path)

    return write


@pytest.mark.slow
def test_choices_are_legal_buildable_and_the_same_again():
    random, chosen = Random(7), 0
    for name in STANDARD:
        buildable = set(epilogue_specs(H200, [STANDARD[name]], ["bfloat16"]))
        for _ in range(25):
            n = 16 * random.randint(1, 12 if STANDARD[name].needs_whole_rows else 500)
            problem = problem_of(name, random.randint(1, 9000), n, 8 * random.randint(8, 900))
            if problem_violations(problem):
                continue
            decision = choose(problem, H200, kernel_only=True)
            spec, raster_order = decision.spec, decision.raster_order
            assert spec is not None and raster_order is not None, (name, decision.reason)
            run = problem.as_stored(spec.d_major)
            assert spec in buildable and spec.epilogue == run.epilogue
            assert violations(spec) == [] == pairing_violations(problem, spec)
            assert make_plan(problem, spec, raster_order, 132).grid[0] <= 9000 * 500
            choice._choose.cache_clear()
            assert choose(problem, H200, kernel_only=True) == decision
            chosen += 1
    assert chosen > 400


def test_an_epilogue_rides_on_the_kernel_measured_for_the_plain_product(use):
    problem = problem_of("bias")
    measured = entry(replace(problem, epilogue=None, operands=()))
    use(measured)
    decision = choose(problem, H200)
    assert decision.source == "user table" and decision.raster_order == measured.raster_order
    assert "measured 170.0 us" in decision.reason and "epilogue" in decision.reason
    spec = decision.spec
    assert spec is not None and spec.epilogue == STANDARD["bias"] and spec.epi_load_stages == 2
    kept = ("tile_m", "tile_n", "tile_k", "cluster_m", "cluster_n", "warp_schedule")
    assert all(getattr(spec, field) == getattr(measured.spec, field) for field in kept)
    assert spec in epilogue_specs(H200, [STANDARD["bias"]])
    assert all(s.epilogue is None for s in table_specs(H200))


def test_a_gated_product_takes_the_kernel_of_twice_its_columns(use):
    problem = problem_of("gated_silu", n=2048)
    use(entry(GemmProblem.dense(4096, 4096, 4096)))
    decision = choose(problem, H200)
    assert decision.source == "user table" and decision.spec is not None
    assert (decision.spec.tile_n, decision.spec.d_tile_n) == (256, 128)


def test_a_measured_kernel_that_cannot_hold_the_epilogue_gives_way(use):
    problem = problem_of("everything")
    plain = replace(problem, epilogue=None, operands=())
    use(entry(plain, tile_m=256, tile_n=192, num_stages=3, epi_tile_n=16))
    decision = choose(problem, H200, kernel_only=True)
    assert decision.source == "model" and decision.spec is not None
    assert decision.spec.acc_registers < 192


@pytest.mark.parametrize(("kernel_us", "runs"), [(176.0, True), (190.0, False)])
def test_xla_keeps_a_plain_product_that_it_wins_by_more_than_a_pass_over_d(use, kernel_us, runs):
    problem = problem_of("bias")  # a pass over 33.5 MB takes 7.8 us
    plain = replace(problem, epilogue=None, operands=())
    use(entry(plain, prefer="xla", kernel_us=kernel_us, xla_us=172.0))
    assert choose(plain, H200).spec is None
    decision = choose(problem, H200)
    assert (decision.spec is not None) == runs
    assert runs or "XLA is faster, and runs the epilogue" in decision.reason
    assert choose(problem, H200, kernel_only=True).spec is not None


def test_what_a_table_leaves_to_xla_is_unsupported_where_no_kernel_could_run_it(use):
    found = set()
    for name in STANDARD:
        problem = problem_of(name)
        plain = replace(problem, epilogue=None, operands=())
        if problem_violations(plain):
            continue
        use(entry(plain, prefer="xla", kernel_us=900.0, xla_us=100.0, tile_n=128))
        decision, strict = (choose(problem, H200, kernel_only=x) for x in (False, True))
        assert (decision.source == "unsupported") == (strict.spec is None), name
        assert (strict.source == "unsupported") == (strict.spec is None), name
        found.add((decision.spec is None, strict.spec is None))
    assert {(True, True), (True, False)} <= found


def test_rules_for_xla_hold_for_epilogues_and_say_so():
    decision = choose(problem_of("bias", n=8, batches=2), H200)
    assert decision.spec is None
    assert "D is 4096x8" in decision.reason and "epilogue goes there" in decision.reason


def sum_of_products(count: int) -> GemmProblem:
    """Returns a problem whose epilogue holds `count` values at once."""
    build = graphs.Builder()
    products = [build("mul", 0, float(i)) for i in range(count)]
    total = products[0]
    for value in products[1:]:
        total = build("add", total, value)
    build.result(total, "bfloat16")
    return replace(GemmProblem.dense(4096, 4096, 4096), epilogue=build.graph())


def test_an_epilogue_that_fits_no_kernel_goes_to_xla_with_the_reason():
    decision = choose(sum_of_products(120), H200, kernel_only=True)
    assert decision.spec is None and "registers" in decision.reason


def test_an_epilogue_that_leaves_room_for_small_tiles_only_goes_to_xla():
    problem = sum_of_products(60)
    decision = choose(problem, H200)
    assert decision.spec is None and "XLA's product and a pass over its result" in decision.reason
    forced = choose(problem, H200, kernel_only=True).spec
    assert forced is not None and forced.acc_registers <= 64
    assert choose(sum_of_products(6), H200).spec is not None


def test_other_gpus_have_no_epilogue_kernels():
    assert epilogue_specs(Device((10, 0), 148), STANDARD.values()) == []


def test_the_packaged_table_serves_epilogues(monkeypatch):
    monkeypatch.setattr(tables, "packaged_table", packaged_table)
    choice._choose.cache_clear()
    decision = choose(problem_of("bias", 4096, 4096, 4096), H200)
    assert decision.spec is not None and decision.source == "table"


# The model


def epilogue_ns(name: str, spec: GemmSpec, problem: GemmProblem) -> float:
    """Returns how much longer the kernel takes with the epilogue than without."""
    graph = STANDARD[name]
    plain = replace(problem, epilogue=None, operands=())
    fused = replace(spec, epilogue=graph, epi_load_stages=4 if graph.loaded else 0)
    return (
        estimate(problem, fused, RasterOrder(), H200).ns
        - estimate(plain, spec, RasterOrder(), H200).ns
    )


BASE = GemmSpec(
    "bfloat16", "bfloat16", "bfloat16", "k", "n", 128, 128, cluster_m=2, num_stages=4, epi_stages=2
)


def test_more_operations_cost_more():
    assert element_cycles(problem_of("bias").graph) > 0 == element_cycles(plain_graph("float32"))
    names = ("bias", "bias_silu", "bias_gelu")
    ladder = [element_cycles(STANDARD[name]) for name in names]
    assert ladder[0] < ladder[1] and ladder[0] < ladder[2]
    times = [epilogue_ns(name, BASE, problem_of(name)) for name in names]
    assert 0 < times[0] < times[1] < 0.1 * roofline_ns(problem_of("bias"))


def test_pingpong_hides_an_epilogue_that_cooperative_warpgroups_expose():
    exposed = epilogue_ns("bias_gelu", BASE, problem_of("bias_gelu"))
    hidden = epilogue_ns(
        "bias_gelu", replace(BASE, warp_schedule="pingpong"), problem_of("bias_gelu")
    )
    assert hidden < exposed


def test_matrices_of_operands_and_results_are_bytes_that_memory_moves():
    for name in ("residual", "bias_gelu_saved", "alpha_beta", "gated_silu"):
        problem = problem_of(name, 8192, 14336, 4096)
        (spec, *_) = model_specs(ProblemType.of(problem))
        assert memory_bytes(problem, spec, [RasterOrder()], H200) >= problem.bytes
    plain = GemmProblem.dense(8192, 14336, 4096)
    assert problem_of("residual", 8192, 14336).bytes - plain.bytes == 8192 * 14336 * 2


def test_no_estimate_is_under_the_roofline():
    for name in STANDARD:
        problem = problem_of(name, 1000, 256, 512)
        for spec in model_specs(ProblemType.of(problem)):
            cost = estimate(problem, spec, RasterOrder(), H200)
            assert cost.ns >= roofline_ns(problem) and 0 < cost.occupancy <= 1, name
