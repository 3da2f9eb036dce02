"""Times a whole mixture of experts, forward and with all gradients, beside others' products.

    python benchmarks/moe.py --json moe.json
    python benchmarks/moe.py --shapes qwen3 --what step --candidates ours tokamax --profile
    python benchmarks/moe.py --build-only FOLDER   # on a machine with a compiler, no GPU

The others are one layer (`moe_layers.py`) with `jax.lax.ragged_dot` and with tokamax's. Candidates
take turns on the same random inputs, in one process; what takes longer than `SLOW` does so once,
and what takes longer than `TOO_SLOW`, or runs kernels that CUPTI cannot count, is timed by the
host. Each one's results are compared with those of a float32 layer that runs every expert on every
token.

The memory is what the compiled program allocates besides arguments and results; "copies" counts the
arrays of (tokens * experts per token, features) that XLA writes, which no product does.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import command_line
import jax
import jax.numpy as jnp
import numpy as np
from grouped import RATE, SLOW, TOO_SLOW, first_line, timed
from grouped_products import SCALE
from moe_layers import Layer, layer_of, ours, routed
from moe_programs import MoeProgram, rows_written, step_of

from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.testing import benchmark, timing
from jax_hopper_gemm.testing.lowered import specs_of

LARGEST_DIFFERENCE = 0.02  # of a result, in norm: some roundings to bfloat16
CALLS_BY_THE_HOST = 3
WHAT = ("forward", "step")  # the result; the result and the gradients of all arguments
CANDIDATES = ("ours", "lax", "tokamax")

# Functions of (x (T, D), router (D, E), gate_up (E, D, 2, F), down (E, F, D), cotangent (T, D)).
Function = Callable[..., Any]


@dataclass(frozen=True)
class Shape(MoeProgram):
    """A layer, and how many times as fast as the best of the others it is wanted."""

    wanted: float | None = None

    def flops(self, what: str) -> int:
        """Of the experts' products: gate, up and down, each with two gradients in a step."""
        return (1 if what == "forward" else 3) * 3 * 2 * self.rows * self.features * self.hidden


SHAPES = {
    "qwen3": Shape(8192, 2048, 768, 128, 8, wanted=2.5),
    "mixtral": Shape(8192, 4096, 14336, 8, 2),
}


def timed_function(layer: Layer, what: str, k: int) -> Function:
    """Returns the function of all arrays that is timed: its result is a tuple."""
    layer = functools.partial(layer, k=k)

    def forward(x, router, gate_up, down, cotangent):
        return (layer(x, router, gate_up, down),)

    return forward if what == "forward" else functools.partial(step_of, layer)


@functools.partial(jax.jit, static_argnames="k")
def reference(x, router, gate_up, down, cotangent, *, k: int) -> tuple[jax.Array, ...]:
    """Returns what a step does, in float32: every expert runs on every token."""
    with jax.default_matmul_precision("highest"):
        x, router, cotangent = (a.astype(jnp.float32) for a in (x, router, cotangent))

        def shares(x, router):  # (E, T)
            weights, chosen = routed(x, router, k)
            return (jax.nn.one_hot(chosen, router.shape[1]) * weights[:, :, None]).sum(1).T

        def expert(x, gate_up, down, share):
            hidden = jax.nn.silu(x @ gate_up[:, 0]) * (x @ gate_up[:, 1]) * share[:, None]
            return hidden @ down

        def add(sums, weights):
            gate_up, down, share = weights
            gate_up, down = gate_up.astype(jnp.float32), down.astype(jnp.float32)
            y, pull = jax.vjp(expert, x, gate_up, down, share)
            of_x, *rest = pull(cotangent)
            return (sums[0] + y, sums[1] + of_x), tuple(rest)

        share, pull = jax.vjp(shares, x, router)
        zeros = jnp.zeros_like(x)
        (y, of_x), (of_gate_up, of_down, of_share) = jax.lax.scan(
            add, (zeros, zeros), (gate_up, down, share)
        )
        through_router, of_router = pull(of_share)
        return y, of_x + through_router, of_router, of_gate_up, of_down


@jax.jit
def difference(found: jax.Array, exact: jax.Array) -> jax.Array:
    """Returns the norm of the difference of two arrays, relative to that of the second."""
    difference = found.astype(jnp.float32) - exact
    return jnp.linalg.norm(difference.reshape(-1)) / jnp.linalg.norm(exact.reshape(-1))


def random_inputs(shape: Shape) -> tuple[jax.Array, ...]:
    """Returns one set of inputs: no layer here fits in L2."""

    @jax.jit
    def draw() -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(0, impl="rbg"), 5)
        scales = (1.0, SCALE, SCALE, SCALE, 1.0)
        return tuple(
            jax.random.normal(key, a.shape, a.dtype) * jnp.asarray(scale, a.dtype)
            for key, a, scale in zip(keys, shape.abstract(), scales, strict=True)
        )

    return jax.block_until_ready(draw())


