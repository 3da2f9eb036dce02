"""How speed is measured: candidates in alternation, on random inputs that do not sit in L2.

Two regimes. *Burst*: kernel time on a cool GPU, read from CUPTI. *Sustained*: time of one
iteration in a loop of a second or more, in which the card reaches its power limit. On an H200
the same product differs by 15 % between them, so a figure without its regime means nothing,
and a ratio is meaningful only between candidates that took turns in one process.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

L2_BYTES = 64 * 2**20  # no Hopper GPU has more
MAX_SETS = 32  # of inputs; products so small that these fit in L2 are read from L2 in life, too

_LAUNCHES = 10  # calls in one burst measurement, at least
_CHUNK_SECONDS = 0.05  # of a sustained loop between two looks at the clock


@dataclass(frozen=True)
class Timing:
    """Times of one candidate, in microseconds of one call."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and third quartile: half of the samples lie between."""
        if len(self.samples) == 1:
            return self.samples[0], self.samples[0]
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return low, high

    def to_dict(self) -> dict:
        low, high = self.quartiles
        return {"median_us": self.median, "q1_us": low, "q3_us": high, "n": len(self.samples)}


def alternate(
    candidates: Mapping[str, Callable[[], Iterable[float]]],
    rounds: int,
    rest: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Returns the times of each candidate, measured in turn: A B A B.

    Whatever drifts (clocks, temperature, other work) then falls on all alike.

    Args:
      candidates: by name, a function that measures once and returns microseconds.
      rounds: how many times each is measured.
      rest: called after each measurement.
    """
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, measure in candidates.items():
            samples[name] += measure()
            rest()
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def sets_to_rotate(input_bytes: int) -> int:
    """Returns how many sets of inputs to cycle through so that none is found in L2."""
    if input_bytes > L2_BYTES:
        return 1
    return min(MAX_SETS, -(-2 * L2_BYTES // max(input_bytes, 1)))


def burst(function: Callable, input_sets: Sequence[tuple]) -> Callable[[], list[float]]:
    """Returns a measurement of `function`'s kernel time by CUPTI, for `alternate`.

    A call's time is the sum of its kernels'.

    Args:
      function: a jitted function.
      input_sets: arguments of its calls; each call takes the next set.
    """
    from jax.experimental.mosaic.gpu import profiler

    rotation = Rotation(function, input_sets)
    measured = profiler.measure(rotation, iterations=max(_LAUNCHES, len(input_sets)))

    def measure() -> list[float]:
        _, milliseconds = measured()
        if milliseconds is None:
            raise RuntimeError("CUPTI saw no kernel: is another profiler attached?")
        return [t * 1e3 for t in milliseconds]

    return measure


def sustained(
    function: Callable,
    input_sets: Sequence[tuple],
    seconds: float = 1.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Callable[[], list[float]]:
    """Returns a measurement of `function` in a loop, for `alternate`.

    The loop runs for `seconds` until the card has reached its power limit and then for as long
    again, which is what counts. It is timed by the host: where a call is shorter than jax takes
    to enqueue it (tens of microseconds), the enqueuing is what is measured.
    """
    rotation = Rotation(function, input_sets)

    def run(calls: int) -> float:
        start = clock()
        result = None
        for _ in range(calls):
            result = rotation()
        jax.block_until_ready(result)
        return (clock() - start) / calls

    def measure() -> list[float]:
        run(1)  # compiles
        calls = max(1, int(_CHUNK_SECONDS / max(run(3), 1e-6)))
        start = clock()
        while clock() - start < seconds:
            run(calls)
        samples, start = [], clock()
        while clock() - start < seconds:
            samples.append(run(calls) * 1e6)
        return samples

    return measure


class Rotation(jax.stages.Wrapped):
    """Calls one jitted function, each time with the next set of inputs.

    It is a `Wrapped` so that `profiler.measure` takes it as it is and does not trace it.
    """

    def __init__(self, function: Any, input_sets: Sequence[tuple]):
        self._function = function
        self._inputs = itertools.cycle(input_sets)

    def __call__(self) -> Any:
        return self._function(*next(self._inputs))

    def trace(self) -> Any:
        return self._function.trace(*next(self._inputs))

    def lower(self) -> Any:
        return self.trace().lower()
