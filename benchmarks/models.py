"""Times training steps and forward passes of whole models, with `accelerate` and without.

    python benchmarks/models.py --json models.json
    python benchmarks/models.py --models llama qwen3 --sizes large --regime burst sustained
    python benchmarks/models.py --list
    python benchmarks/models.py --build-only FOLDER   # on a machine with a compiler, no GPU

The models are those of `model_programs.py` in plain `jax.numpy`, and the dense ones in Flax nnx
(`nnx_programs.py`), unchanged; with `--frameworks scan` in `jax.numpy`, their layers a
`jax.lax.scan`. A training step is the loss, its gradients and an update of the parameters, which
are donated; a forward pass is the loss alone. Both candidates are jitted, start from the same
random numbers and take turns in one process:

    XLA          jax.jit(step), nnx.jit(step)
    accelerated  jax.jit(jhg.accelerate(step)), nnx.jit(nn.accelerate(step))

With `--recipe` the accelerated products of 16-bit floats run in 8 bits, those of the gradients that
the step takes, too; XLA's stay in bfloat16.

Regimes: in "burst" a turn is some steps back to back, by the host's clock, and a pause follows;
"kernels" is the time of the kernels in them, by CUPTI; "sustained" is a loop of a second or more.
`--names 20` also prints the kernels that take most of a step: copies and transposes show there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import command_line
import jax
from model_programs import FAMILIES, Model

import jax_hopper_gemm as jhg
from jax_hopper_gemm import recipes
from jax_hopper_gemm.gemm.kernel_params import KernelSpec
from jax_hopper_gemm.testing import timing
from jax_hopper_gemm.testing.lowered import all_specs_of

REGIMES = ("burst", "kernels", "sustained")
SIZES = ("small", "large")
FRAMEWORKS = ("jnp", "nnx")
SCAN = "scan"  # jnp with layers in a `jax.lax.scan`
WHAT = ("forward", "training")
CANDIDATES = ("XLA", "accelerated")
RECIPES = {
    "current": recipes.CurrentScaling(), "blocks": recipes.BlockScaling(), "none": None,
    "columns": recipes.BlockScaling(gradient_columns=128),
}  # fmt: skip
LARGEST_DIFFERENCE = 0.01  # of the first losses
Call = Callable[[], jax.Array]  # runs a step; returns its loss


@dataclass(frozen=True)
class Program:
    """What is timed: a model's training step or forward pass in one framework."""

    family: str
    size: str
    framework: str
    what: str
    recipe: str = "none"

    @property
    def model(self) -> Model:
        size = FAMILIES[self.family].sizes[self.size]
        return Model(self.family, size, scanned=self.framework == SCAN)

    @property
    def kind(self) -> str:
        return FAMILIES[self.family].kind

    def __str__(self) -> str:
        recipe = "" if self.recipe == "none" else f" {self.recipe}"
        return f"{self.family:<8} {self.size:<6} {self.framework:<4} {self.what:<9}{recipe}"

    def accelerate(self, module: Any) -> Callable[..., Any]:
        """Returns `accelerate` of a module, with the recipe."""
        return partial(module.accelerate, recipe=RECIPES[self.recipe])

    def call(self, candidate: str) -> Call:
        """Returns a step of a candidate on parameters of its own."""
        accelerated = candidate == "accelerated"
        return (self._nnx if self.framework == "nnx" else self._jnp)(accelerated)

    def _jnp(self, accelerated: bool) -> Call:
        wrap = self.accelerate(jhg) if accelerated else _unchanged
        state, batch = self.model.state(), self.model.batch()
        if self.what == "forward":
            return partial(jax.jit(wrap(self.model.loss)), state["parameters"], batch)
        run = jax.jit(wrap(self.model.step), donate_argnums=0)

        def call() -> jax.Array:
            nonlocal state
            state, loss = run(state, batch)
            return loss

        return call

    def _nnx(self, accelerated: bool) -> Call:
        import nnx_programs as programs
        from flax import nnx

        from jax_hopper_gemm import nn

        wrap = self.accelerate(nn) if accelerated else _unchanged
        module, batch = programs.module(self.model), self.model.batch()
        if self.what == "forward":
            return partial(nnx.jit(wrap(programs.loss)), module, batch)
        optimizer = programs.optimizer(self.model, module)
        run = nnx.jit(wrap(programs.step), donate_argnums=(0, 1))
        return partial(run, module, optimizer, batch)

    def abstract(self, accelerated: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Returns a candidate as a function of arrays, and its arguments' shapes; needs no GPU."""
        training, batch = self.what == "training", jax.eval_shape(self.model.batch)
        if self.framework != "nnx":
            wrap = self.accelerate(jhg) if accelerated else _unchanged
            state = jax.eval_shape(self.model.state)
            if training:
                return wrap(self.model.step), (state, batch)
            return wrap(self.model.loss), (state["parameters"], batch)
        import nnx_programs as programs
        from flax import nnx

        from jax_hopper_gemm import nn

        def objects() -> Any:
            module = programs.module(self.model)
            return (module, programs.optimizer(self.model, module)) if training else (module,)

        graph, state = nnx.split(nnx.eval_shape(objects))
        wrap = self.accelerate(nn) if accelerated else _unchanged
        step = wrap(programs.step if training else programs.loss)

        def run(state: Any, batch: Any) -> Any:
            objects = nnx.merge(graph, state)
            return step(*objects, batch), nnx.state(objects)

        return run, (state, batch)

    def specs(self) -> list[KernelSpec]:
        """Returns the kernels of the accelerated program; no GPU is needed."""
        function, arguments = self.abstract(accelerated=True)
        return all_specs_of(function, *arguments)


def _unchanged(function: Any) -> Any:
    return function


@dataclass(frozen=True)
class Row:
    """What a step took, in one regime; milliseconds by candidate.

    Attributes:
      losses: of each candidate, at its first step.
    """

    program: Program
    regime: str
    ms: dict[str, float]
    quartiles: dict[str, tuple[float, float]]
    losses: dict[str, float]

    @property
    def ratio(self) -> float:
        return self.ms["XLA"] / self.ms["accelerated"]

    @property
    def agrees(self) -> bool:
        """Whether the first losses do."""
        ours, theirs = (self.losses[name] for name in reversed(CANDIDATES))
        return abs(ours - theirs) <= LARGEST_DIFFERENCE * abs(theirs)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio, "agrees": self.agrees}


