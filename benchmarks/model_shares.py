"""Which part of whole models' FLOPs runs on kernels, and whether XLA is faster with the rest.

    python benchmarks/model_shares.py                              # the shares; needs no GPU
    python benchmarks/model_shares.py --build FOLDER               # compiles the kernels
    JAX_HOPPER_GEMM_CUBINS=FOLDER python benchmarks/model_shares.py --time --json shares.json

The programs are the dense ones of `models.py`: training steps and forward passes, `accelerate`d.
The first table has the share of their products' FLOPs that kernels run, and the products that are
left to XLA, equal ones once.

With `--time` each product that is left is timed, together with what follows it in its program up to
the next products: by XLA, and by kernels (`implementation="hopper"`), with as much of what follows
in the kernel as the cost model puts there, and with nothing. Candidates take turns on random
inputs; burst, times of kernels by CUPTI. The largest shares come first. The last table says of each
program which part of its FLOPs runs on kernels, which XLA was measured to be faster with, and which
is left to XLA though it is slower.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import command_line
import compiling
import jax
import jax.numpy as jnp
import models
from excerpts import by, computing, excerpts, steps
from model_programs import FAMILIES
from models import Program

import jax_hopper_gemm as jhg
from jax_hopper_gemm.fusion.jaxprs import ClosedJaxpr
from jax_hopper_gemm.gemm.kernel_params import KernelSpec
from jax_hopper_gemm.testing import timing
from jax_hopper_gemm.testing.lowered import all_specs_of

DENSE = [name for name, family in FAMILIES.items() if family.kind == "dense"]
BATCH = 16  # excerpts that are compiled at once
RATE = 5e14  # FLOP/s that a pause between measurements is reckoned with


@dataclass(eq=False)
class Left:
    """A product that is left to XLA, and what follows it: equal ones of all programs.

    Attributes:
      product, reason: as `explain` has them, of the first.
      excerpt: the product and what follows it.
      shares: of the FLOPs of programs.
      runs: in a run of each program.
      us: what it takes, by candidate.
      specs: kernels of the candidates.
      failure: why it was not timed.
    """

    product: str
    reason: str
    flops: int
    excerpt: ClosedJaxpr
    shares: dict[Program, float] = field(default_factory=dict)
    runs: dict[Program, int] = field(default_factory=dict)
    us: dict[str, timing.Timing] = field(default_factory=dict)
    specs: dict[str, list[KernelSpec]] = field(default_factory=dict)
    failure: str = ""

    @cached_property
    def candidates(self) -> dict[str, Callable[..., Any]]:
        """Functions by name; "fused" only where it launches other kernels; none if there are none.

        It finds their kernels, too, `specs`.
        """
        ours = {
            name: jhg.accelerate(by(self.excerpt, "hopper"), implementation="hopper", fuse=fuse)
            for name, fuse in (("kernel", False), ("fused", True))
        }
        try:
            self.specs = {name: all_specs_of(f, *self.arguments) for name, f in ours.items()}
        except NotImplementedError as error:
            self.failure = f"no kernel ({str(error).rpartition(': ')[2]})"
            return {}
        if self.specs["fused"] == self.specs["kernel"]:
            del ours["fused"], self.specs["fused"]
        return {"XLA": by(self.excerpt, "xla"), **ours}

    @property
    def arguments(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.excerpt.in_avals]

    @property
    def following(self) -> int:
        """How many operations follow the product and compute something."""
        return len(computing(self.excerpt)) - 1

    @property
    def num_sets(self) -> int:
        """How many sets of inputs are read in turns."""
        nbytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in self.arguments)
        return timing.sets_to_rotate(nbytes)

    @property
    def ratio(self) -> float:
        """XLA's time over the better one of ours."""
        return self.us["XLA"].median / min(t.median for x, t in self.us.items() if x != "XLA")

    @property
    def verdict(self) -> str:
        if not self.us:
            return self.failure or "not timed"
        return "faster in XLA" if self.ratio <= 1 else "slower in XLA"

    def to_dict(self) -> dict[str, Any]:
        return {
            "product": self.product, "followed_by": self.following, "reason": self.reason,
            "shares": {str(x).rstrip(): share for x, share in self.shares.items()},
            "us": {name: t.to_dict() for name, t in self.us.items()}, "verdict": self.verdict,
        } | ({"ratio": self.ratio} if self.us else {})  # fmt: skip


