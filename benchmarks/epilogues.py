"""Times products with epilogues beside our plain product and beside XLA's program.

    python benchmarks/epilogues.py --regime both --json epilogues.json
    python benchmarks/epilogues.py --build-only FOLDER   # on a machine with a compiler, no GPU

Candidates take turns on the same random inputs, in one process. Two bars a case: the time of our
own plain product plus that of the bytes which the epilogue must move besides, times 1.03; and what
XLA pays for the same jnp code. In the end a training step of a gated MLP, with its kernels.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import command_line
import jax
import jax.numpy as jnp
import numpy as np

import jax_hopper_gemm as jhg
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.testing import benchmark, timing
from jax_hopper_gemm.testing.lowered import specs_of

BYTES_PER_US = 4.3e6  # of device memory, measured on an H200
OVERHEAD = 1.03  # times the plain product and the bytes
LARGE, SQUARE = (8192, 14336, 4096), (4096, 4096, 4096)
MLP = (4096, 14336, 4096)  # tokens, hidden, width
SCALE = 2.0**-6  # of the weights: products are of the order of 1
RATE = 5e14  # FLOP/s that a pause between bursts is reckoned with
matmul = functools.partial(jhg.matmul, implementation="hopper")
gated_linear_unit = functools.partial(jhg.gated_linear_unit, implementation="hopper")


@dataclass(frozen=True)
class Case:
    """One epilogue.

    Attributes:
      name: what it is.
      arguments: names of its arrays; see `shape_of`.
      ours, xla: functions of them.
      planes: matrices of D's extents, 16-bit, that must move besides those of the plain product.
      speedups: XLA's time over ours that is wanted at least, for each shape.
    """

    name: str
    arguments: tuple[str, ...]
    ours: Callable
    xla: Callable
    planes: float = 0.0
    speedups: dict[tuple[int, int, int], float] = field(default_factory=dict)


def paid(large: float, square: float) -> dict[tuple[int, int, int], float]:
    """Returns the speedups wanted of what XLA took in all, in us, against 1168 and 173 plain."""
    return {LARGE: large / 1168 - 0.03, SQUARE: square / 173 - 0.03}


def saved_gelu(y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.nn.gelu(y), y


def with_amax(y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return y, jnp.max(jnp.abs(y)).astype(jnp.float32)


def with_column_sums(y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return y, jnp.sum(y, axis=0, dtype=jnp.float32)


CASES = (
    Case("bias, gelu", ("x", "w", "bias"),
         lambda x, w, bias: matmul(x, w, bias=bias, activation="gelu"),
         lambda x, w, bias: jax.nn.gelu(x @ w + bias), speedups=paid(1362, 194)),
    Case("bias, silu", ("x", "w", "bias"),
         lambda x, w, bias: matmul(x, w, bias=bias, activation="silu"),
         lambda x, w, bias: jax.nn.silu(x @ w + bias), speedups=paid(1338, 191)),
    Case("residual", ("x", "w", "residual"),
         lambda x, w, residual: matmul(x, w, residual=residual),
         lambda x, w, residual: x @ w + residual, planes=1, speedups=paid(1244, 177)),
    Case("alpha, beta, c", ("x", "w", "c", "alpha", "beta"),
         lambda x, w, c, alpha, beta: matmul(x, w, alpha=alpha, beta=beta, c=c),
         lambda x, w, c, alpha, beta: (
             alpha * jnp.matmul(x, w, preferred_element_type=jnp.float32) + beta * c
         ).astype(x.dtype), planes=1),
    Case("bias, gelu, saved sum", ("x", "w", "bias"),
         lambda x, w, bias: matmul(x, w, bias=bias, epilogue=saved_gelu),
         lambda x, w, bias: saved_gelu(x @ w + bias), planes=1),
    Case("amax", ("x", "w"),
         lambda x, w: matmul(x, w, epilogue=with_amax),
         lambda x, w: with_amax(x @ w), speedups=paid(1223, 184)),
    Case("column sums", ("x", "w"),
         lambda x, w: matmul(x, w, epilogue=with_column_sums),
         lambda x, w: with_column_sums(x @ w), speedups=paid(1235, 195)),
    # A row is longer than a tile: its statistics come from the kernel, XLA divides in another pass.
    Case("softmax", ("x", "w"),
         lambda x, w: matmul(x, w, epilogue=jax.nn.softmax),
         lambda x, w: jax.nn.softmax(x @ w), planes=2, speedups=paid(1305, 196)),
    Case("logsumexp", ("x", "w"),
         lambda x, w: matmul(x, w, epilogue=functools.partial(jax.nn.logsumexp, axis=-1)),
         lambda x, w: jax.nn.logsumexp(x @ w, axis=-1)),
)  # fmt: skip

GATED = Case(
    "gated, silu", ("x", "w", "up"),
    lambda x, w, up: gated_linear_unit(x, (w, up), activation="silu"),
    lambda x, w, up: jax.nn.silu(x @ w) * (x @ up),
    speedups={LARGE: 1.06, SQUARE: 1.10},
)  # fmt: skip


def plain(x: jax.Array, w: jax.Array, *rest: jax.Array) -> jax.Array:
    return matmul(x, w)


def our_step(x, w, up, stacked, down, cotangent):
    """The MLP's result and all gradients, with the weights stacked as `nn.GatedMLP` stores them."""

    def mlp(x, stacked, down):
        return matmul(gated_linear_unit(x, stacked, activation="silu"), down)

    y, pull = jax.vjp(mlp, x, stacked, down)
    return y, pull(cotangent)


