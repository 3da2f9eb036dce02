"""Times products of one array, as of query, key and value: in one launch, one by one, by XLA.

    python benchmarks/one_array.py --build FOLDER        compiles what is timed; needs no GPU
    JAX_HOPPER_GEMM_CUBINS=FOLDER python benchmarks/one_array.py --json one_array.json

Of each set: XLA's products, the kernels that dispatch chooses when forced, those and XLA as it
chooses by default, and the kernel of all. In turns on the same random inputs. Burst regime, CUPTI:
the sum of kernels, so what lies between launches is not counted. `--random` draws other sets. With
`--epilogues` each product has a bias, or updates its weights; "default" then is `accelerate`.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import command_line
import jax
import jax.numpy as jnp

import jax_hopper_gemm as jhg
from jax_hopper_gemm import dispatch, ops
from jax_hopper_gemm.dispatch.choice import one_by_one_ns
from jax_hopper_gemm.dispatch.cost import estimate
from jax_hopper_gemm.dispatch.memory_traffic import best_raster_order
from jax_hopper_gemm.dispatch.model import best_kernel
from jax_hopper_gemm.gemm.epilogue_graph import EpilogueGraph, Node, Operand, Result
from jax_hopper_gemm.gemm.kernel_params import KernelSpec
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.lowering.devices import current_device
from jax_hopper_gemm.testing import benchmark, timing
from jax_hopper_gemm.testing.lowered import all_specs_of

RATE = 0.01
BIAS = EpilogueGraph(
    operands=(Operand("row", "bfloat16"),), nodes=(Node("add", (0, 1)),),
    results=(Result("matrix", 2, "bfloat16"),),
)  # fmt: skip
UPDATE = EpilogueGraph(
    operands=(Operand("matrix", "bfloat16"),),
    nodes=(Node("constant", (), (RATE,)), Node("mul", (0, 2)), Node("sub", (1, 3))),
    results=(Result("matrix", 4, "bfloat16"),),
)  # fmt: skip


@dataclass(frozen=True)
class Products:
    """Products of `rows` tokens with weights (`width`, columns), or the gradients of these."""

    rows: int
    width: int
    columns: tuple[int, ...]
    gradients: bool = False
    epilogues: bool = False

    @property
    def problem(self) -> GemmProblem:
        if self.gradients:
            of = partial(GemmProblem.dense, self.width, k=self.rows, a_major="m")
        else:
            of = partial(GemmProblem.dense, self.rows, k=self.width)
        alone = [of(n=n) for n in self.columns]
        if self.epilogues:
            graph = UPDATE if self.gradients else BIAS
            alone = [replace(x, epilogue=graph, operands=(x.d,)) for x in alone]
        return GemmProblem.side_by_side(alone)

    def draw(self, seed: int) -> tuple[jax.Array, ...]:
        rows = self.rows if self.gradients else self.width
        shapes = [(self.rows, self.width), *((rows, n) for n in self.columns)]
        if self.epilogues:
            shapes += [(self.width, n) if self.gradients else (n,) for n in self.columns]
        keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(shapes))
        pairs = zip(keys, shapes, strict=True)
        return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in pairs)

    def products(self, dot_general: Callable[..., Any], x: Any, *others: Any) -> list[Any]:
        axis, count = 0 if self.gradients else 1, len(self.columns)
        found = [dot_general(x, other, (((axis,), (0,)), ((), ()))) for other in others[:count]]
        if not self.epilogues:
            return found
        pairs = zip(found, others[count:], strict=True)
        return [w - RATE * y if self.gradients else y + w for y, w in pairs]

    def one_by_one(self, device: dispatch.Device) -> Callable[..., list[Any]]:
        """Returns the function of the same by the kernel that dispatch takes for each."""
        count, kernels = len(self.columns), []
        for problem in self.problem.apart:
            chosen = dispatch.choose(problem, device, kernel_only=True)
            assert chosen.spec and chosen.raster_order
            order = chosen.raster_order
            kernels.append(benchmark.one_kernel(problem, chosen.spec, order, device.num_sms))

        def run(x: Any, *others: Any) -> list[Any]:
            arrays = zip(kernels, others[:count], others[count:], strict=True)
            return [kernel(x, *both) for kernel, *both in arrays]

        return run


SETS = [
    Products(rows, width, columns, gradients)
    for rows, width, columns in (
        (1, 4096, (4096, 1024, 1024)),
        (64, 4096, (4096, 1024, 1024)),
        (512, 4096, (4096, 1024, 1024)),
        (2048, 4096, (4096, 1024, 1024)),
        (8192, 4096, (4096, 1024, 1024)),
        (64, 2048, (2048, 512, 512)),
        (1024, 2048, (2048, 512, 512)),
        (8192, 2048, (2048, 512, 512)),
        (512, 1024, (1024, 1024, 1024)),
        (4096, 1024, (1024, 1024, 1024)),
        (8192, 1024, (1024, 1024, 1024)),
        (25216, 1024, (1024, 1024, 1024)),
        (128, 768, (768, 768, 768)),
        (4096, 768, (768, 768, 768)),
        (16384, 768, (768, 768)),
    )
    for gradients in (False, True)
    if not gradients or rows >= 512
]


def random_sets(count: int, seed: int) -> list[Products]:
    rng, found = random.Random(seed), []
    for _ in range(count):
        rows, width = (round(2 ** rng.uniform(*of)) for of in ((4, 14), (3, 7)))
        head = 32 * rng.randint(2, 16)
        columns = (width * 64, *[rng.choice((width * 64, 2 * head))] * rng.choice((1, 2, 2, 2, 3)))
        found.append(Products(8 * -(-rows // 8), 64 * width, columns, rng.random() < 0.3))
    return found


def of_all(problem: GemmProblem) -> GemmSpec | None:
    """Returns the kernel of all products, be it faster than one by one or not."""
    best, _ = best_kernel(problem, dispatch.H200)
    return best.spec if best else None


def specs_of(products: Products) -> list[KernelSpec]:
    problem = products.problem
    found = [
        of_all(problem),
        *(
            dispatch.choose(x, current_device(), kernel_only=forced).spec
            for x in problem.apart
            for forced in (True, False)
        ),
    ]
    accelerated = jhg.accelerate(partial(products.products, jax.lax.dot_general))
    by_default = all_specs_of(accelerated, *jax.eval_shape(products.draw, 0))
    return [x for x in found if x] + (by_default if products.epilogues else [])


def measure(sets: Sequence[Products], rounds: int) -> list[dict[str, Any]]:
    device, found = benchmark.this_device(), []
    print(
        "rows x width x columns         XLA  forced default     all  (us)   default/all  expected"
    )
    for products in sets:
        problem = products.problem
        if (spec := of_all(problem)) is None:
            continue
        moved = problem.m * problem.n if products.epilogues and products.gradients else 0
        size = 2 * (sum(p.m * p.k + p.k * p.n for p in problem.apart) + moved)
        inputs = [products.draw(seed) for seed in range(timing.sets_to_rotate(size))]
        order = best_raster_order(problem, spec, device)
        makers = {
            "XLA": jax.lax.dot_general,
            "forced": partial(ops.dot_general, implementation="hopper"),
            "default": ops.dot_general,
        }
        functions: dict[str, Callable[..., Any]] = {
            name: jax.jit(partial(products.products, dot_general))
            for name, dot_general in makers.items()
        }
        if products.epilogues:
            by_xla = partial(products.products, jax.lax.dot_general)
            functions["forced"] = jax.jit(products.one_by_one(device))
            functions["default"] = jax.jit(jhg.accelerate(by_xla))
        functions["all"] = benchmark.one_kernel(problem, spec, order, device.num_sms)
        bursts = {name: timing.burst(f, inputs) for name, f in functions.items()}
        timings = timing.alternate(bursts, rounds, rest=lambda: time.sleep(0.01))
        us = {name: x.median for name, x in timings.items()}
        together = estimate(problem, spec, order, device).ns
        expected = one_by_one_ns(problem, device) / together
        kind = "gradients" if products.gradients else ""
        what = f"{products.rows}x{products.width}x{products.columns} {kind}"
        times = " ".join(f"{x:7.1f}" for x in us.values())
        print(f"{what:44} {times}  {us['default'] / us['all']:.3f}  {expected:.3f}", flush=True)
        found.append({"products": what, "us": us, "expected": expected, "kernel": spec.name})
    return found


def main() -> int:
    parser = command_line.parser(__doc__, rounds=3)
    parser.add_argument("--random", type=int, metavar="COUNT", help="draw so many sets")
    parser.add_argument("--seed", type=int, default=0, help="of these [0]")
    parser.add_argument("--epilogues", action="store_true", help="biases, and updates of weights")
    arguments = parser.parse_args()
    sets = random_sets(arguments.random, arguments.seed) if arguments.random else SETS
    sets = [replace(x, epilogues=arguments.epilogues) for x in sets]
    if arguments.build:
        return command_line.build((s for x in sets for s in specs_of(x)), arguments.build)
    return command_line.write(arguments.json, measure(sets, arguments.rounds))


if __name__ == "__main__":
    sys.exit(main())
