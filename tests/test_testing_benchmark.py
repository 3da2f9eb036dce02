"""The benchmark times each program once, and only on a Hopper GPU."""

from __future__ import annotations

import jax
import pytest

from jax_hopper_gemm.dispatch import H200
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.testing import benchmark, timing

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
