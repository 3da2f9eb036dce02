"""Times grouped products, forward and both gradients, beside a dense product of the same FLOPs.

    python benchmarks/grouped.py                                  # all shapes, sizes and directions
    python benchmarks/grouped.py --shapes qwen3 --sizes zipf --what data --candidates ours dense
    python benchmarks/grouped.py --build FOLDER                   # on a machine with a compiler

Candidates take turns on the same random inputs, in one process. What takes longer than `SLOW` is
timed once beside them; longer than `TOO_SLOW`, not at all. The dense product has one matrix for
all rows, in the layouts of what it stands beside. Of few rows a group the bar is another one: the
bytes of the weights that are read.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import command_line
import jax
import jax.numpy as jnp
import numpy as np
from grouped_products import (
    DENSE,
    SHAPES,
    SIZES,
    WHAT,
    Function,
    Shape,
    abstract,
    by_ragged_dot,
    ours,
    pallas,
    random_inputs,
)

from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.testing import benchmark, timing
from jax_hopper_gemm.testing.lowered import specs_of

BYTES_PER_US = 4.3e6  # of device memory, measured on an H200
RATE = 5e14  # FLOP/s that a pause between bursts is reckoned with
SLOW, TOO_SLOW = 0.02, 0.2  # seconds of a call
CANDIDATES = ("ours", "dense", "lax", "pallas", "tokamax")


@dataclass(frozen=True)
class Row:
    """What one direction of one shape took, for one kind of sizes and in one regime; in us."""

    shape: str
    sizes: str
    what: str
    regime: str
    us: dict[str, float]
    quartiles: dict[str, tuple[float, float]]
    weights_us: float | None  # of reading the weights, where that is the bar
    difference: float | None  # of ours from float64, largest, relative to the largest element
    kernel: str
    notes: tuple[str, ...]

    @property
    def ratio(self) -> float | None:
        """Speed of ours as a part of that of the dense product."""
        if not {"ours", "dense"} <= self.us.keys():
            return None
        return self.us["dense"] / self.us["ours"]

    @property
    def over_weights(self) -> float | None:
        if self.weights_us is None or "ours" not in self.us:
            return None
        return self.us["ours"] / self.weights_us

    @property
    def verdict(self) -> str:
        missed, shape = [], SHAPES[self.shape]
        if self.ratio is not None and shape.wanted and self.ratio < shape.wanted:
            missed.append("dense")
        if self.over_weights is not None and self.over_weights > 1.08:
            missed.append("weights")
        others = [us for name, us in self.us.items() if name not in ("ours", "dense")]
        if "ours" in self.us and others and self.us["ours"] > min(others):
            missed.append("others")
        factor = self.us.get("tokamax", math.inf) / self.us.get("ours", 1.0)
        if self.what == "weight" and factor < 2:
            missed.append("twice tokamax")
        if self.difference is not None and not self.difference < 0.01:
            missed.append("NUMBERS")
        return "missed: " + ", ".join(missed) if missed else "met"

    def to_dict(self) -> dict[str, Any]:
        derived = {"ratio": self.ratio, "over_weights": self.over_weights, "verdict": self.verdict}
        return asdict(self) | derived


HEADER = (
    f"{'shape':<9} {'sizes':<10} {'what':<8} {'regime':<9} {'ours us':>9} {'q1-q3':>15} {'TF':>5} "
    f"{'GB/s':>5} {'dense us':>9} {'ratio':>6} {'bar':>5} {'weights':>7} {'lax us':>9} "
    f"{'pallas us':>9} {'tokamax us':>10} {'error':>7}  verdict, kernel"
)


def format_row(row: Row) -> str:
    shape = SHAPES[row.shape]

    def us(name: str, width: int) -> str:
        return f"{format(row.us[name], '.1f') if name in row.us else '-':>{width}}"

    def number(value: float | None, width: int, digits: str) -> str:
        return f"{'-' if value is None else format(value, digits):>{width}}"

    mine = row.us.get("ours")
    spread = "{:.1f}-{:.1f}".format(*row.quartiles["ours"]) if mine else "-"
    rate = shape.flops / mine / 1e6 if mine else None
    speed = row.weights_us * BYTES_PER_US / mine / 1e3 if mine and row.weights_us else None
    notes = "".join(f"  [{note}]" for note in row.notes)
    return (
        f"{row.shape:<9} {row.sizes:<10} {row.what:<8} {row.regime:<9} {us('ours', 9)} "
        f"{spread:>15} {number(rate, 5, '.0f')} {number(speed, 5, '.0f')} {us('dense', 9)} "
        f"{number(row.ratio, 6, '.3f')} {number(shape.wanted, 5, '.2f')} "
        f"{number(row.over_weights, 7, '.3f')} {us('lax', 9)} {us('pallas', 9)} "
        f"{us('tokamax', 10)} {number(row.difference, 7, '.4f')}  "
        f"{row.verdict}, {row.kernel}{notes}"
    )


def difference_of(
    what: str, result: jax.Array, inputs: Sequence[jax.Array], sizes: np.ndarray
) -> float:
    """Returns the largest error of some rows and columns, relative to their largest element."""
    x, w, _, g = inputs
    tokens, k = x.shape
    n = w.shape[2]
    ends = np.minimum(np.cumsum(sizes), tokens)
    starts = np.concatenate([[0], ends[:-1]])

    def host(array: jax.Array) -> np.ndarray:
        return np.asarray(array).astype(np.float64)

    def some(extent: int, count: int) -> np.ndarray:
        return np.unique(np.linspace(0, extent - 1, count).astype(int))

    if what == "weight":
        ks, ns = some(k, 32), some(n, 48)
        left, right, got = host(x[:, ks]), host(g[:, ns]), host(result[:, ks][:, :, ns])
        bounds = list(zip(starts, ends, strict=True))
        exact = np.stack([left[start:end].T @ right[start:end] for start, end in bounds])
    else:
        rows = some(int(ends[-1]), 256)
        owner = np.searchsorted(ends, rows, side="right")
        if what == "forward":
            columns = some(n, 64)
            left, right = host(x[rows]), host(w[:, :, columns])
        else:
            columns = some(k, 64)
            left, right = host(g[rows]), host(w[:, columns]).swapaxes(1, 2)
        exact = np.stack([row @ right[i] for row, i in zip(left, owner, strict=True)])
        got = host(result[rows][:, columns])
    return float(np.max(np.abs(got - exact)) / np.max(np.abs(exact)))


class Candidates:
    """Compiled functions of one shape and direction, by name; what fails says so and is left out.

    Attributes:
      functions: those that run.
      notes: what did not, and why; which configuration another library's kernel has.
    """

    def __init__(self, shape: Shape, what: str, wanted: Sequence[str], inputs: tuple):
        self.shape, self.what, self.inputs = shape, what, inputs
        self.functions: dict[str, Function] = {}
        self.slow: dict[str, Function] = {}
        self.notes: list[str] = []
        if "ours" in wanted:
            self.add("ours", lambda: ours()[what])
        if "dense" in wanted:
            self.add("dense", lambda: DENSE[what])
        if "lax" in wanted:
            self.add("lax", lambda: by_ragged_dot(jax.lax.ragged_dot)[what])
        if "tokamax" in wanted and importlib.util.find_spec("tokamax"):
            tokamax: Any = importlib.import_module("tokamax")
            self.add("tokamax", lambda: by_ragged_dot(tokamax.ragged_dot)[what])
        if "pallas" in wanted:
            self.add_best_pallas()

    def add(self, name: str, make: Callable[[], Function]) -> bool:
        """Compiles and runs a function twice; returns whether it is to be timed."""
        try:
            function = jax.jit(make())
            jax.block_until_ready(function(*self.inputs))
            start = time.perf_counter()
            jax.block_until_ready(function(*self.inputs))
            seconds = time.perf_counter() - start
            if seconds <= TOO_SLOW:
                timing.burst(
                    function, [self.inputs]
                )()  # CUPTI cannot count every program's kernels
        except Exception as error:  # whatever another library raises
            self.notes.append(f"{name}: {type(error).__name__}: {first_line(error)}")
            return False
        if seconds > TOO_SLOW:
            self.notes.append(f"{name} takes {seconds:.2f} s")
            return False
        (self.slow if seconds > SLOW else self.functions)[name] = function
        return True

    def add_best_pallas(self) -> None:
        best, least, failed = None, math.inf, ""
        for name, function in pallas(self.shape, self.what):
            jitted = jax.jit(function)
            try:
                jax.block_until_ready(jitted(*self.inputs))
                us = timing.Timing(tuple(timing.burst(jitted, [self.inputs])())).median
            except Exception as error:  # most often shared memory
                failed = f"pallas: {type(error).__name__}: {first_line(error)}"
                continue
            if us < least:
                best, least = (name, jitted), us
        if best is None:
            self.notes.append(failed or "pallas: no configuration divides the extents")
            return
        self.notes.append(f"pallas {best[0]}")
        self.functions["pallas"] = best[1]


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else ""


def measured(
    name: str,
    what: str,
    kinds: Sequence[str],
    regimes: Sequence[str],
    rounds: int,
    wanted: Sequence[str],
    input_sets: Sequence[tuple],
) -> Iterator[Row]:
    """Yields a row for each kind of sizes and each regime."""
    shape = SHAPES[name]
    all_sizes = {kind: SIZES[kind](shape.tokens, shape.experts, 0) for kind in kinds}
    first = (*input_sets[0], jnp.asarray(next(iter(all_sizes.values()))))
    candidates = Candidates(shape, what, wanted, first)
    kernel = ""
    if "ours" in candidates.functions:
        specs = specs_of(ours()[what], *abstract(shape))
        kernel = ", ".join(spec.name for spec in specs)
    pause = functools.partial(time.sleep, min(1.0, 20 * shape.flops / RATE))
    for kind, sizes in all_sizes.items():
        on_gpu = jnp.asarray(sizes)
        sets = [(*inputs, on_gpu) for inputs in input_sets]
        difference = None
        if function := candidates.functions.get("ours"):
            difference = difference_of(what, function(*sets[0]), input_sets[0], sizes)
        weights = None
        if shape.decodes and what != "weight":
            weights = np.count_nonzero(sizes) * shape.k * shape.n * 2 / BYTES_PER_US
        for regime in regimes:
            timings = timed(candidates.functions, sets, regime, rounds, pause)
            timings |= timed(candidates.slow, sets, regime, 1, pause)
            yield Row(
                name, kind, what, regime,
                {candidate: t.median for candidate, t in timings.items()},
                {candidate: t.quartiles for candidate, t in timings.items()},
                weights, difference, kernel, tuple(candidates.notes),
            )  # fmt: skip


def timed(
    functions: dict[str, Function],
    sets: Sequence[tuple],
    regime: str,
    rounds: int,
    pause: Callable[[], None],
) -> dict[str, timing.Timing]:
    if regime == "sustained":
        loops = {name: timing.sustained(f, sets) for name, f in functions.items()}
        return timing.alternate(loops, min(rounds, 2))
    bursts = {name: timing.burst(f, sets) for name, f in functions.items()}
    return timing.alternate(bursts, rounds, pause)


def all_specs(arguments: argparse.Namespace) -> Iterator[GemmSpec]:
    """Yields every kernel that the benchmark runs."""
    for name, what in itertools.product(arguments.shapes, arguments.what):
        yield from specs_of(ours()[what], *abstract(SHAPES[name]))


def main() -> int:
    parser = command_line.parser(__doc__, rounds=5)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT))
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument("--regime", choices=(*benchmark.REGIMES, "both"), default="burst")
    arguments = parser.parse_args()
    if arguments.build:
        return command_line.build(all_specs(arguments), arguments.build)
    rows = [row.to_dict() for row in run(arguments)]
    return command_line.write(arguments.json, rows)


def run(arguments: argparse.Namespace) -> list[Row]:
    """Times all candidates and prints a line for each case."""
    regimes, _ = command_line.begin(arguments.regime, HEADER)
    rows = []
    for name in arguments.shapes:
        input_sets = random_inputs(SHAPES[name])
        for what in arguments.what:
            for row in measured(
                name, what, arguments.sizes, regimes, arguments.rounds, arguments.candidates,
                input_sets,
            ):  # fmt: skip
                rows.append(row)
                print(format_row(row), flush=True)
        del input_sets
    return rows


if __name__ == "__main__":
    sys.exit(main())