@dataclass
class Shares:
    """Where the FLOPs of a program run.

    Attributes:
      left: the products that are left to XLA.
    """

    program: Program
    left: list[Left]

    @property
    def on_kernels(self) -> float:
        return 1 - sum(x.shares[self.program] for x in self.left)

    def with_verdict(self, verdict: str) -> float:
        return sum(x.shares[self.program] for x in self.left if x.verdict == verdict)

    @property
    def lost_us(self) -> float:
        """What kernels would save of the products that are slower in XLA."""
        slower = (x for x in self.left if x.us and x.ratio > 1)
        return sum(x.runs[self.program] * x.us["XLA"].median * (1 - 1 / x.ratio) for x in slower)

    def to_dict(self) -> dict[str, Any]:
        program = asdict(self.program) | {"kernels": self.on_kernels}
        return program | {
            "faster_in_xla": self.with_verdict("faster in XLA"),
            "slower_in_xla": self.with_verdict("slower in XLA"), "lost_us": self.lost_us,
        }  # fmt: skip


def shares_of(programs: Iterable[Program]) -> Iterator[Shares]:
    """Yields the shares of programs; equal products left are one object."""
    known: dict[Any, Left] = {}
    for program in programs:
        function, arguments = program.abstract(accelerated=False)
        explained = jhg.explain(function, *arguments)
        left: list[Left] = []
        for x, cut in zip(explained.products, excerpts(function, arguments), strict=True):
            if x.path == "hopper":
                continue
            one = Left(x.product, x.reason, x.flops, cut)
            one = known.setdefault((x.product, steps(cut)), one)
            one.shares[program] = one.shares.get(program, 0.0) + x.flops / explained.flops
            one.runs[program] = one.runs.get(program, 0) + x.runs
            left += [] if one in left else [one]
        yield Shares(program, left)


def report(shares: Shares, least: float) -> str:
    """Returns the share of a program, and what is left, as text."""
    lines = [f"{shares.program} {shares.on_kernels:6.1%} of FLOPs on kernels"]
    groups: dict[Any, list[Left]] = {}
    for x in shares.left:
        groups.setdefault((x.product, x.reason), []).append(x)

    def share_of(equal: list[Left]) -> float:
        return sum(x.shares[shares.program] for x in equal)

    for (product, reason), equal in sorted(groups.items(), key=lambda pair: -share_of(pair[1])):
        if share_of(equal) >= least:
            times = sum(x.runs[shares.program] for x in equal)
            lines += [f"  {share_of(equal):6.1%} x {times:<3} {product}", f"      {reason}"]
    return "\n".join(lines)


def worth_timing(found: Iterable[Shares], least: float) -> list[Left]:
    """Returns the products left with at least this share of a program, largest first."""
    largest = {x: max(x.shares.values()) for shares in found for x in shares.left}
    return sorted((x for x in largest if largest[x] >= least), key=lambda x: -largest[x])


def drawing(arguments: Sequence[jax.ShapeDtypeStruct]) -> Any:
    """Returns the jitted function of a seed that draws random arguments: floats are normal."""

    @jax.jit
    def draw(seed: jax.Array) -> list[jax.Array]:
        key = jax.random.key(seed, impl="rbg")
        keys = jax.random.split(key, len(arguments))
        return [
            jax.random.normal(key, x.shape, x.dtype) if jnp.issubdtype(x.dtype, jnp.floating)
            else jax.random.bits(key, x.shape, jnp.uint32).astype(x.dtype)
            for key, x in zip(keys, arguments, strict=True)
        ]  # fmt: skip

    return draw


