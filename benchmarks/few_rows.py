"""Times kernels for few rows of A against `jnp.matmul`, in turns on the same random inputs.

    python benchmarks/few_rows.py --build FOLDER        compiles what is timed; needs no GPU
    JAX_HOPPER_GEMM_CUBINS=FOLDER python benchmarks/few_rows.py --json few_rows.json

Of each product: XLA, the kernel that dispatch chooses when forced, its kernel of whole boxes, and
streams of B that differ in tile, depth of a k-tile and what L2 evicts first. With `--transposed`
streams that compute D's transpose in their place. Burst regime, CUPTI.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import command_line

from jax_hopper_gemm import dispatch
from jax_hopper_gemm.dispatch.candidates import filled_spec
from jax_hopper_gemm.dispatch.configs import Config
from jax_hopper_gemm.dispatch.memory_traffic import best_raster_order
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.problem_type import ProblemType
from jax_hopper_gemm.gemm.spec import GemmSpec, TileScheduler
from jax_hopper_gemm.lowering.devices import current_device
from jax_hopper_gemm.testing import benchmark, shapes, timing

TILES_N = (32, 64, 128)
K_BYTES = (128, 256)


def streams(problem: GemmProblem, schedulers: Sequence[TileScheduler]) -> dict[str, GemmSpec]:
    """Returns the kernels to try, by what sets them apart."""
    problem_type = ProblemType.of(problem)
    found = {}
    for tile_n in TILES_N:
        for k_bytes in K_BYTES:
            for scheduler in schedulers:
                for evicted in ("b", None):
                    config = Config(
                        64, tile_n, k_bytes, tile_scheduler=scheduler, short_boxes=True,
                        evict_first=evicted,
                    )  # fmt: skip
                    spec = filled_spec(config, problem_type)
                    if spec is not None:
                        name = f"{tile_n}x{k_bytes // 2}-{scheduler}-{evicted or 'keep'}"
                        found[name] = spec
    return found


def transposed_streams(problem: GemmProblem) -> dict[str, GemmSpec]:
    """Returns kernels that have the rows on the tile's columns, one for each height of tiles."""
    p = problem.transposed
    tile_n = next((n for n in (16, 32, 48, 64) if n >= p.n), 64)
    found = {}
    for tile_m, k_bytes in ((64, 256), (128, 256), (256, 128)):
        config = Config(tile_m, tile_n, k_bytes, short_boxes=True, evict_first="a")
        if spec := filled_spec(config, ProblemType.of(p)):
            found[f"{tile_m}x{tile_n}x{k_bytes // 2}-transposed"] = spec
    return found


def candidates(
    problem: GemmProblem, schedulers: Sequence[TileScheduler], *, transposed: bool
) -> Iterator[tuple[str, GemmSpec]]:
    forced = dispatch.choose(problem, current_device(), kernel_only=True).spec
    if forced is not None:
        yield "forced", forced
        if transposed:
            yield from transposed_streams(problem).items()
            return
        if forced.short_boxes:
            yield "whole boxes", replace(forced, short_boxes=False)
    yield from streams(problem, schedulers).items()


def main() -> int:
    parser = command_line.parser(__doc__, rounds=3)
    parser.add_argument("--rows", type=int, nargs="+", help="of A [all]")
    parser.add_argument("--schedulers", nargs="+", default=["static"])
    parser.add_argument("--transposed", action="store_true")
    arguments = parser.parse_args()
    problems = list(shapes.suite("few_rows"))
    if arguments.rows:
        problems = [problem for problem in problems if problem.m in arguments.rows]
    if arguments.build:
        options = {"schedulers": arguments.schedulers, "transposed": arguments.transposed}
        specs = (s for p in problems for _, s in candidates(p, **options))
        return command_line.build(specs, arguments.build)
    return measure(problems, arguments)


def measure(problems: list[GemmProblem], arguments: argparse.Namespace) -> int:
    device = benchmark.this_device()
    rows = []
    for problem in problems:
        inputs = benchmark.random_inputs(problem)
        functions = {"xla": benchmark.MAKERS["xla"](problem, inputs)}
        by_spec: dict[GemmSpec, str] = {}
        found = candidates(problem, arguments.schedulers, transposed=arguments.transposed)
        for name, spec in found:
            if spec in by_spec:  # timed once
                continue
            by_spec[spec] = name
            order = best_raster_order(problem, spec, device)
            functions[name] = benchmark.one_kernel(problem, spec, order, device.num_sms)
        bursts = {name: timing.burst(f, inputs) for name, f in functions.items() if f}
        timings = timing.alternate(bursts, arguments.rounds, rest=lambda: time.sleep(0.01))
        xla = timings["xla"].median
        what = f"{problem.m}x{problem.n}x{problem.k} {shapes.layout_name(problem)}"
        ranked = sorted((t.median, name) for name, t in timings.items() if name != "xla")
        text = "  ".join(f"{name} {us:.1f} ({xla / us:.3f})" for us, name in ranked[:5])
        ours = next((t.median for name, t in timings.items() if name == "forced"), xla)
        print(f"{what:28} xla {xla:.1f}  forced {ours:.1f} ({xla / ours:.3f})  {text}", flush=True)
        rows.append({"problem": what, **{name: t.to_dict() for name, t in timings.items()}})
    return command_line.write(arguments.json, rows)


if __name__ == "__main__":
    sys.exit(main())
