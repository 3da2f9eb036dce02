"""Times candidate kernels and XLA over random dense products: the data of `fit_xla.py`.

    python benchmarks/survey.py --count 150 --json survey.json
    python benchmarks/survey.py --count 150 --build-only FOLDER   # compiles, needs no GPU

Products are drawn by a seed from extents of published models and log-uniformly, with all layouts;
those of the `heldout` suite are left out. Of each, the candidates of least expected cost are timed
in one program with XLA's own product, so that all share clock and temperature. The time of a
kernel is CUPTI's, the median over the rounds; every launch reads another set of inputs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jax_hopper_gemm import cubin
from jax_hopper_gemm.dispatch import H200, Device, choose, tuner
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.testing import benchmark, shapes, timing

RATE = 5e14  # FLOP/s that a pause between rounds is reckoned with


def candidates(problem: GemmProblem, device: Device, count: int) -> list[tuner.Candidate]:
    """Returns the kernel that dispatch chooses, and others of least expected cost.

    No two have the same name, by which a profile tells them apart.
    """
    by_name: dict[str, tuner.Candidate] = {}
    chosen = choose(problem, device, kernel_only=True)
    if chosen.spec and chosen.raster_order:
        by_name[chosen.spec.name] = chosen.spec, chosen.raster_order
    for spec, order in tuner.ranked_candidates(problem, device, count):
        by_name.setdefault(spec.name, (spec, order))
    return list(by_name.values())[:count]


def survey(
    problem: GemmProblem, chosen: Sequence[tuner.Candidate], rounds: int, num_sms: int
) -> dict[str, float]:
    """Returns microseconds by the kernel's name, and of "xla".

    Raises:
      RuntimeError: CUPTI did not see all kernels.
    """
    from jax.experimental.mosaic.gpu import profiler

    inputs = benchmark.random_inputs(problem)
    kernels = [benchmark.one_kernel(problem, *x, num_sms) for x in chosen]
    product = benchmark.MAKERS["xla"](problem, inputs)
    assert product

    @jax.jit
    def run(inputs: list[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
        functions = [product, *kernels]
        return [f(*inputs[i % len(inputs)]) for i, f in enumerate(functions)]

    timed = profiler.measure(run, aggregate=False)
    specs = {spec.name: spec for spec, _ in chosen}
    names = {cubin.get(spec).manifest.entry: name for name, spec in specs.items()}
    samples: dict[str, list[float]] = defaultdict(list)
    for turn in range(rounds):
        time.sleep(min(1.0, 2 * len(chosen) * problem.flops / RATE))
        shift = turn % len(inputs)
        _, launches = timed(inputs[shift:] + inputs[:shift])
        totals: dict[str, float] = defaultdict(float)
        for kernel, ms in launches or ():
            totals[names.get(kernel, "xla")] += ms * 1e3
        for name in totals:
            samples[name].append(totals[name])
    if missing := specs.keys() - samples.keys():
        raise RuntimeError(f"CUPTI saw no {', '.join(sorted(missing))}")
    return {
        name: statistics.median(times) + timing.clearing(specs.get(name))
        for name, times in samples.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=150, help="products [150]")
    parser.add_argument("--seed", type=int, default=1, help="that draws them [1]")
    parser.add_argument("--candidates", type=int, default=12, help="kernels a product [12]")
    parser.add_argument("--rounds", type=int, default=3, help="launches of each [3]")
    parser.add_argument("--seconds", type=float, default=500.0, help="after which it stops [500]")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--build-only", type=Path, metavar="FOLDER", help="build the kernels")
    arguments = parser.parse_args()
    problems = shapes.random_products(arguments.count, arguments.seed)
    problems = [p for p in problems if p not in shapes.suite("heldout")]
    if arguments.build_only:
        chosen = (x for p in problems for x in candidates(p, H200, arguments.candidates))
        report = cubin.build(list(dict.fromkeys(s for s, _ in chosen)), folder=arguments.build_only)
        print(report)
        return 1 if report.failures else 0
    device, start = benchmark.this_device(), time.monotonic()
    numbers: dict[str, int] = {}  # of kernels, by name
    rows: list[dict[str, Any]] = []
    for problem in problems:
        if time.monotonic() - start > arguments.seconds:
            print(f"stopped after {len(rows)} of {len(problems)} products")
            break
        chosen = candidates(problem, device, arguments.candidates)
        times = survey(problem, chosen, arguments.rounds, device.num_sms)
        row: dict[str, Any] = {x: getattr(problem, x) for x in ("m", "n", "k")}
        row |= {"a_major": problem.a.major, "b_major": problem.b.major}
        row["xla_us"] = round(times.pop("xla"), 2)
        row["kernels"] = [numbers.setdefault(name, len(numbers)) for name in times]
        row["us"] = [round(us, 2) for us in times.values()]
        rows.append(row)
        best = min(times.values())
        print(f"{problem.m}x{problem.n}x{problem.k} {shapes.layout_name(problem)} "
              f"XLA {row['xla_us']} us, ours {best:.1f} us", flush=True)  # fmt: skip
    if arguments.json:
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        names = ",\n".join("  " + json.dumps(name) for name in numbers)
        facts = json.dumps(benchmark.environment())
        arguments.json.write_text(
            f'{{"environment": {facts},\n "names": [\n{names}\n ],\n "rows": [\n{lines}\n ]}}\n'
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
