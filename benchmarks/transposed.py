"""Times kernels that compute D's transpose beside those that do not, and XLA.

    python benchmarks/transposed.py --build FOLDER      # anywhere: compiles the kernels
    JAX_HOPPER_GEMM_CUBINS=FOLDER python benchmarks/transposed.py --json transposed.json

Products are drawn by a seed as in `survey.py`, those whose smaller side of D has 8 to 700 elements
and whose K has 512 or more; those of the `heldout` suite are left out. Of each, XLA's product takes
turns with three kernels: that of least expected cost of those beside which XLA's time was fitted,
of all that store D along N, and of all. With `--wide` there are more, of both kinds, those expected
to be fastest of one height of tiles each, with K split and not, of tiles of all widths.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import lru_cache
from itertools import product
from pathlib import Path

from survey import survey

from jax_hopper_gemm import cubin
from jax_hopper_gemm.dispatch import H200
from jax_hopper_gemm.dispatch.candidates import (
    filled_spec,
    model_specs,
    surveyed_specs,
    worthwhile,
)
from jax_hopper_gemm.dispatch.configs import Config
from jax_hopper_gemm.dispatch.cost import best_raster_order, estimate
from jax_hopper_gemm.dispatch.legality import pairing_violations, split_violations
from jax_hopper_gemm.dispatch.model import best_kernel
from jax_hopper_gemm.dispatch.tuner import Candidate
from jax_hopper_gemm.gemm.grid import k_split
from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.spec import SWIZZLE_BYTES, GemmSpec, ProblemType
from jax_hopper_gemm.testing import benchmark, shapes

SIDES = 8, 700  # of the smaller side of D
LEAST_K = 512
ALONG_N, TRANSPOSED = 3, 5  # kernels of each kind beside the chosen one
CONFIGS = (
    *(
        Config(tile_m, tile_n, cluster_m=m, cluster_n=n, split_k=split_k)
        for tile_m, tile_n, (m, n), split_k in product(
            (64, 128, 256), range(16, 257, 16), ((1, 1), (2, 1), (1, 2)), (False, True)
        )
    ),
    *(
        Config(64, n, 2 * SWIZZLE_BYTES, short_boxes=True, evict_first=operand, split_k=split_k)
        for n, operand, split_k in product((16, 32, 48, 64, 128), ("a", "b"), (False, True))
    ),
)


def products(count: int, seed: int) -> list[GemmProblem]:
    least, most = SIDES
    held_out = set(shapes.suite("heldout"))
    drawn = shapes.random_products(20 * count, seed)
    chosen = [p for p in drawn if least <= min(p.m, p.n) <= most and p.k >= LEAST_K]
    return [p for p in chosen if p not in held_out][:count]


@lru_cache
def filled(problem_type: ProblemType) -> list[GemmSpec]:
    specs = (filled_spec(config, problem_type) for config in CONFIGS)
    return [spec for spec in specs if spec and worthwhile(spec)]


def fastest(problem: GemmProblem, d_major: str, count: int) -> list[GemmSpec]:
    """Returns the kernels of least expected cost, one of each height, whole and split."""
    specs = filled(ProblemType.of(problem if d_major == "n" else problem.transposed))
    legal = [
        spec
        for spec in specs
        if not pairing_violations(problem, spec) + split_violations(problem, spec, H200)
        and not (spec.split_k and not k_split(problem, spec, H200.num_sms).ranges)
    ]

    def cost(spec: GemmSpec) -> float:
        return estimate(problem, spec, best_raster_order(problem, spec, H200), H200).ns

    by_kind: dict[tuple[int, bool], GemmSpec] = {}
    for spec in sorted(legal, key=cost):
        by_kind.setdefault((spec.tile_m, spec.split_k), spec)
    return list(by_kind.values())[:count]


def candidates(problem: GemmProblem, *, wide: bool) -> list[Candidate]:
    kind = ProblemType.of(problem)
    sets = surveyed_specs(kind), model_specs(kind), None
    chosen = (best_kernel(problem, H200, specs) for specs in sets)
    found = [best.spec for best, _ in chosen if best]
    if wide:
        found += [*fastest(problem, "n", ALONG_N), *fastest(problem, "m", TRANSPOSED)]
    return [(spec, best_raster_order(problem, spec, H200)) for spec in dict.fromkeys(found)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", type=Path, metavar="FOLDER")
    parser.add_argument("--count", type=int, default=30, help="products [30]")
    parser.add_argument("--seed", type=int, default=3, help="that draws them [3]")
    parser.add_argument("--wide", action="store_true", help="time more kernels")
    parser.add_argument("--rounds", type=int, default=3, help="launches of each [3]")
    parser.add_argument("--seconds", type=float, default=500.0, help="after which it stops [500]")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    problems = products(arguments.count, arguments.seed)
    if arguments.build:
        found = (candidates(p, wide=arguments.wide) for p in problems)
        specs = dict.fromkeys(spec for of_problem in found for spec, _ in of_problem)
        report = cubin.build(list(specs), folder=arguments.build)
        print(report)
        return 1 if report.failures else 0
    device, start, rows = benchmark.this_device(), time.monotonic(), []
    for i, problem in enumerate(problems):
        if time.monotonic() - start > arguments.seconds:
            print(f"stopped after {i} of {len(problems)} products")
            break
        chosen = candidates(problem, wide=arguments.wide)
        times = survey(problem, chosen, arguments.rounds)
        p, xla = problem, times["xla"]
        print(f"{p.m}x{p.n}x{p.k} {shapes.layout_name(p)}: XLA {xla:.2f} us", flush=True)
        for spec, order in chosen:
            us, expected = times[spec.name], estimate(p, spec, order, device).ns / 1e3
            rows.append(
                {"m": p.m, "n": p.n, "k": p.k, "a_major": p.a.major, "b_major": p.b.major,
                 "kernel": spec.name, "us": us, "xla_us": xla, "expected_us": expected}
            )  # fmt: skip
            print(f"  {us:8.2f} us  {xla / us:.3f}  expected {expected:8.2f}  {spec.name}")
        if arguments.json:
            lines = ",\n".join("  " + json.dumps(row) for row in rows)
            facts = json.dumps(benchmark.environment())
            arguments.json.write_text(f'{{"environment": {facts},\n "rows": [\n{lines}\n ]}}\n')
    return 0


if __name__ == "__main__":
    sys.exit(main())
