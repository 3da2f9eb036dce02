"""Timing takes turns, rotates its inputs and awaits the kernels."""

from __future__ import annotations

import jax
import pytest

from jax_hopper_gemm.testing import timing


def test_alternate_takes_turns():
    log = []
    candidates = {name: lambda name=name: log.append(name) or [len(log)] for name in "AB"}
    times = timing.alternate(candidates, rounds=3, rest=lambda: log.append("rest"))
    assert log == ["A", "rest", "B", "rest"] * 3
    assert times["A"].samples == (1, 5, 9)


def test_timing_summarises_its_samples():
    time = timing.Timing((5.0, 1.0, 2.0, 4.0, 3.0))
    assert (time.median, time.quartiles) == (3.0, (2.0, 4.0))
    assert timing.Timing((7.0,)).quartiles == (7.0, 7.0)


def test_rotated_inputs_exceed_l2():
    for nbytes in (1, 2**20, 2**22, 2**26, 2**26 + 1, 2**30):
        sets = timing.sets_to_rotate(nbytes)
        assert sets in (timing.MAX_SETS, 1) or (sets - 1) * nbytes >= timing.L2_BYTES, nbytes
        assert (sets == 1) == (nbytes > timing.L2_BYTES), nbytes


def test_sustained_counts_only_the_second_second():
    now = 0.0
    calls = []

    def product(x):
        nonlocal now
        now += 0.010 if now < 1.0399 else 0.020  # the card slows down
        calls.append(x)
        return x

    samples = timing.sustained(product, [(1,), (2,)], clock=lambda: now)()
    assert samples == pytest.approx([20_000.0] * len(samples))
    assert len(samples) * 5 * 0.020 >= 1.0
    assert calls[:4] == [1, 2, 1, 2]


def test_burst_hands_one_call_at_a_time_to_cupti(monkeypatch):
    from jax.experimental.mosaic.gpu import profiler

    def measure(f, *, iterations):
        assert isinstance(f, jax.stages.Wrapped)  # else the profiler would trace it
        return lambda: (None, [f() * 1e-3 for _ in range(iterations)])

    monkeypatch.setattr(profiler, "measure", measure)
    assert timing.burst(lambda x: x, [(1.0,), (2.0,)])() == [1.0, 2.0] * 5
    assert len(timing.burst(lambda x: x, [(float(i),) for i in range(32)])()) == 32


def test_burst_without_kernels_is_an_error(monkeypatch):
    from jax.experimental.mosaic.gpu import profiler

    monkeypatch.setattr(profiler, "measure", lambda f, *, iterations: lambda: (None, None))
    with pytest.raises(RuntimeError, match="CUPTI saw no kernel"):
        timing.burst(lambda: None, [()])()
