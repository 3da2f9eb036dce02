"""Times the kernels that dispatch considers for grouped products: is its choice the fastest?

    python benchmarks/grouped_choices.py --build FOLDER        compiles what is timed; needs no GPU
    JAX_HOPPER_GEMM_CUBINS=FOLDER python benchmarks/grouped_choices.py --json choices.json

Each product runs as users call it, in turns by the kernel that dispatch chooses and by others of
least expected cost, whose tiles all differ. Sizes are uneven, rows are gathered in a random order,
and quantized arrays come as such. `--untried` adds kernels of tiles that dispatch does not
consider. Burst regime, CUPTI.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import Any
from unittest import mock

import command_line
import jax
import jax.numpy as jnp
import numpy as np
from grouped_products import SIZES, Function, Shape, abstract, by_ragged_dot, ours, random_inputs

import jax_hopper_gemm as jhg
from jax_hopper_gemm.dispatch import Device, choice
from jax_hopper_gemm.dispatch.candidates import considered_specs, tuner_specs, types_of
from jax_hopper_gemm.dispatch.choice import Decision
from jax_hopper_gemm.dispatch.configs import Config
from jax_hopper_gemm.dispatch.cost import rough_estimate
from jax_hopper_gemm.dispatch.memory_traffic import best_raster_order
from jax_hopper_gemm.dispatch.model import best_kernel
from jax_hopper_gemm.gemm.kernel_params import KernelSpec, spec_from_json
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.spec import GemmSpec
from jax_hopper_gemm.lowering.call import launches_in
from jax_hopper_gemm.testing import timing
from jax_hopper_gemm.testing.lowered import all_specs_of, specs_of

LAYERS = (  # experts, K, N, and rows of all experts
    (8, 4096, 14336, (64, 512, 2048, 8192)), (8, 14336, 4096, (512, 4096)),
    (16, 4096, 6400, (512, 2048, 8192)), (16, 5120, 8192, (1024, 4096)),
    (32, 7168, 4096, (512, 4096, 16384)), (32, 2048, 7168, (1024, 8192)),
    (60, 2048, 1408, (2048, 16384)), (64, 2048, 2048, (512, 4096, 32768)),
    (128, 2048, 1536, (256, 1024, 4096, 16384, 65536)), (128, 2880, 5760, (1024, 4096)),
)  # fmt: skip
SHAPES = [Shape(e, tokens, k, n) for e, k, n, rows in LAYERS for tokens in rows]
Prepared = Callable[[jax.Array, jax.Array], tuple[Any, Any]]  # of x and w, before time is taken
QUANTIZED: dict[str, Prepared] = {
    "int8": lambda x, w: (x, jhg.quantize(w, jnp.int8, (1, None, 1))),
    "int4": lambda x, w: (x, jhg.quantize(w, jnp.int4, (1, 128, 1))),
    "e4m3": lambda x, w: (jhg.quantize(x), jhg.quantize(w, block=(1, None, None))),
    "e4m3 by blocks": lambda x, w: (
        jhg.quantize(x, block=(1, 128)), jhg.quantize(w, block=(1, 128, 128))
    ),
}  # fmt: skip


def gated(x, w, w0, g, sizes, row_indices=None):
    """Gate and up are the halves of N."""
    experts, k, n = w.shape
    return jhg.gated_linear_unit(
        x, w.reshape(experts, k, 2, n // 2), group_sizes=sizes, row_indices=row_indices,
        implementation="hopper",
    )  # fmt: skip


def gathered(rows: int) -> dict[str, Function]:
    """Returns products of rows in a random order."""
    order = np.random.default_rng(0).permutation(rows).astype(np.int32)
    ragged_dot = partial(jhg.ragged_dot, row_indices=order, implementation="hopper")
    functions = by_ragged_dot(ragged_dot) | {"gated": partial(gated, row_indices=order)}
    return {f"gathered {what}": function for what, function in functions.items()}


def functions(shape: Shape) -> dict[str, Function]:
    def quantized(x, w, w0, g, sizes):
        return jhg.ragged_dot(
            x, w, sizes, preferred_element_type=jnp.bfloat16, implementation="hopper"
        )

    return ours() | {"gated": gated} | gathered(shape.tokens) | dict.fromkeys(QUANTIZED, quantized)


WHAT = (
    "forward", "data", "weight", "gated",
    "gathered forward", "gathered weight", "gathered gated", *QUANTIZED,
)  # fmt: skip


def inputs_of(what: str, x: Any, w: Any, *others: Any) -> tuple[Any, ...]:
    """Returns the arguments of a product's function."""
    return (*QUANTIZED.get(what, lambda *pair: pair)(x, w), *others)