HEADER = (
    f"{'model':<8} {'size':<6} {'':<4} {'':<9} {'regime':<9} {'XLA ms':>9} {'q1-q3':>17} "
    f"{'accelerated ms':>14} {'q1-q3':>17} {'ratio':>6}"
)


def format_row(row: Row) -> str:
    columns = []
    for name, width in zip(CANDIDATES, (9, 14), strict=True):
        spread = "{:.2f}-{:.2f}".format(*row.quartiles[name])
        columns.append(f"{row.ms[name]:>{width}.2f} {spread:>17}")
    note = "" if row.agrees else f"  LOSSES DIFFER: {row.losses}"
    return f"{row.program} {row.regime:<9} {' '.join(columns)} {row.ratio:>6.3f}{note}"


def turn(call: Call, steps: int) -> list[float]:
    """Returns the microseconds of a step, of some that run back to back."""
    jax.block_until_ready(call())
    start = time.perf_counter()
    for _ in range(steps - 1):
        call()
    jax.block_until_ready(call())
    return [(time.perf_counter() - start) / steps * 1e6]


def measured(program: Program, regimes: Sequence[str], steps: int, rounds: int) -> Iterator[Row]:
    """Yields a row for each regime."""
    calls = {name: program.call(name) for name in CANDIDATES}
    losses = {name: float(call()) for name, call in calls.items()}
    for regime in regimes:
        if regime == "sustained":
            turns = {name: timing.sustained(call, [()]) for name, call in calls.items()}
            times = timing.alternate(turns, min(rounds, 2))
        elif regime == "kernels":
            turns = {name: timing.burst(call, [()] * steps) for name, call in calls.items()}
            times = timing.alternate(turns, rounds, partial(time.sleep, 1.0))
        else:
            turns = {name: partial(turn, call, steps) for name, call in calls.items()}
            times = timing.alternate(turns, rounds, partial(time.sleep, 1.0))
        yield Row(
            program, regime,
            {name: t.median / 1e3 for name, t in times.items()},
            {name: (t.quartiles[0] / 1e3, t.quartiles[1] / 1e3) for name, t in times.items()},
            losses,
        )  # fmt: skip