def xla_step(x, w, up, stacked, down, cotangent):
    """The same of two arrays of weights, which is what suits XLA."""

    def mlp(x, w, up, down):
        return (jax.nn.silu(x @ w) * (x @ up)) @ down

    y, pull = jax.vjp(mlp, x, w, up, down)
    return y, pull(cotangent)


def alike(results: Any) -> list[jax.Array]:
    """Returns the arrays of a case's results, stacked gradients apart."""
    leaves = jax.tree.leaves(results)
    return [plane for x in leaves for plane in ((x[:, 0], x[:, 1]) if x.ndim == 3 else (x,))]


TRAINING = Case(
    "training step", ("x", "w", "up", "stacked", "down", "cotangent"), our_step, xla_step,
    speedups={MLP: 1.05},
)  # fmt: skip


def shape_of(name: str, m: int, n: int, k: int) -> tuple[int, ...]:
    return {
        "x": (m, k), "w": (k, n), "up": (k, n), "stacked": (k, 2, n), "down": (n, k), "bias": (n,),
        "residual": (m, n), "c": (m, n), "cotangent": (m, k), "alpha": (), "beta": (),
    }[name]  # fmt: skip


def abstract(case: Case, shape: tuple[int, int, int]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape_of(name, *shape), dtype_of(name)) for name in case.arguments]


def dtype_of(name: str) -> Any:
    return jnp.float32 if name in ("alpha", "beta") else jnp.bfloat16


def random_inputs(case: Case, shape: tuple[int, int, int]) -> list[tuple[jax.Array, ...]]:
    """Returns enough sets of normal random inputs to keep them out of L2."""
    wanted = abstract(case, shape)
    sets = timing.sets_to_rotate(sum(math.prod(x.shape) * x.dtype.itemsize for x in wanted))

    @jax.jit
    def draw(seed: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(wanted))
        scales = [SCALE if name in ("w", "up", "down") else 1.0 for name in case.arguments]
        drawn = {
            name: (jax.random.normal(key, x.shape) * scale).astype(x.dtype)
            for name, key, x, scale in zip(case.arguments, keys, wanted, scales, strict=True)
            if name != "stacked"
        }
        if "stacked" in case.arguments:
            drawn["stacked"] = jnp.stack([drawn["w"], drawn["up"]], axis=1)
        return tuple(drawn[name] for name in case.arguments)

    return [jax.block_until_ready(draw(jnp.uint32(seed))) for seed in range(sets)]


