"""The benchmark times each program once, and only on a Hopper GPU."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jax_hopper_gemm.dispatch import H200, choose
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.raster import RasterOrder
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.launch.plan import make_plan
from jax_hopper_gemm.testing import benchmark, shapes, timing
from jax_hopper_gemm.testing.lowered import launches_of

pytestmark = pytest.mark.pure


def test_benchmark_asks_for_a_hopper_gpu():
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    with pytest.raises(RuntimeError, match="timing needs a Hopper GPU; jax's first device is"):
        benchmark.this_device()


def test_benchmark_times_one_program_once(monkeypatch):
    timed = []

    def alternate(measures, rounds, rest):
        timed.append(sorted(measures))
        return {name: timing.Timing((1.0,)) for name in measures}

    monkeypatch.setattr(benchmark, "this_device", lambda: H200)
    monkeypatch.setattr(timing, "alternate", alternate)
    makers = {name: lambda p, sets: lambda a, b: a for name in ("hopper", "auto", "xla")}
    legal = GemmProblem.dense(4096, 4096, 4096)
    odd = GemmProblem.dense(33, 35, 37)
    monkeypatch.setattr(benchmark, "random_inputs", lambda problem: [(0, 0)])
    monkeypatch.setattr(benchmark.time, "sleep", lambda seconds: None)
    rows = benchmark.run([legal, odd], ["burst"], makers)
    if rows[0].auto == rows[0].kernel:
        assert timed[0] == ["hopper", "xla"]
    assert rows[0].timings.keys() == {"hopper", "auto", "xla"}
    assert timed[1] == ["auto", "xla"]  # no kernel is legal
    assert (rows[1].kernel, rows[1].auto) == ("", "XLA")


@pytest.mark.parametrize("scheduler", ["static", "dynamic"])
@pytest.mark.parametrize(
    "problem",
    [GemmProblem.dense(1024, 2048, 512, b_major="k"), GemmProblem.dense(512, 768, 256, 3)],
)
def test_one_kernel_is_launched_whatever_dispatch_chooses(problem, scheduler):
    chosen = choose(problem, H200, kernel_only=True).spec
    assert chosen
    spec = dataclasses.replace(chosen, tile_scheduler=scheduler)
    order = RasterOrder("m", 2)
    operands = [
        jax.ShapeDtypeStruct(shapes.operand_shape(problem, operand), jnp.bfloat16)
        for operand in ("a", "b")
    ]
    function = benchmark.one_kernel(problem, spec, order, num_sms=100)
    (launch,) = launches_of(function, *operands)
    assert GemmSpec.from_json(launch.spec) == spec
    assert launch.plan == make_plan(problem, spec, order, 100).encode()
    assert jax.eval_shape(function, *operands).size == problem.l * problem.m * problem.n


def test_one_kernel_is_launched_as_a_program_launches_it():
    problem = GemmProblem.dense(4096, 4096, 4096)
    operands = [jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)] * 2
    chosen = choose(problem, H200, kernel_only=True)
    assert chosen.spec and chosen.raster_order
    forced = benchmark.one_kernel(problem, chosen.spec, chosen.raster_order, H200.num_sms)
    product = benchmark.MAKERS["hopper"](problem, [])
    assert product and launches_of(forced, *operands) == launches_of(product, *operands)
