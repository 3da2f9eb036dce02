"""Times one product over epilogue tiles and tile schedulers.

    python benchmarks/epilogue_tiles.py [--size 8192] [--json tiles.json]

All kernels have tiles of 128x256x64, cooperative, and spend the same shared memory on staged
epilogue tiles: 64 columns in 2 stages, 32 in 4, 16 in 8, for each math warpgroup. Takes turns,
in the burst regime, beside XLA. Each staged tile has 64 rows and leaves by one TMA store. The
dynamic scheduler's times include the clearing of its counter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from itertools import product
from pathlib import Path

from jax_hopper_gemm.gemm.problem import GemmProblem
from jax_hopper_gemm.gemm.spec import EPI_TILE_M, GemmSpec, RasterOrder
from jax_hopper_gemm.testing import benchmark, timing
from jax_hopper_gemm.testing.gpu import Gpu

EPILOGUES = ((64, 2), (32, 4), (16, 8))  # columns, stages
SCHEDULERS = ("single", "static", "dynamic")
CLUSTERS = ((1, 1), (2, 1))
REST_SECONDS = 0.05  # between measurements, so that the GPU stays cool


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=8192, help="M, N and K [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="turns [%(default)s]")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    problem = GemmProblem.dense(arguments.size, arguments.size, arguments.size)
    arrays = benchmark.random_inputs(problem)
    time_xla = timing.burst(benchmark.xla(problem, arrays), arrays)
    time_kernel = timing.KernelTimer(Gpu(), problem)
    kernels = [
        GemmSpec(
            "bfloat16", "bfloat16", "bfloat16", "k", "n", 128, 256, 64, cluster_m, cluster_n,
            tile_scheduler=scheduler, num_stages=4, epi_tile_n=columns, epi_stages=stages,
        )
        for (cluster_m, cluster_n), scheduler, (columns, stages) in product(
            CLUSTERS, SCHEDULERS, EPILOGUES
        )
    ]  # fmt: skip
    times: dict[GemmSpec | None, list[float]] = {spec: [] for spec in (None, *kernels)}
    for _ in range(arguments.rounds):
        for spec, measured in times.items():
            time.sleep(REST_SECONDS)
            xla = spec is None
            measured.append(
                statistics.median(time_xla()) if xla else time_kernel(spec, RasterOrder("m", 8))
            )
    medians = {spec: statistics.median(measured) for spec, measured in times.items()}
    print("cluster  scheduler  staged tile  stages  TMA stores        us    TF")
    for spec in kernels:
        stores = problem.m * problem.n // (EPI_TILE_M * spec.epi_tile_n)
        print(
            f"{spec.cluster_m}x{spec.cluster_n:<6} {spec.tile_scheduler:10} "
            f"({EPI_TILE_M},{spec.epi_tile_n}){'':6} {spec.epi_stages:5}  {stores:10,}  "
            f"{medians[spec]:8.1f} {problem.flops / medians[spec] / 1e6:5.0f}"
        )
    print(f"XLA: {medians[None]:.1f} us, {problem.flops / medians[None] / 1e6:.0f} TF")
    if arguments.json:
        rows = [
            {
                "cluster": [spec.cluster_m, spec.cluster_n],
                "scheduler": spec.tile_scheduler,
                "epi_tile_n": spec.epi_tile_n,
                "epi_stages": spec.epi_stages,
                "us": medians[spec],
            }
            for spec in kernels
        ]
        record = {
            "environment": benchmark.environment(),
            "problem": problem.to_dict(),
            "xla_us": medians[None],
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