def flops_of(case: Case, shape: tuple[int, int, int]) -> int:
    products = {"gated, silu": 2, "training step": 9}.get(case.name, 1)
    return 2 * math.prod(shape) * products


@dataclass(frozen=True)
class Row:
    """What one case took, in one regime; microseconds."""

    case: str
    shape: tuple[int, int, int]
    regime: str
    us: dict[str, float]
    quartiles: dict[str, tuple[float, float]]
    floor_us: float | None  # the plain product and the bytes besides
    speedup_wanted: float | None
    difference: float  # of ours from XLA's result, largest, relative to the largest element
    kernels: tuple[str, ...]

    @property
    def over_floor(self) -> float | None:
        return None if self.floor_us is None else self.us["ours"] / self.floor_us

    @property
    def speedup(self) -> float:
        return self.us["xla"] / self.us["ours"]

    @property
    def verdict(self) -> str:
        missed = []
        if self.over_floor is not None and self.over_floor > OVERHEAD:
            missed.append("floor")
        if self.speedup < (self.speedup_wanted or 1.0):
            missed.append("XLA")
        if not self.difference < 0.03:
            missed.append("NUMBERS")
        return "missed: " + ", ".join(missed) if missed else "met"

    def to_dict(self) -> dict[str, Any]:
        derived = {"over_floor": self.over_floor, "speedup": self.speedup, "verdict": self.verdict}
        return asdict(self) | derived


def others(case: Case) -> dict[str, Callable]:
    """Returns other libraries' functions for a case, where they are installed."""
    if case is not GATED or importlib.util.find_spec("tokamax") is None:
        return {}
    tokamax = importlib.import_module("tokamax")

    def function(x, w, up):
        return tokamax.gated_linear_unit(x, jnp.stack([w, up], axis=1), activation=jax.nn.silu)

    return {"tokamax (with stacking)": function}


def measured(
    case: Case, shape: tuple[int, int, int], regimes: Sequence[str], rounds: int
) -> list[Row]:
    """Returns a row for each regime, having compared ours with XLA's result."""
    input_sets = random_inputs(case, shape)
    functions = {"ours": case.ours, "xla": case.xla, **others(case)}
    if case is not TRAINING:
        functions["plain"] = plain
    jitted = {name: jax.jit(function) for name, function in functions.items()}
    results = {name: jitted[name](*input_sets[0]) for name in ("ours", "xla")}
    difference = largest_difference(results["ours"], results["xla"])
    del results
    specs = specs_of(functions["ours"], *input_sets[0])
    pause = min(1.0, 20 * flops_of(case, shape) / RATE)
    rows = []
    for regime in regimes:
        if regime == "sustained":
            loops = {name: timing.sustained(f, input_sets) for name, f in jitted.items()}
            timings = timing.alternate(loops, min(rounds, 2))
        else:
            bursts = {name: timing.burst(f, input_sets) for name, f in jitted.items()}
            rest = functools.partial(time.sleep, pause)
            timings = timing.alternate(bursts, rounds, rest)
        us = {name: t.median for name, t in timings.items()}
        rows.append(
            Row(
                case.name,
                shape,
                regime,
                us,
                {name: t.quartiles for name, t in timings.items()},
                floor(case, shape, us),
                case.speedups.get(shape),
                difference,
                tuple(spec.name for spec in specs),
            )  # fmt: skip
        )
    return rows


def floor(case: Case, shape: tuple[int, int, int], us: dict[str, float]) -> float | None:
    """Returns the least time of a case: plain product and further bytes; None: no such product."""
    if case in (GATED, TRAINING):
        return None
    return us["plain"] + case.planes * 2 * shape[0] * shape[1] / BYTES_PER_US