def time_them(batch: Sequence[Left], rounds: int) -> None:
    """Times some excerpts, which are compiled together."""
    calls: list[tuple[Any, tuple]] = []
    batch = [left for left in batch if left.candidates]
    for left in batch:
        calls.append((drawing(left.arguments), (jax.ShapeDtypeStruct((), "uint32"),)))
        calls += [(jax.jit(f), tuple(left.arguments)) for f in left.candidates.values()]
    ready = iter(compiling.compiled(calls))
    for left in batch:
        found = [*islice(ready, 1 + len(left.candidates))]
        functions = [x for x in found if not isinstance(x, Exception)]
        try:
            for failure in (x for x in found if isinstance(x, Exception)):
                raise failure
            draw, *functions = functions
            inputs = [tuple(draw(jnp.uint32(seed))) for seed in range(left.num_sets)]
            bursts = {
                name: timing.burst(function, inputs)
                for name, function in zip(left.candidates, functions, strict=True)
            }
            pause = min(1.0, 10 * left.flops / RATE)
            left.us = timing.alternate(bursts, rounds, partial(time.sleep, pause))
        except Exception as error:  # such as too little memory; the others are timed
            left.failure = f"{type(error).__name__}: {str(error)[:200]}"
        print(row_of(left), flush=True)


HEADER = (
    f"{'XLA us':>8} {'kernel':>8} {'fused':>8} {'ratio':>6} {'share':>6}  verdict, product and how "
    "many operations follow it"
)


def row_of(left: Left) -> str:
    times = [
        f"{left.us[name].median:8.1f}" if name in left.us else f"{'':8}"
        for name in ("XLA", "kernel", "fused")
    ]
    ratio = f"{left.ratio:6.3f}" if left.us else f"{'':6}"
    return (
        f"{' '.join(times)} {ratio} {max(left.shares.values()):6.1%}  {left.verdict}: "
        f"{left.product} + {left.following}"
    )


def on_kernels(found: Iterable[Shares]) -> str:
    """Returns a table of the shares: a line for each model."""
    columns = [(framework, what) for framework in models.FRAMEWORKS for what in models.WHAT]
    rows: dict[tuple[str, str], dict[Any, str]] = {}
    for x in found:
        row = rows.setdefault((x.program.family, x.program.size), {})
        row[x.program.framework, x.program.what] = f"{x.on_kernels:.1%}"
    lines = [f"{'':<16}" + "".join(f"{' '.join(column):>14}" for column in columns)]
    for (family, size), row in rows.items():
        shares = "".join(f"{row.get(column, ''):>14}" for column in columns)
        lines.append(f"{family:<8} {size:<7}{shares}")
    return "\n".join(lines)


def summary(found: Iterable[Shares]) -> str:
    """Returns a table of what was timed: a line for each program."""
    lines = [
        f"{'program':<33} {'kernels':>8} {'XLA faster':>11} {'both':>7} {'XLA slower':>11} "
        f"{'not timed':>10} {'lost us':>8}"
    ]
    for x in found:
        faster, slower = x.with_verdict("faster in XLA"), x.with_verdict("slower in XLA")
        rest = 1 - x.on_kernels - faster - slower
        lines.append(
            f"{x.program!s:<33} {x.on_kernels:8.1%} {faster:11.1%} {x.on_kernels + faster:7.1%} "
            f"{slower:11.1%} {abs(rest):10.1%} {x.lost_us:8.1f}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = command_line.parser(__doc__, rounds=3)
    models.add_choices(parser, DENSE)
    parser.add_argument(
        "--time", action="store_true", help="time what is left to XLA; needs a Hopper GPU"
    )
    parser.add_argument(
        "--least", type=float, default=0.5, help="percent of a program's FLOPs to be named [0.5]"
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="after which it stops [600]")
    parser.set_defaults(recipe="none")
    arguments = parser.parse_args()
    if arguments.json and not arguments.time:
        parser.error("--json writes times: add --time")
    start, least = time.monotonic(), arguments.least / 100
    if arguments.time:
        command_line.begin("burst", HEADER)
    found = [*shares_of(models.programs(arguments))]
    left = worth_timing(found, least)
    if arguments.build:
        return command_line.build(
            (spec for x in left if x.candidates for specs in x.specs.values() for spec in specs),
            arguments.build,
        )
    if not arguments.time:
        print("\n".join(report(shares, least) for shares in found))
        print(on_kernels(found))
        return 0
    for first in range(0, len(left), BATCH):
        if time.monotonic() - start > arguments.seconds:
            break
        time_them(left[first : first + BATCH], arguments.rounds)
        write(arguments.json, found, left)
    print(summary(found))
    return 0


def write(path: Path | None, found: Sequence[Shares], left: Sequence[Left]) -> None:
    programs = [x.to_dict() for x in found]
    command_line.write(path, [x.to_dict() for x in left], programs=programs)


if __name__ == "__main__":
    sys.exit(main())