def traced(what: str, shape: Shape) -> tuple[Any, ...]:
    """Returns a product's function and the shapes of its arguments."""
    return functions(shape)[what], *jax.eval_shape(partial(inputs_of, what), *abstract(shape))


def decided(what: str, shape: Shape) -> tuple[GemmProblem, Device, GemmSpec]:
    """Returns the problem of the kernel that dispatch takes, and that kernel."""
    seen: dict[GemmSpec | None, tuple[GemmProblem, Device]] = {}

    def record(problem: GemmProblem, device: Device, *how: Any) -> Decision:
        decision = chosen(problem, device, *how)
        seen[decision.spec] = problem, device
        return decision

    chosen = choice._choose
    with mock.patch.object(choice, "_choose", record):
        (spec,) = specs_of(*traced(what, shape))
    return *seen[spec], spec


def candidates(
    problem: GemmProblem, device: Device, first: GemmSpec, count: int, untried: int
) -> Iterator[tuple[GemmSpec, float]]:
    """Yields the choice of dispatch and others of least expected cost, with that cost in us."""

    def cheapest(specs: Iterable[GemmSpec], count: int) -> Iterator[GemmSpec]:
        """Yields the best, the best of the others, and so on."""
        left = list(specs)
        while count and (best := best_kernel(problem, device, left)[0]):
            yield best.spec
            left = [x for x in left if tiles_of(x) != tiles_of(best.spec)]
            count -= 1

    known = dict.fromkeys([first, *considered_specs(problem)])
    tried = {tiles_of(spec) for spec in known}
    legal = (spec for kind in types_of(problem) for spec in tuner_specs(kind))
    others = (spec for spec in legal if tiles_of(spec) not in tried)
    usual = (spec for spec in known if spec != first)
    for spec in (first, *cheapest(usual, count - 1), *cheapest(others, untried)):
        yield spec, rough_estimate(problem, spec, device).ns / 1e3


def tiles_of(spec: GemmSpec) -> Config:
    """Returns a kernel's configuration but for its tile scheduler and epilogue tiles."""
    return replace(Config.of(spec), tile_scheduler="static", epi_tile_n=None)


def by_kernel(what: str, shape: Shape, of: GemmProblem, spec: GemmSpec) -> Callable[..., Any]:
    """Returns the product, compiled, by a kernel."""

    def choose(problem: GemmProblem, device: Device, *how: Any) -> Decision:
        if problem != of:  # asked about before or beside it
            return chosen(problem, device, *how)
        return Decision(spec, best_raster_order(problem, spec, device), "to be timed", "model")

    jax.clear_caches()  # of what another kernel was lowered for
    chosen = choice._choose
    with mock.patch.object(choice, "_choose", choose):
        function, *inputs = traced(what, shape)
        program = jax.jit(function).lower(*inputs)
    (launch,) = launches_in(program.compiler_ir("stablehlo"))
    if (launched := spec_from_json(launch.spec)) != spec:
        raise ValueError(f"{what} {shape}: {launched.name} ran for {spec.name}")
    return program.compile()


def built(what: str, shape: Shape, counts: tuple[int, int]) -> Iterator[KernelSpec]:
    """Yields the kernels of a product, and those that quantize its arguments."""
    for spec, _ in candidates(*decided(what, shape), *counts):
        yield spec
    yield from all_specs_of(partial(inputs_of, what), *abstract(shape))


def main() -> int:
    parser = command_line.parser(__doc__, rounds=2)
    parser.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT))
    parser.add_argument("--kernels", type=int, default=5, help="of each product [5]")
    parser.add_argument("--untried", type=int, default=0, help="more, of other tiles [0]")
    arguments = parser.parse_args()
    counts = arguments.kernels, arguments.untried
    if arguments.build:
        each = product(arguments.what, SHAPES)
        specs = chain.from_iterable(built(what, shape, counts) for what, shape in each)
        return command_line.build(specs, arguments.build)
    return measure(arguments, counts)


def measure(arguments: argparse.Namespace, counts: tuple[int, int]) -> int:
    command_line.begin("burst", f"{'':34} {'us':>8} {'fastest':>8} {'ratio':>7}  the choice")
    rows, ratios = [], []
    for what, shape in product(arguments.what, SHAPES):
        prepare = jax.jit(partial(inputs_of, what))
        sizes = jnp.asarray(SIZES["uneven"](shape.tokens, shape.experts, 0))
        inputs = [prepare(*arrays, sizes) for arrays in random_inputs(shape)]
        problem, device, first = decided(what, shape)
        specs, expected = zip(*candidates(problem, device, first, *counts), strict=True)
        bursts = {
            str(i): timing.burst(by_kernel(what, shape, problem, spec), inputs)
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