# The candidates.


@dataclass(frozen=True)
class Program:
    """A candidate, compiled.

    Attributes:
      run: the function of the inputs.
      seconds: of its second call, by the host.
      temp_bytes: what it allocates besides arguments and results; None if XLA does not tell.
      copies: arrays of the rows' shape that XLA writes.
      difference: the largest of any result from the reference.
      kernels: names of those of ours that it runs.
      counted: whether CUPTI counts its kernels.
    """

    run: Function
    seconds: float
    temp_bytes: int | None
    copies: int
    difference: float
    kernels: tuple[str, ...]
    counted: bool


def prepared(
    name: str, what: str, shape: Shape, inputs: Sequence[jax.Array], exact: Sequence[jax.Array]
) -> Program:
    """Compiles, runs and compares a candidate; whatever its library raises comes through."""
    function = timed_function(layer_of(name), what, shape.k)
    run = jax.jit(function).lower(*inputs).compile()
    text, memory = run.as_text() or "", run.memory_analysis()
    results = jax.block_until_ready(run(*inputs))
    differences = [float(difference(*pair)) for pair in zip(results, exact, strict=False)]
    del results
    start = time.perf_counter()
    jax.block_until_ready(run(*inputs))
    seconds = time.perf_counter() - start
    counted = seconds <= TOO_SLOW
    if counted:
        try:
            timing.burst(run, [tuple(inputs)])()
        except Exception:  # of some programs of many kernels CUPTI loses count
            counted = False
    launched: list[GemmSpec] = []
    if name == "ours":
        lowered = specs_of(function, *inputs)
        launched = [spec for spec in lowered if f"{spec.name} " in text] or lowered
    return Program(
        run, seconds, getattr(memory, "temp_size_in_bytes", None),
        rows_written(text, shape.rows, shape.features), float(np.max(differences)),
        tuple(spec.name for spec in launched), counted,
    )  # fmt: skip


def times(
    programs: dict[str, Program], inputs: tuple, regime: str, rounds: int, pause: Callable[[], None]
) -> dict[str, timing.Timing]:
    """Returns what each candidate takes, in microseconds; in turns, but for the slowest."""
    quick, slow, found = {}, {}, {}
    for name, program in programs.items():
        if not by_host(program, regime):
            (slow if program.seconds > SLOW else quick)[name] = program.run
    found |= timed(quick, [inputs], regime, rounds, pause)
    found |= timed(slow, [inputs], regime, 1, pause)
    for name in programs.keys() - found.keys():
        found[name] = host_timing(programs[name], inputs)
    return {name: found[name] for name in programs}


def by_host(program: Program, regime: str) -> bool:
    """Whether a candidate is too slow, or CUPTI does not count its kernels."""
    return program.seconds > TOO_SLOW or (regime == "burst" and not program.counted)


def host_timing(program: Program, inputs: tuple) -> timing.Timing:
    """Times a few calls, one of what is very slow: that which has been timed."""
    if program.seconds > TOO_SLOW:
        return timing.Timing((program.seconds * 1e6,))
    found = []
    for _ in range(CALLS_BY_THE_HOST):
        start = time.perf_counter()
        jax.block_until_ready(program.run(*inputs))
        found.append((time.perf_counter() - start) * 1e6)
    return timing.Timing(tuple(found))


# The table.


@dataclass(frozen=True)
class Row:
    """What one layer took, in one regime, of all candidates; microseconds and bytes."""

    shape: str
    what: str
    regime: str
    us: dict[str, float]
    quartiles: dict[str, tuple[float, float]]
    by_the_host: tuple[str, ...]
    differences: dict[str, float]
    temp_bytes: dict[str, int | None]
    copies: dict[str, int]
    copy_bytes: int
    kernels: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def speedup(self) -> float | None:
        """Of ours over the fastest of the others."""
        others = [us for name, us in self.us.items() if name != "ours"]
        return min(others) / self.us["ours"] if others and "ours" in self.us else None

    @property
    def verdict(self) -> str:
        missed = [
            f"NUMBERS of {name}"
            for name, found in self.differences.items()
            if not found < LARGEST_DIFFERENCE
        ]
        wanted = SHAPES[self.shape].wanted or 1.0
        if self.speedup is not None and self.speedup < wanted:
            missed.append(f"{wanted}x")
        if self.copies.get("ours"):
            missed.append("no copies")
        return "missed: " + ", ".join(missed) if missed else "met"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"speedup": self.speedup, "verdict": self.verdict}


HEADER = (
    f"{'layer':<8} {'what':<8} {'regime':<9} {'candidate':<9} {'us':>10} {'q1-q3':>19} {'TF':>5} "
    f"{'/ ours':>7} {'error':>7} {'MiB':>7} {'copies':>6}"
)


