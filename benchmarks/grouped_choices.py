"""Times the kernels that dispatch considers for grouped products: is its choice the fastest?

    python benchmarks/grouped_choices.py --build FOLDER        compiles what is timed; needs no GPU
    JAX_HOPPER_GEMM_CUBINS=FOLDER python benchmarks/grouped_choices.py --json choices.json

Each product runs as users call it, by each of its kernels of least expected cost in place of the
one that dispatch chooses, in turns. Sizes are uneven. Burst regime, CUPTI.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import command_line
import jax
import jax.numpy as jnp
from grouped_products import SIZES, WHAT, Shape, abstract, ours, random_inputs

from jax_hopper_gemm.dispatch import Device, choice
from jax_hopper_gemm.dispatch.candidates import considered_specs
from jax_hopper_gemm.dispatch.choice import Decision
from jax_hopper_gemm.dispatch.cost import rough_estimate
from jax_hopper_gemm.dispatch.memory_traffic import best_raster_order
from jax_hopper_gemm.dispatch.model import best_kernel
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.testing import timing
from jax_hopper_gemm.testing.lowered import specs_of

LAYERS = (  # experts, K, N, and rows of all experts
    (8, 4096, 14336, (64, 512, 2048, 8192)), (8, 14336, 4096, (512, 4096)),
    (16, 4096, 6400, (512, 2048, 8192)), (16, 5120, 8192, (1024, 4096)),
    (32, 7168, 4096, (512, 4096, 16384)), (32, 2048, 7168, (1024, 8192)),
    (60, 2048, 1408, (2048, 16384)), (64, 2048, 2048, (512, 4096, 32768)),
    (128, 2048, 1536, (256, 1024, 4096, 16384, 65536)), (128, 2880, 5760, (1024, 4096)),
)  # fmt: skip
SHAPES = [Shape(e, tokens, k, n) for e, k, n, rows in LAYERS for tokens in rows]


def candidates(what: str, shape: Shape, count: int) -> Iterator[tuple[GemmSpec, float]]:
    """Yields the choice of dispatch and others of least expected cost, with that cost in us."""
    seen: list[tuple[GemmProblem, Device, Decision]] = []

    def record(problem: GemmProblem, device: Device, *how: Any) -> Decision:
        seen.append((problem, device, chosen(problem, device, *how)))
        return seen[-1][-1]

    chosen = choice._choose
    with mock.patch.object(choice, "_choose", record):
        specs_of(ours()[what], *abstract(shape))
    problem, device, decision = seen[0]
    spec = decision.spec
    left = dict.fromkeys(considered_specs(problem))
    while spec and count:
        yield spec, rough_estimate(problem, spec, device).ns / 1e3
        left.pop(spec, None)  # a measured choice need not be considered
        best, _ = best_kernel(problem, device, left)
        spec, count = best and best.spec, count - 1


def by_kernel(what: str, shape: Shape, spec: GemmSpec) -> Callable[..., Any]:
    """Returns the product, compiled, by a kernel."""

    def choose(problem: GemmProblem, device: Device, *how: Any) -> Decision:
        return Decision(spec, best_raster_order(problem, spec, device), "to be timed", "model")

    jax.clear_caches()  # of what another kernel was lowered for
    with mock.patch.object(choice, "_choose", choose):
        return jax.jit(ours()[what]).lower(*abstract(shape)).compile()


def main() -> int:
    parser = command_line.parser(__doc__, rounds=2)
    parser.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT))
    parser.add_argument("--kernels", type=int, default=5, help="of each product [5]")
    arguments = parser.parse_args()
    if arguments.build:
        each = product(arguments.what, SHAPES)
        found = (candidates(what, shape, arguments.kernels) for what, shape in each)
        return command_line.build((spec for pairs in found for spec, _ in pairs), arguments.build)
    return measure(arguments)


def measure(arguments: argparse.Namespace) -> int:
    command_line.begin("burst", f"{'':34} {'us':>8} {'fastest':>8} {'ratio':>7}  the choice")
    rows, ratios = [], []
    for what, shape in product(arguments.what, SHAPES):
        sizes = jnp.asarray(SIZES["uneven"](shape.tokens, shape.experts, 0))
        inputs = [(*arrays, sizes) for arrays in random_inputs(shape)]
        specs, expected = zip(*candidates(what, shape, arguments.kernels), strict=True)
        bursts = {
            str(i): timing.burst(by_kernel(what, shape, spec), inputs)
            for i, spec in enumerate(specs)
        }
        timed = timing.alternate(bursts, arguments.rounds, rest=partial(time.sleep, 0.005))
        times = [each.median for each in timed.values()]
        ratios.append(times[0] / min(times))
        title = f"{what} {shape.experts}: {shape.tokens}x{shape.k}x{shape.n}"
        name = specs[0].name
        print(f"{title:34} {times[0]:8.1f} {min(times):8.1f} {ratios[-1]:7.3f}  {name}", flush=True)
        kernels = [
            {"kernel": spec.name, "expected_us": cost, "us": us}
            for spec, cost, us in zip(specs, expected, times, strict=True)
        ]
        rows.append({"product": title, "kernels": kernels})
    mean = statistics.geometric_mean(ratios)
    print(f"choices take {mean:.3f} times as long as the fastest, {max(ratios):.3f} at most")
    return command_line.write(arguments.json, rows)


if __name__ == "__main__":
    sys.exit(main())