def print_kernels(program: Program, count: int) -> None:
    """Prints which kernels take most of a step of each candidate, launches and milliseconds."""
    from jax.experimental.mosaic.gpu import profiler

    for candidate in CANDIDATES:
        call = program.call(candidate)
        jax.block_until_ready(call())
        found: dict[str, list[float]] = defaultdict(list)
        _, launches = profiler.measure(timing.Rotation(call, [()]), aggregate=False)()
        for name, ms in launches or ():
            found[name].append(ms)
        longest = sorted(found.items(), key=lambda kernel: sum(kernel[1]), reverse=True)
        print(f"  {candidate}: {sum(map(sum, found.values())):.2f} ms")
        for name, times in longest[:count]:
            print(f"  {sum(times):8.3f} {len(times):5} x {name}", flush=True)


def add_choices(parser: argparse.ArgumentParser, families: Iterable[str]) -> None:
    """Adds the options that `programs` reads, but for the recipe."""
    parser.add_argument("--models", nargs="+", choices=families, default=list(families))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    frameworks = (*FRAMEWORKS, SCAN)
    parser.add_argument("--frameworks", nargs="+", choices=frameworks, default=list(FRAMEWORKS))
    parser.add_argument("--forward-only", action="store_true", help="no training steps")


def programs(arguments: argparse.Namespace) -> list[Program]:
    return [
        Program(family, size, framework, what, arguments.recipe)
        for family in arguments.models
        for size in arguments.sizes
        for framework in arguments.frameworks
        for what in (WHAT[:1] if arguments.forward_only else WHAT)
        if framework != "nnx" or FAMILIES[family].kind == "dense"
    ]


def means(rows: Sequence[Row]) -> dict[str, float]:
    """Returns geometric means of the ratios: of dense models and mixtures, by what was timed."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        group = f"{row.program.kind} {row.program.what} {row.regime}"
        groups.setdefault(group, []).append(row.ratio)
    return {group: statistics.geometric_mean(ratios) for group, ratios in groups.items()}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Times all programs and prints a table; returns all figures."""
    _, facts = command_line.begin("burst", HEADER)
    rows: list[Row] = []
    failures: dict[str, str] = {}
    for program in programs(arguments):
        try:
            for row in measured(program, arguments.regime, arguments.steps, arguments.rounds):
                rows.append(row)
                print(format_row(row), flush=True)
            if arguments.names:
                print_kernels(program, arguments.names)
        except Exception as error:  # such as too little memory; the others are timed
            failures[str(program)] = f"{type(error).__name__}: {error}"
            print(f"{program} {failures[str(program)][:300]}", flush=True)
        jax.clear_caches()
    totals = means(rows)
    for group, mean in totals.items():
        print(f"XLA / accelerated, {group}: geometric mean {mean:.3f}")
    return {
        "environment": facts, "means": totals, "rows": [row.to_dict() for row in rows],
        "failures": failures,
    }  # fmt: skip


def main() -> int:
    parser = command_line.parser(__doc__, rounds=5)
    add_choices(parser, FAMILIES)
    parser.add_argument("--recipe", choices=RECIPES, default="none", help="8 bits, of the kernels")
    parser.add_argument("--regime", nargs="+", choices=REGIMES, default=["burst"])
    parser.add_argument("--steps", type=int, default=10, help="in a turn")
    parser.add_argument("--names", type=int, metavar="COUNT", help="print so many kernels")
    parser.add_argument("--list", action="store_true", help="list the programs, time none")
    arguments = parser.parse_args()
    if arguments.list:
        for program in programs(arguments):
            print(program, program.model.size)
        return 0
    if arguments.build:
        specs = (spec for program in programs(arguments) for spec in program.specs())
        return command_line.build(specs, arguments.build)
    figures = run(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if figures["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
