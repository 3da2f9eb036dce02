"""Times the kernels that dispatch considers for a product, in turns: is its choice the fastest?

    python benchmarks/choices.py --build FOLDER        compiles what is timed; needs no GPU
    JAX_HOPPER_GEMM_CUBINS=FOLDER python benchmarks/choices.py --json choices.json

Each product runs as users call it, by each of its kernels of least expected cost in place of the
one that dispatch chooses. Groups are uneven (`group_sizes`). Burst regime, CUPTI.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import command_line
import group_sizes
import jax
import jax.numpy as jnp
from grouped_products import by_ragged_dot

import jax_hopper_gemm as jhg
from jax_hopper_gemm import dispatch
from jax_hopper_gemm.dispatch import choice
from jax_hopper_gemm.dispatch.candidates import considered_specs
from jax_hopper_gemm.dispatch.choice import Decision
from jax_hopper_gemm.dispatch.cost import rough_estimate
from jax_hopper_gemm.dispatch.memory_traffic import best_raster_order
from jax_hopper_gemm.dispatch.model import best_kernel
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.testing import timing
from jax_hopper_gemm.testing.lowered import specs_of

# Experts, K, N and rows; 0 experts: a dense product.
EXPERTS = (
    (8, 4096, 14336, (64, 512, 2048, 8192)), (8, 14336, 4096, (512, 4096)),
    (16, 4096, 6400, (512, 2048, 8192)), (16, 5120, 8192, (1024, 4096)),
    (32, 7168, 4096, (512, 4096, 16384)), (32, 2048, 7168, (1024, 8192)),
    (60, 2048, 1408, (2048, 16384)), (64, 2048, 2048, (512, 4096, 32768)),
    (128, 2048, 1536, (256, 1024, 4096, 16384, 65536)), (128, 2880, 5760, (1024, 4096)),
)  # fmt: skip
DENSE = tuple(
    (0, k, n, (16, 64, 128, 512, 2048, 8192))
    for k, n in ((4096, 11008), (4096, 14336), (2048, 5632), (5120, 13824))
)


class Product(NamedTuple):
    """A product of (rows, K) by (experts, K, N), or a gradient of it; or a gated dense one."""

    kind: str
    experts: int
    rows: int
    k: int
    n: int

    def arrays(self, seed: int) -> tuple[jax.Array, ...]:
        """Returns random operands, normal."""
        keys = jax.random.split(jax.random.key(seed, impl="rbg"), 4)
        stack = (self.experts,) if self.experts else ()
        x, w, w0, g = (
            jax.random.normal(key, shape, jnp.bfloat16)
            for key, shape in zip(
                keys,
                ((self.rows, self.k), (*stack, self.k, self.n), (self.k, self.n),
                 (self.rows, self.n)), strict=True,
            )
        )  # fmt: skip
        if not self.experts:
            return x, w, w0
        return x, w, w0, g, jnp.asarray(group_sizes.uneven(self.rows, self.experts, seed))

    @property
    def sets(self) -> int:
        """How many sets of arrays to rotate."""
        nbytes = 2 * (self.rows * self.k + max(self.experts, 2) * self.k * self.n)
        return min(4, timing.sets_to_rotate(nbytes))

    def candidates(self, count: int) -> Iterator[tuple[GemmSpec, float]]:
        """Yields the choice of dispatch, and others of least expected cost, with that in us."""
        seen: list[tuple[GemmProblem, Decision]] = []

        def record(problem: GemmProblem, *how: Any) -> Decision:
            seen.append((problem, chosen(problem, *how)))
            return seen[-1][1]

        chosen, device = choice._choose, dispatch.absent_device()
        self.launched_by(record)
        problem, decision = seen[0]
        assert decision.spec is not None
        left = dict.fromkeys([decision.spec, *considered_specs(problem)])
        spec: GemmSpec | None = decision.spec
        while spec and count:
            yield spec, rough_estimate(problem, spec, device).ns / 1e3
            del left[spec]
            best, _ = best_kernel(problem, device, left)
            spec, count = best and best.spec, count - 1

    def launched_by(self, choose: Callable[..., Decision]) -> list[GemmSpec]:
        """Returns the kernels of the product where `choose` takes the place of dispatch."""
        with mock.patch.object(choice, "_choose", choose):
            return specs_of(FUNCTIONS[self.kind], *jax.eval_shape(lambda: self.arrays(0)))


def gated(x: Any, gate: Any, up: Any) -> jax.Array:
    return jhg.gated_linear_unit(x, (gate, up), implementation="hopper")


FUNCTIONS: dict[str, Callable[..., jax.Array]] = {
    **by_ragged_dot(partial(jhg.ragged_dot, implementation="hopper")),
    "gated": gated,
}


def by_kernel(spec: GemmSpec, product: Product) -> Callable[..., Any]:
    """Returns the product, compiled, by a kernel."""

    def choose(problem: GemmProblem, device: dispatch.Device, *how: Any) -> Decision:
        return Decision(spec, best_raster_order(problem, spec, device), "to be timed", "model")

    jax.clear_caches()  # of what another kernel was lowered for
    with mock.patch.object(choice, "_choose", choose):
        function = jax.jit(lambda *arrays: FUNCTIONS[product.kind](*arrays))
        return function.lower(*jax.eval_shape(lambda: product.arrays(0))).compile()


def products(kinds: list[str]) -> Iterator[Product]:
    for kind in kinds:
        for experts, k, n, rows in DENSE if kind == "gated" else EXPERTS:
            for m in rows:
                yield Product(kind, experts, m, k, n)


def main() -> int:
    parser = command_line.parser(__doc__, rounds=2)
    parser.add_argument("--kinds", nargs="+", choices=FUNCTIONS, default=list(FUNCTIONS))
    parser.add_argument("--kernels", type=int, default=5, help="of each product [5]")
    arguments = parser.parse_args()
    if arguments.build:
        found = (p.candidates(arguments.kernels) for p in products(arguments.kinds))
        return command_line.build((spec for each in found for spec, _ in each), arguments.build)
    return measure(arguments)


def measure(arguments: argparse.Namespace) -> int:
    command_line.begin("burst", f"{'':34} {'us':>8} {'fastest':>8} {'slower':>7}  the choice")
    rows, ratios = [], []
    for product in products(arguments.kinds):
        inputs = [jax.block_until_ready(product.arrays(seed)) for seed in range(product.sets)]
        candidates = list(product.candidates(arguments.kernels))
        bursts = {
            spec.name: timing.burst(by_kernel(spec, product), inputs) for spec, _ in candidates
        }
        timed = timing.alternate(bursts, arguments.rounds, rest=partial(time.sleep, 0.005))
        times = [timed[spec.name].median for spec, _ in candidates]
        ratios.append(times[0] / min(times))
        title = f"{product.kind} {product.experts}: {product.rows}x{product.k}x{product.n}"
        name = candidates[0][0].name
        print(f"{title:34} {times[0]:8.1f} {min(times):8.1f} {ratios[-1]:7.3f}  {name}", flush=True)
        kernels = [
            {"kernel": spec.name, "expected_us": expected, "us": us}
            for (spec, expected), us in zip(candidates, times, strict=True)
        ]
        rows.append({"product": product, "kernels": kernels})
    mean = statistics.geometric_mean(ratios)
    print(f"choices take {mean:.3f} times as long as the fastest, {max(ratios):.3f} at most")
    return command_line.write(arguments.json, rows)


if __name__ == "__main__":
    sys.exit(main())