def format_row(row: Row) -> str:
    """Returns a line for each candidate, then the memory of a copy, the verdict and notes."""
    lines = []
    for name, us in row.us.items():
        spread = "{:.1f}-{:.1f}".format(*row.quartiles[name])
        spread = "by the host" if name in row.by_the_host else spread
        relative = f"{us / row.us['ours']:.3f}" if "ours" in row.us else "-"
        memory = row.temp_bytes[name]
        memory = "-" if memory is None else f"{mib(memory):.0f}"
        lines.append(
            f"{row.shape:<8} {row.what:<8} {row.regime:<9} {name:<9} {us:>10.1f} {spread:>19} "
            f"{SHAPES[row.shape].flops(row.what) / us / 1e6:>5.0f} {relative:>7} "
            f"{row.differences[name]:>7.4f} {memory:>7} {row.copies[name]:>6}"
        )
    speedup = "-" if row.speedup is None else f"{row.speedup:.3f}"
    lines.append(
        f"  fastest other / ours {speedup}; a copy of the rows is {mib(row.copy_bytes):.0f} MiB; "
        f"{row.verdict}" + "".join(f"  [{note}]" for note in row.notes)
    )
    return "\n".join(lines)


def mib(size: int) -> float:
    return size / 2**20


def measured(
    name: str,
    what: str,
    regimes: Sequence[str],
    rounds: int,
    wanted: Sequence[str],
    inputs: tuple,
    exact: Sequence[jax.Array],
) -> tuple[list[Row], dict[str, Program]]:
    """Returns a row for each regime, and the candidates that ran."""
    shape, programs, notes = SHAPES[name], {}, []
    for candidate in wanted:
        try:
            programs[candidate] = prepared(candidate, what, shape, inputs, exact)
        except Exception as error:  # whatever another library raises
            if candidate == "ours":
                raise
            notes.append(f"{candidate}: {type(error).__name__}: {first_line(error)}")
    pause = functools.partial(time.sleep, min(1.0, 20 * shape.flops(what) / RATE))
    rows = []
    for regime in regimes:
        found = times(programs, inputs, regime, rounds, pause)
        rows.append(
            Row(
                name, what, regime,
                {candidate: t.median for candidate, t in found.items()},
                {candidate: t.quartiles for candidate, t in found.items()},
                tuple(n for n, p in programs.items() if by_host(p, regime)),
                {candidate: p.difference for candidate, p in programs.items()},
                {candidate: p.temp_bytes for candidate, p in programs.items()},
                {candidate: p.copies for candidate, p in programs.items()},
                shape.copy_bytes,
                programs["ours"].kernels if "ours" in programs else (),
                tuple(notes),
            )
        )  # fmt: skip
    return rows, programs


def profile(program: Program, inputs: tuple) -> list[tuple[str, float]]:
    """Returns name and microseconds of each kernel of a call, in order."""
    from jax.experimental.mosaic.gpu import profiler

    _, found = profiler.measure(program.run, aggregate=False)(*inputs)
    return [(name, milliseconds * 1e3) for name, milliseconds in found or []]


def all_specs(shapes: Sequence[str], what: Sequence[str]) -> Iterator[GemmSpec]:
    """Yields every kernel that the benchmark runs."""
    for shape in (SHAPES[name] for name in shapes):
        for each in what:
            yield from specs_of(timed_function(ours, each, shape.k), *shape.abstract())


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Times all candidates and prints a table; returns all figures."""
    regimes, facts = command_line.begin(arguments.regime, HEADER)
    rows: list[Row] = []
    profiles: dict[str, list[tuple[str, float]]] = {}
    for name in arguments.shapes:
        shape = SHAPES[name]
        inputs = random_inputs(shape)
        exact = jax.block_until_ready(reference(*inputs, k=shape.k))
        for what in arguments.what:
            found, programs = measured(
                name, what, regimes, arguments.rounds, arguments.candidates, inputs, exact
            )
            rows += found
            print("\n".join(map(format_row, found)), flush=True)
            if not arguments.profile:
                continue
            for candidate, program in programs.items():
                if program.seconds <= TOO_SLOW:
                    kernels = profile(program, inputs)
                    profiles[f"{name} {what} {candidate}"] = kernels
                    print(f"\n{name} {what} {candidate}: {len(kernels)} kernels")
                    print("\n".join(f"{us:9.1f} us  {kernel}" for kernel, us in kernels))
        del inputs, exact
    return {"environment": facts, "rows": [row.to_dict() for row in rows], "kernels": profiles}


def main() -> int:
    parser = command_line.parser(__doc__, rounds=5)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT))
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument("--regime", choices=(*benchmark.REGIMES, "both"), default="burst")
    parser.add_argument("--profile", action="store_true", help="list the kernels of each candidate")
    arguments = parser.parse_args()
    if arguments.build:
        specs = all_specs(arguments.shapes, arguments.what)
        return command_line.build(specs, arguments.build)
    figures = run(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