def largest_difference(ours: Any, theirs: Any) -> float:
    """Returns the largest difference of any result, relative to that result's largest element."""

    @jax.jit
    def differ(x, y):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y))

    pairs = zip(alike(ours), alike(theirs), strict=True)
    return float(np.max([differ(x, y) for x, y in pairs]))


def kernels_of(function: Callable, inputs: tuple) -> list[tuple[str, float]]:
    """Returns name and microseconds of each kernel that a call runs, in order."""
    from jax.experimental.mosaic.gpu import profiler

    _, found = profiler.measure(jax.jit(function), aggregate=False)(*inputs)
    return [(name, milliseconds * 1e3) for name, milliseconds in found or []]


HEADER = (
    f"{'case':<22} {'MxNxK':<16} {'regime':<9} {'ours us':>9} {'plain us':>9} {'floor us':>9} "
    f"{'over':>6} {'bar':>5} {'XLA us':>9} {'X/ours':>7} {'bar':>6}  verdict"
)


def format_row(row: Row) -> str:
    def number(value: float | None, width: int, digits: int) -> str:
        return f"{'-' if value is None else format(value, f'.{digits}f'):>{width}}"

    rest = "".join(
        f"  {name} {us:.1f} us"
        for name, us in row.us.items()
        if name not in ("ours", "xla", "plain")
    )
    bar = None if row.floor_us is None else OVERHEAD
    return (
        f"{row.case:<22} {'x'.join(map(str, row.shape)):<16} {row.regime:<9} "
        f"{number(row.us['ours'], 9, 1)} {number(row.us.get('plain'), 9, 1)} "
        f"{number(row.floor_us, 9, 1)} {number(row.over_floor, 6, 3)} {number(bar, 5, 2)} "
        f"{number(row.us['xla'], 9, 1)} {number(row.speedup, 7, 3)} "
        f"{number(row.speedup_wanted, 6, 3)}  {row.verdict}{rest}"
    )


def all_specs(cases: Sequence[tuple[Case, tuple[int, int, int]]]) -> Iterator[GemmSpec]:
    """Yields every kernel that the benchmark runs."""
    for case, shape in cases:
        arguments = abstract(case, shape)
        yield from specs_of(case.ours, *arguments)
        if case is not TRAINING:
            yield from specs_of(plain, *arguments)


def main() -> int:
    parser = command_line.parser(__doc__, rounds=5)
    parser.add_argument("cases", nargs="*", help="words of the cases' names [all]")
    parser.add_argument("--regime", choices=(*benchmark.REGIMES, "both"), default="burst")
    arguments = parser.parse_args()
    pairs = [(case, shape) for shape in (LARGE, SQUARE) for case in (*CASES, GATED)]
    pairs.append((TRAINING, MLP))
    words = arguments.cases
    chosen = [(c, s) for c, s in pairs if not words or any(word in c.name for word in words)]
    if not chosen:
        parser.error(f"no case is named so; there are {', '.join({c.name for c, _ in pairs})}")
    if arguments.build:
        return command_line.build(all_specs(chosen), arguments.build)

    regimes, _ = command_line.begin(arguments.regime, HEADER)
    rows: list[Row] = []
    profiles: dict[str, list[tuple[str, float]]] = {}
    for case, shape in chosen:
        found = measured(case, shape, regimes, arguments.rounds)
        rows += found
        print("\n".join(map(format_row, found)), flush=True)
        if case is TRAINING:
            inputs = random_inputs(case, shape)[0]
            profiles = {"ours": kernels_of(case.ours, inputs), "xla": kernels_of(case.xla, inputs)}
    for name, kernels in profiles.items():
        print(f"\nkernels of the training step, {name}: {len(kernels)}")
        print("\n".join(f"{us:9.1f} us  {kernel}" for kernel, us in kernels))
    return command_line.write(
        arguments.json, [row.to_dict() for row in rows], training_step_kernels=profiles
    )


if __name__ == "__main__":
    sys.exit(main())
